package sim

import (
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"strings"
	"time"
)

// Slots is a set of slots, with one bit for each.
type Slots uint64

func (s Slots) has(i int) bool { return s>>i&1 == 1 }

func (s Slots) String() string {
	var names []string
	for i := range 64 {
		if s.has(i) {
			names = append(names, fmt.Sprintf("g%02d", i))
		}
	}
	return strings.Join(names, " ")
}

// FaultKind is the kind of a fault.
type FaultKind int

const (
	Crash            FaultKind = iota // processes of groups are killed; their hosts close the connections
	Vanish                            // hosts of groups vanish, without a sign to the others
	RankFails                         // rank N of groups ends, and then its group
	Leave                             // groups shut down properly
	KillLighthouse                    // the lighthouse is killed, and started again without its memory
	VanishLighthouse                  // the host of the lighthouse vanishes
	Partition                         // groups are cut off from the lighthouse and from all other groups
	CutLighthouse                     // groups are cut off from the lighthouse only
	CutUp                             // messages of groups do not reach the lighthouse; their connections break later
	CutDown                           // messages of the lighthouse do not reach groups; their connections break later
	CutPeers                          // groups are cut off from the other groups, not from the lighthouse
	CutPeersOneWay                    // messages of groups do not reach the other groups
	Pause                             // groups are stopped: SIGSTOP, or a snapshot of a virtual machine
	PauseLighthouse                   // the lighthouse is stopped
	Slow                              // groups compute and answer slowly
	ClockJump                         // clocks of groups move ahead
	ClockLighthouse                   // the lighthouse's clock moves ahead, or back if N < 0
	Noise                             // messages are lost and duplicated
	Flaky                             // the next collective of groups fails at its end, when peers may have finished
	LoseVote                          // the next decision does not reach the last rank of groups
	DropRank                          // the connection of the last rank of groups to its manager server breaks; with N = 0, at the rank's next call
	ShrinkOnly                        // groups set shrink_only for N steps
	Stall                             // groups do not reach their collective, while their manager servers are alive
	Accuse                            // groups falsely report a failed collective with a healthy peer
	Drain                             // an operator requests that groups leave
	Claim                             // groups falsely claim to know a later quorum, and show none
	Withhold                          // groups do not show the quorum that they know
	Signal                            // rank N of groups is asked to leave, as by SIGTERM
	Finish                            // the training of groups, with N = 1 of all groups, is complete; another one begins

	faultKinds
	drawnKinds = Claim // kinds from here on are not drawn: a setup requests them, or variant replaces others by them
)

var faultWords = [faultKinds]string{
	"crash", "vanish", "a rank fails", "leave", "the lighthouse is killed", "the host of the lighthouse vanishes",
	"partition", "cut from the lighthouse", "cut towards the lighthouse", "cut on the way back from the lighthouse",
	"cut from peers", "cut towards peers", "pause", "the lighthouse pauses", "slow", "clock jumps",
	"the lighthouse's clock jumps", "noise", "the next collective fails", "the decision is lost",
	"a connection of a rank breaks", "shrink_only", "stall", "accuse a peer", "drain", "claim a quorum",
	"withhold a quorum", "a rank is asked to leave", "the training ends",
}

// Fault is one fault. It begins when the duration After has passed since the quorum with number Round, and affects the groups in Slots.
type Fault struct {
	Round int
	After time.Duration
	Kind  FaultKind
	Slots Slots
	For   time.Duration
	N     int64
}

func (f Fault) String() string {
	s := fmt.Sprintf("after quorum %d + %s: %s", f.Round, f.After.Round(time.Millisecond), faultWords[f.Kind])
	if f.Slots != 0 {
		s += " (" + f.Slots.String() + ")"
	}
	if f.For > 0 {
		s += fmt.Sprintf(" for %s", f.For.Round(time.Millisecond))
	}
	if f.N != 0 {
		s += fmt.Sprintf(" [%d]", f.N)
	}
	return s
}

// drawFaults returns a schedule in which, on average, one fault begins in the given number of rounds (every). Some faults come alone,
// some in bursts.
func drawFaults(r *rand.Rand, s Setup, every int) []Fault {
	var faults []Fault
	for n := s.Rounds / every; n > 0; {
		burst := 1
		if r.IntN(3) == 0 {
			burst = min(n, 2+r.IntN(4))
		}
		// The pause before a burst is as long as the pauses before the same number of single faults.
		done := len(faults)
		last := 0
		if done > 0 {
			last = faults[done-1].Round
		}
		round := last + 1 + r.IntN(2*every*burst-1)
		for range burst {
			f := drawFault(r, s).variant(s)
			f.Round = min(round, s.Rounds)
			faults = append(faults, f)
		}
		n -= burst
	}
	return faults
}

