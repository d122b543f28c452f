package servers

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/membership/lighthouses"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/sim"
)

// group is one incarnation of a replica group: a real manager server, and ranks.
type group struct {
	j      *job
	slot   int
	id     string
	host   *fttest.Host
	name   string
	ctx    context.Context
	cancel context.CancelFunc

	// The job's mu guards these.
	killed   bool
	leaves   bool // it leaves at the end of its step
	finishes bool // its training is complete when it leaves
	shrink   int  // steps for which it asks shrink_only
	stopped  time.Time
	ranks    []*rank
}

// begin starts a group in a slot, if there is none.
func (j *job) begin(slot int) {
	if j.ctx.Err() != nil {
		return
	}
	g := &group{j: j, slot: slot}
	g.ctx, g.cancel = context.WithCancel(j.ctx)
	started := false
	j.note(func(judge *sim.Judge) {
		if j.groups[slot] != nil {
			return
		}
		started = true
		j.lives[slot]++
		g.name = fmt.Sprintf("%s.%d", machineOf(slot), j.lives[slot])
		g.id = judge.Starts(slot)
		j.groups[slot] = g
		for i := range j.setup.Ranks {
			g.ranks = append(g.ranks, newRank(g, i, judge.Model(g.id, i)))
		}
	})
	if !started {
		g.cancel()
		return
	}
	if j.lives[slot] > 1 { // the host of the previous incarnation may have vanished: it is up again
		j.net.Host(fmt.Sprintf("%s.%d", machineOf(slot), j.lives[slot]-1)).Refuse()
	}
	g.host = j.net.Host(g.name)
	j.tasks.Go(g.run)
}

// run plays the process with the manager server. The process is restarted until it reaches a lighthouse.
func (g *group) run() {
	defer g.cancel()
	var server *manager.Server
	for server == nil {
		var err error
		if server, err = g.serve(); err != nil && !sleep(g.ctx, time.Second) {
			return
		}
	}
	for _, r := range g.ranks {
		g.j.tasks.Go(func() { r.run(server.Address()) })
	}
	<-g.ctx.Done()
	start := time.Now()
	finishes := false
	g.j.note(func(*sim.Judge) { finishes = g.finishes })
	if finishes {
		server.Finish()
	}
	server.Shutdown()
	g.j.note(func(judge *sim.Judge) {
		if took := time.Since(start); took > shutdownTime {
			judge.Break("the server of %s took %s to shut down", g.id, took)
		}
	})
}

// shutdownTime bounds the shutdown of a server.
const shutdownTime = 5 * time.Second

func (g *group) serve() (*manager.Server, error) {
	cfg := g.j.cluster.ServerConfig(g.id, int64(g.j.setup.Ranks))
	cfg.Hostname, cfg.Network, cfg.LighthouseAddr, cfg.StoreAddr = g.name, g.host, "http://"+lighthouseName+":29510", g.name+":1"
	cfg.Logger = slog.New(slog.NewTextHandler(g.j.cluster.Log, nil))
	m, err := manager.Join(g.ctx, cfg)
	if err != nil {
		return nil, err
	}
	o := observedMember{m.(*lighthouses.Member), g, make(chan membership.Notice)}
	g.j.tasks.Go(o.listen)
	cfg.Membership = o
	return manager.NewServer(g.ctx, cfg)
}

// observedMember reports the messages that a member receives from its lighthouse to the judge.
type observedMember struct {
	*lighthouses.Member
	g       *group
	notices chan membership.Notice
}

func (o observedMember) Notices() <-chan membership.Notice { return o.notices }

// listen reports and forwards the notices of the lighthouse.
func (o observedMember) listen() {
	for {
		select {
		case n := <-o.Member.Notices():
			o.g.note(func(judge *sim.Judge) {
				if n.Kind == membership.MemberFailed && n.ReplicaID == o.g.id {
					judge.Evicted(o.g.id, n.QuorumID)
				}
			})
			select {
			case o.notices <- n:
			case <-o.g.ctx.Done():
				return
			}
		case <-o.g.ctx.Done():
			return
		}
	}
}

func (o observedMember) Quorum(ctx context.Context, m quorum.Member, known int64) (*quorum.Quorum, error) {
	o.g.note(func(judge *sim.Judge) { judge.Asks(o.g.id, m) })
	q, err := o.Member.Quorum(ctx, m, known)
	if err == nil {
		o.g.note(func(judge *sim.Judge) { judge.Learned(o.g.id, q) })
	}
	return q, err
}

// note reports to the judge (job.note), unless the group has failed: its processes may act until they end, but without an effect on
// other groups.
func (g *group) note(what func(*sim.Judge)) (alive bool) {
	g.j.note(func(judge *sim.Judge) {
		if alive = !g.killed; alive {
			what(judge)
		}
	})
	return alive
}

// end ends a group, and starts another one in its slot. The connections break if its processes end, but not if its host vanishes. A
// group that shuts down reports it.
func (g *group) end(how sim.FaultKind, why string, down time.Duration) {
	j := g.j
	if !g.note(func(judge *sim.Judge) {
		g.killed = true
		judge.Fails(g.id, why, how == sim.Vanish)
		j.groups[g.slot] = nil
		for _, r := range g.ranks {
			r.leaveComm(how == sim.Vanish)
		}
	}) {
		return
	}
	for _, r := range g.ranks {
		switch host := j.net.Host(r.host); {
		case how == sim.Vanish:
			host.Vanish()
		case how == sim.Leave && r.index == 0: // its server still has to report the end
		default:
			host.Kill()
		}
	}
	g.cancel()
	j.after(down, func() { j.begin(g.slot) })
}

// sleep waits, and reports whether the time has passed before the context ended.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
