package sim

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/torchft/torchft/go/internal/fttest"
)

// schedule begins each fault at its time.
func (j *job) schedule() {
	for i := range j.setup.faults {
		f := &j.setup.faults[i]
		if !sleep(j.ctx, f.at-time.Since(j.start)) {
			return
		}
		j.running.Add(1)
		j.tasks.Go(func() {
			defer j.running.Add(-1)
			j.strike(f)
		})
	}
	j.running.Add(-1)
}

// strike carries out a fault, from its begin to its end.
func (j *job) strike(f *fault) {
	j.note(func(judge *judge) { judge.begins(f) })
	switch f.kind {
	case killLighthouse, vanishLighthouse:
		j.lighthouse.crash(f.kind == vanishLighthouse, f.lasts)
	case noise:
		for end := time.Now().Add(f.lasts); time.Now().Before(end) && sleep(j.ctx, 200*time.Millisecond); {
			j.resetOne()
		}
	default:
		var groups []*group
		j.note(func(*judge) { groups = append(groups, j.groups...) })
		for slot, g := range groups {
			if (f.kind == finish || f.slots.has(slot)) && g != nil {
				g.strike(f)
			}
		}
	}
	end := j.disturb(f)
	if f.kind != noise {
		sleep(j.ctx, f.lasts)
	}
	end()
	j.note(func(judge *judge) { judge.ends(f) })
}

// strike begins a fault in one group.
func (g *group) strike(f *fault) {
	j := g.j
	last := g.ranks[len(g.ranks)-1]
	switch f.kind {
	case crash, vanish:
		g.end(f.kind, "killed", f.lasts)
	case leave:
		g.end(leave, "it shuts down", f.lasts)
	case finish:
		g.note(func(*judge) { g.life.finished = true })
		g.end(leave, "its training ends", f.lasts)
	case rankFails:
		if r := g.ranks[min(int(f.n), len(g.ranks)-1)]; r.index > 0 {
			j.net.Host(r.host).Kill()
			g.note(func(*judge) {
				r.kill()
				r.model.phase = killed
				r.leaveComm(false)
			})
		}
		j.after(f.lasts, func() { g.end(crash, "a rank of it ended", 0) })
	case pause:
		g.note(func(*judge) { g.stopped = time.Now().Add(f.lasts) })
	case stall:
		g.note(func(*judge) { g.stalled = time.Now().Add(f.lasts) })
	case flaky:
		g.note(func(*judge) {
			for _, r := range g.ranks {
				r.flaky = true
			}
		})
	case loseVote:
		g.note(func(*judge) { last.loseVote = true })
	case dropRank:
		j.net.Host(last.host).Cut()
	case shrinkOnly:
		g.note(func(*judge) { g.shrink = int(f.n) })
	case accuse:
		if client := g.ranks[0].client; client != nil {
			g.ranks[0].accuse()
		}
	case signal:
		r := g.ranks[min(int(f.n), len(g.ranks)-1)]
		g.note(func(*judge) { r.signaled, g.life.hinted = true, true })
		if client := r.client; client != nil {
			fttest.RequestDrain(client) // the report may be lost: the rank's next request repeats it
		}
	case drain:
		j.drain(g.life.id)
	case claim:
		g.note(func(*judge) { g.claims = true })
		j.after(f.lasts, func() { g.note(func(*judge) { g.claims = false }) })
	}
}

// drain requests that a group leaves, as an operator on the lighthouse's host.
func (j *job) drain(id string) {
	host := j.net.Host(lighthouseName)
	transport := &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			return host.Dial(ctx, address)
		}}
	client := &http.Client{Transport: transport, Timeout: 2 * time.Second}
	body := bytes.NewBufferString(fmt.Sprintf(`{"replica_id": %q}`, id))
	if resp, err := client.Post("http://"+lighthouseName+":29510/api/v1/drain", "application/json",
		body); err == nil {
		_ = resp.Body.Close()
	}
}

// disturb changes the network until the fault ends.
func (j *job) disturb(f *fault) (end func()) {
	var ends []func()
	pair := func(from, to string) {
		j.net.Sever(from, to)
		ends = append(ends, func() { j.net.Heal(from, to) })
	}
	resets := f.at%2 == 1 // a device between the hosts resets the connections
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
	if f.kind == pauseLighthouse {
		j.net.Pause(lighthouseName)
		ends = append(ends, func() { j.net.Resume(lighthouseName) })
	}
	for slot := range j.setup.slots {
		name := machineOf(slot)
		if !f.slots.has(slot) {
			continue
		}
		switch f.kind {
		case pause:
			j.net.Pause(name)
			ends = append(ends, func() { j.net.Resume(name) })
		case slow:
			j.slower(name, 1)
			ends = append(ends, func() { j.slower(name, -1) })
		case partition, cutLighthouse, cutUp, cutDown:
			both(name, lighthouseName, f.kind != cutDown, f.kind != cutUp)
		}
		if f.kind == partition || f.kind == cutPeers || f.kind == cutPeersOneWay {
			for other := range j.setup.slots {
				if !f.slots.has(other) {
					both(name, machineOf(other), true, f.kind != cutPeersOneWay)
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
	n := j.setup.slots + 1
	name := func() string {
		if i := int(j.upTo(time.Duration(n - 1))); i < j.setup.slots {
			return machineOf(i)
		}
		return lighthouseName
	}
	j.net.Reset(name(), name())
}