func drawFault(r *rand.Rand, s Setup) Fault {
	f := Fault{
		Kind:  FaultKind(r.IntN(int(drawnKinds))),
		After: time.Duration(r.Int64N(int64(4 * s.Compute))),
		For:   time.Duration(r.Int64N(int64(s.Timeout))),
		Slots: 1 << r.IntN(s.Slots),
	}
	switch r.IntN(8) {
	case 0: // many at once
		f.Slots = Slots(r.Uint64()) & (1<<s.Slots - 1)
	case 1:
		f.Slots |= 1 << r.IntN(s.Slots)
	}
	if r.IntN(6) == 0 {
		f.For += s.Policy.HeartbeatTimeout + s.Policy.JoinTimeout
	}
	switch f.Kind {
	case KillLighthouse, VanishLighthouse, PauseLighthouse, Noise:
		f.Slots = 0
	case RankFails:
		f.N = r.Int64N(int64(s.Ranks))
	case ClockLighthouse:
		f.Slots, f.N = 0, int64(100+r.IntN(2000))
		if r.IntN(3) == 0 {
			f.N = -int64(r.IntN(200))
		}
	case ClockJump:
		f.N = int64(100 + r.IntN(2000))
	case DropRank:
		f.N = r.Int64N(2)
	case ShrinkOnly:
		f.N = int64(1 + r.IntN(5))
	}
	switch f.Kind {
	case ClockJump, ClockLighthouse, Flaky, LoseVote, DropRank, ShrinkOnly, Accuse, Drain:
		f.For = 0
	}
	return f
}

// variant replaces some faults of a schedule by similar ones: half of the drains are signals to a rank, and a quarter of the groups that
// leave complete the training of all groups.
func (f Fault) variant(s Setup) Fault {
	switch {
	case f.Kind == Drain && f.After%2 == 1:
		f.Kind, f.N = Signal, int64(f.After/2)%int64(s.Ranks)
	case f.Kind == Leave && f.After%4 == 1:
		f.Kind, f.N = Finish, 1
	}
	return f
}

func (w *world) beginFault(f *Fault) {
	w.result.FaultsHit++
	w.mayLose += f.cost(&w.Setup)
	w.changed = w.now
	if w.trace != nil {
		what := *f
		what.Round, what.After = w.result.Rounds, 0
		w.logf("FAULT %s", what)
	}
	switch f.Kind {
	case KillLighthouse, VanishLighthouse:
		w.lh.crash(f.Kind == VanishLighthouse, f.For)
	case PauseLighthouse:
		w.lh.pausedUntil = max(w.lh.pausedUntil, w.now+f.For)
	case ClockLighthouse:
		w.lh.jump(time.Duration(f.N) * time.Millisecond)
	case Noise:
		w.noise++
	default:
		for i := range w.slots {
			if f.Slots.has(i) || f.Kind == Finish && f.N == 1 {
				w.strike(f, i)
			}
		}
	}
	if f.rough(&w.Setup) {
		w.rough++
	}
	if f.For > 0 {
		w.after(f.For, event{kind: faultEnd, id: w.faultNumber(f)})
	}
}

// cost returns how many steps a fault may cost each rank, in the affected groups and in the others: docs/correctness.md has the
// table. Some faults cost steps repeatedly while they last.
func (f *Fault) cost(s *Setup) int {
	switch f.Kind {
	case PauseLighthouse, ClockLighthouse, LoseVote, ShrinkOnly, Accuse, Drain, Signal, Withhold:
		return 0
	case Crash, RankFails, Leave, Finish:
		return 2 // the step whose data a peer was still receiving, and the next one, whose quorum already included the failed group
	case CutPeers, CutPeersOneWay, Slow:
		return 2 + int(f.For/s.Timeout)
	case Flaky:
		return s.Ranks
	case Noise:
		return math.MaxInt32 // each lost message is a fault
	default:
		return 1
	}
}

// rough reports whether the rules with a time limit are suspended while the fault lasts. A group that stays slow makes the others
// lose each step if it computes for longer than they wait.
func (f *Fault) rough(s *Setup) bool {
	if f.Kind == Slow && f.For == 0 {
		return s.slowStep() > s.Timeout
	}
	return f.For > 0 && (f.Kind == Claim && !s.OnlyClaims || f.Kind == Withhold || f.Kind == Pause || f.Kind == PauseLighthouse || f.Kind == Slow || f.Kind == Noise || f.Kind == Stall)
}

func (w *world) faultNumber(f *Fault) uint64 {
	for i := w.next - 1; i >= 0; i-- {
		if &w.Faults[i] == f {
			return uint64(i)
		}
	}
	panic("sim: a fault that is not in the schedule")
}

