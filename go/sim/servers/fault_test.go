package servers

import (
	"time"

	"github.com/torchft/torchft/go/sim"
)

// schedule begins each fault after its quorum.
func (j *job) schedule() {
	for i := range j.setup.Faults {
		f := &j.setup.Faults[i]
		for rounds := -1; rounds < f.Round; {
			if !sleep(j.ctx, 50*time.Millisecond) {
				return
			}
			j.note(func(judge *sim.Judge) { rounds = judge.Result().Rounds })
		}
		j.running.Add(1)
		j.after(f.After, func() {
			defer j.running.Add(-1)
			j.strike(f)
		})
	}
	j.running.Add(-1)
}

// strike carries out a fault, from its begin to its end. All processes share the clock of the bubble, so no clock can jump.
func (j *job) strike(f *sim.Fault) {
	if f.Kind == sim.ClockJump || f.Kind == sim.ClockLighthouse {
		return
	}
	j.note(func(judge *sim.Judge) { judge.Begins(f) })
	switch f.Kind {
	case sim.KillLighthouse, sim.VanishLighthouse:
		j.lighthouse.crash(f.Kind == sim.VanishLighthouse, f.For)
		return // the restart is reported by Judge.Lighthouse
	case sim.Noise:
		for end := time.Now().Add(f.For); time.Now().Before(end) && sleep(j.ctx, 200*time.Millisecond); {
			j.resetOne()
		}
	default:
		var groups []*group
		j.note(func(*sim.Judge) { groups = append(groups, j.groups...) })
		for slot, g := range groups {
			if all := f.Kind == sim.Finish && f.N == 1; (all || f.Slots>>slot&1 == 1) && g != nil {
				g.strike(f)
			}
		}
	}
	end := j.disturb(f)
	sleep(j.ctx, f.For)
	end()
	j.note(func(judge *sim.Judge) { judge.Ends(f) })
}

// strike begins a fault in one group.
func (g *group) strike(f *sim.Fault) {
	j := g.j
	switch f.Kind {
	case sim.Crash, sim.Vanish:
		g.end(f.Kind, "killed", f.For)
	case sim.Leave:
		if f.After%2 == 0 && len(g.ranks) == 1 {
			g.note(func(*sim.Judge) { g.leaves = true })
			return
		}
		g.end(sim.Leave, "it shuts down", f.For)
	case sim.Finish:
		g.note(func(*sim.Judge) { g.finishes = true })
		g.end(sim.Leave, "its training ends", f.For)
	case sim.RankFails:
		if r := g.ranks[min(int(f.N), len(g.ranks)-1)]; r.index > 0 {
			j.net.Host(r.host).Kill()
			g.note(func(*sim.Judge) {
				r.kill()
				r.leaveComm(false)
			})
		}
		j.after(f.For, func() { g.end(sim.Crash, "a rank of it ended", 0) })
	case sim.Pause:
		g.note(func(*sim.Judge) { g.stopped = time.Now().Add(f.For) })
	case sim.Flaky:
		g.note(func(*sim.Judge) {
			for _, r := range g.ranks {
				r.flaky = true
			}
		})
	case sim.LoseVote:
		g.note(func(*sim.Judge) { g.ranks[len(g.ranks)-1].loseVote = true })
	case sim.DropRank:
		j.net.Host(g.ranks[len(g.ranks)-1].host).Cut()
	case sim.ShrinkOnly:
		g.note(func(*sim.Judge) { g.shrink = int(f.N) })
	}
}

// disturb changes the network until the fault ends.
func (j *job) disturb(f *sim.Fault) (end func()) {
	var ends []func()
	pair := func(from, to string) {
		j.net.Sever(from, to)
		ends = append(ends, func() { j.net.Heal(from, to) })
	}
	resets := f.After%2 == 1 // a device between the hosts resets the connections
	both := func(a, b string, there, back bool) {
		if resets {
			j.net.Reset(a, b)
		}
		if there {
			pair(a, b)
		}
		if back {
			pair(b, a)
		}
	}
	if f.Kind == sim.PauseLighthouse {
		j.net.Pause(lighthouseName)
		ends = append(ends, func() { j.net.Resume(lighthouseName) })
	}
	for slot := range j.setup.Slots {
		name := machineOf(slot)
		if f.Slots>>slot&1 == 0 {
			continue
		}
		switch f.Kind {
		case sim.Pause:
			j.net.Pause(name)
			ends = append(ends, func() { j.net.Resume(name) })
		case sim.Slow:
			j.slower(name, 1)
			ends = append(ends, func() { j.slower(name, -1) })
		case sim.Partition, sim.CutLighthouse, sim.CutUp, sim.CutDown:
			both(name, lighthouseName, f.Kind != sim.CutDown, f.Kind != sim.CutUp)
		}
		if f.Kind == sim.Partition || f.Kind == sim.CutPeers || f.Kind == sim.CutPeersOneWay {
			for other := range j.setup.Slots {
				if f.Slots>>other&1 == 0 {
					both(name, machineOf(other), true, f.Kind != sim.CutPeersOneWay)
				}
			}
		}
	}
	return func() {
		for _, end := range ends {
			end()
		}
	}
}

func (j *job) slower(machine string, by int) {
	j.netMu.Lock()
	defer j.netMu.Unlock()
	j.slow[machine] += by
}

// resetOne breaks all connections between two machines.
func (j *job) resetOne() {
	j.netMu.Lock()
	n := j.setup.Slots + 1
	a, b := j.rng.IntN(n), j.rng.IntN(n)
	j.netMu.Unlock()
	name := func(i int) string {
		if i < j.setup.Slots {
			return machineOf(i)
		}
		return lighthouseName
	}
	j.net.Reset(name(a), name(b))
}