// strike begins a fault in one slot.
func (w *world) strike(f *Fault, i int) {
	s := &w.slots[i]
	g := s.g
	switch f.Kind {
	case Partition:
		w.cut(f, i, 1)
		s.cutUp++
		s.cutDown++
	case CutLighthouse, CutUp, CutDown:
		s.cutUp += toInt(f.Kind != CutDown)
		s.cutDown += toInt(f.Kind != CutUp)
	case CutPeers, CutPeersOneWay:
		w.cut(f, i, 1)
	case Slow:
		s.slow++
	}
	if g == nil {
		return
	}
	switch f.Kind {
	case Crash, Vanish:
		g.crash(f.Kind == Vanish, "killed")
		w.after(f.For, event{kind: slotStart, id: uint64(i)})
	case Leave, Finish:
		g.finished = f.Kind == Finish
		g.shutDown()
		w.after(f.For, event{kind: slotStart, id: uint64(i)})
	case RankFails:
		r := &g.ranks[min(int(f.N), len(g.ranks)-1)]
		if r.index == 0 {
			w.restart(g, "rank 0 ended", f.For)
			return
		}
		r.number++
		r.phase, r.deadline = killed, 0
		r.leaveComm(false)
		w.after(w.delay(i), event{kind: rankDisconnected, g: g, rank: int16(r.index)})
	case Pause:
		g.pausedUntil = max(g.pausedUntil, w.now+f.For)
	case ClockJump:
		g.jump(time.Duration(f.N) * time.Millisecond)
	case Flaky:
		for r := range g.ranks {
			g.ranks[r].flaky = true
		}
	case LoseVote:
		g.ranks[len(g.ranks)-1].loseVote = true
	case DropRank:
		r := &g.ranks[len(g.ranks)-1]
		switch {
		case r.index == 0: // no connection can break: the rank runs in the process of its manager server
		case f.N == 0:
			r.dropsConns = true
		default: // at once, in any phase of the rank, for up to four times rankGrace
			w.after(0, event{kind: rankDisconnected, g: g, rank: int16(r.index)})
			w.after(w.upTo(4*w.rankGrace()), event{kind: rankBack, g: g, rank: int16(r.index)})
		}
	case ShrinkOnly:
		g.shrink = int(f.N)
	case Stall:
		for r := range g.ranks {
			g.ranks[r].stalledUntil = w.now + f.For
		}
	case Claim:
		g.claims, g.claimed = true, true
	case Withhold:
		g.withholds = w.now + f.For
	case Signal:
		g.ranks[min(int(f.N), len(g.ranks)-1)].signalled = true
	case Accuse:
		g.accuse()
	case Drain:
		if l := &w.lh; l.up {
			w.after(w.delay(i), event{kind: lhDrain, g: g, life: l.life})
		}
	}
}

func (w *world) endFault(f *Fault) {
	w.changed = w.now
	if f.Kind == Noise {
		w.noise--
	}
	if f.rough(&w.Setup) {
		w.rough--
	}
	for i := range w.slots {
		if !f.Slots.has(i) {
			continue
		}
		s := &w.slots[i]
		switch f.Kind {
		case Partition:
			w.cut(f, i, -1)
			s.cutUp--
			s.cutDown--
		case CutLighthouse, CutUp, CutDown:
			s.cutUp -= toInt(f.Kind != CutDown)
			s.cutDown -= toInt(f.Kind != CutUp)
		case CutPeers, CutPeersOneWay:
			w.cut(f, i, -1)
		case Slow:
			s.slow--
		case Claim:
			if s.g != nil {
				s.g.claims = false
			}
		case RankFails:
			if g := s.g; g != nil && g.ranks[min(int(f.N), len(g.ranks)-1)].phase == killed {
				w.restart(g, "a rank of it ended", 0)
			}
		}
	}
	switch f.Kind {
	case Partition, CutLighthouse, CutUp, CutDown, CutPeers, CutPeersOneWay, Pause, PauseLighthouse, Slow, Noise, Stall, Claim, Withhold:
		if w.trace != nil {
			w.logf("over: %s (%s)", faultWords[f.Kind], f.Slots)
		}
	}
}

// cut changes the number of cuts between slot i, which the fault affects, and the slots that it does not affect.
func (w *world) cut(f *Fault, i, by int) {
	for j := range w.slots {
		if f.Slots.has(j) {
			continue
		}
		w.links[i][j] += by
		if f.Kind != CutPeersOneWay {
			w.links[j][i] += by
		}
	}
	w.cuts += by * bits.OnesCount64(uint64(f.Slots))
}

// jump moves a group's clock ahead: its deadlines pass sooner.
func (g *group) jump(by time.Duration) {
	w := g.w
	for i := range g.ranks {
		r := &g.ranks[i]
		if r.deadline > 0 {
			r.deadline = max(w.now, r.deadline-by)
			r.arm()
		}
	}
	g.spoke -= by
	if g.asking.active {
		g.asking.deadline = max(w.now, g.asking.deadline-by)
		g.armAsk()
	}
}

func toInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (k FaultKind) ofLighthouse() bool {
	return k == KillLighthouse || k == VanishLighthouse || k == PauseLighthouse || k == ClockLighthouse || k == Noise
}
