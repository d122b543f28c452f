package sim

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/grpc"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/membership/lighthouses"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// group is one incarnation of a replica group: a real manager server, and ranks.
type group struct {
	j      *job
	slot   int
	host   *fttest.Host
	name   string
	ctx    context.Context
	cancel context.CancelFunc

	// The job's mu guards these.
	life    *life
	shrink  int // requests with which it asks shrink_only
	stopped time.Time
	stalled time.Time
	claims  bool
	left    int // ranks that have left, since the group is drained
	ranks   []*rank
}

// begin starts a group in a slot, if there is none.
func (j *job) begin(slot int) {
	if j.ctx.Err() != nil {
		return
	}
	g := &group{j: j, slot: slot}
	g.ctx, g.cancel = context.WithCancel(j.ctx)
	lives := 0
	j.note(func(judge *judge) {
		if j.groups[slot] != nil {
			return
		}
		j.groups[slot] = g
		g.life = judge.starts(slot)
		lives = judge.places[slot].lives
		g.name = fmt.Sprintf("%s.%d", machineOf(slot), lives)
		for i := range j.setup.ranks {
			g.ranks = append(g.ranks, newRank(g, i, lives))
		}
	})
	if lives == 0 {
		g.cancel()
		return
	}
	if lives > 1 { // the host of the previous incarnation may have vanished: it is up again
		j.net.Host(fmt.Sprintf("%s.%d", machineOf(slot), lives-1)).Refuse()
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
	g.j.note(func(*judge) { finishes = g.life.finished })
	if finishes {
		server.Finish(0)
	}
	server.Shutdown()
	g.j.note(func(judge *judge) {
		if took := time.Since(start); took > shutdownTime {
			judge.waits("the server of %s took %s to shut down", g.life.id, took)
		}
	})
}

// shutdownTime bounds the shutdown of a server.
const shutdownTime = 5 * time.Second

func (g *group) serve() (*manager.Server, error) {
	cfg := g.j.cluster.ServerConfig(g.life.id, int64(g.j.setup.ranks))
	cfg.Hostname, cfg.Network, cfg.LighthouseAddr, cfg.StoreAddr = g.name, g.host,
		"http://"+lighthouseName+":29510", g.name+":1"
	cfg.Logger = slog.New(slog.NewTextHandler(g.j.cluster.Log, nil))
	if g.j.setup.upstream.has(g.slot) {
		conn, err := rpc.Dial(g.ctx, rpc.Dialing{Security: auth.Security{}, Network: g.host}, "lighthouse",
			cfg.LighthouseAddr, cfg.ConnectTimeout)
		if err != nil {
			return nil, err
		}
		cfg.Membership = upstreamMember{fttest.NoMembership{}, g, conn,
			torchftpb.NewLighthouseServiceClient(conn)}
		return fttest.NewManager(g.ctx, cfg)
	}
	m, err := fttest.Join(g.ctx, cfg)
	if err != nil {
		return nil, err
	}
	o := observedMember{m, g, make(chan *torchftpb.Notice)}
	g.j.tasks.Go(o.listen)
	cfg.Membership = o
	return fttest.NewManager(g.ctx, cfg)
}

// observedMember reports the messages between a member and its lighthouse to the judge.
type observedMember struct {
	*lighthouses.Member
	g       *group
	notices chan *torchftpb.Notice
}

func (o observedMember) Notices() <-chan *torchftpb.Notice { return o.notices }

// listen reports and forwards the notices of the lighthouse.
func (o observedMember) listen() {
	for {
		select {
		case n := <-o.Member.Notices():
			o.g.note(func(judge *judge) {
				switch n.GetKind() {
				case torchftpb.Notice_MEMBER_FAILED:
					judge.noticed(o.g.life, n.GetQuorumId(), n.GetReplicaId(), n.GetReason())
				case torchftpb.Notice_DRAINED:
					judge.wants(o.g.life)
				case torchftpb.Notice_REGRESSED:
					judge.regressed(n.GetQuorumId())
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
	return o.g.observe(m, func() (*quorum.Quorum, error) {
		o.g.note(func(j *judge) {
			if o.g.claims {
				known = j.result.lastID + 5
			}
		})
		return o.Member.Quorum(ctx, m, known)
	})
}

// observe reports a request to the lighthouse, and its answer.
func (g *group) observe(m quorum.Member, ask func() (*quorum.Quorum, error)) (*quorum.Quorum, error) {
	g.note(func(judge *judge) { judge.asks(g.life, m) })
	q, err := ask()
	g.note(func(judge *judge) {
		if err == nil {
			judge.learns(g.life, q)
		} else {
			judge.unanswered(g.life)
		}
	})
	return q, err
}

// upstreamMember is the membership of a group of upstream: calls, with the fields that upstream sends.
type upstreamMember struct {
	fttest.NoMembership
	g    *group
	conn *grpc.ClientConn
	stub torchftpb.LighthouseServiceClient
}

func (u upstreamMember) Quorum(ctx context.Context, m quorum.Member, _ int64) (*quorum.Quorum, error) {
	m.CommittedQuorumID, m.ReplaysFailedSteps, m.CutsBySpeed, m.Handles = 0, false, false, nil
	return u.g.observe(m, func() (*quorum.Quorum, error) {
		resp, err := u.stub.Quorum(ctx, &torchftpb.LighthouseQuorumRequest{Requester: wire.MemberToProto(m)})
		if err != nil {
			return nil, err
		}
		return wire.QuorumFromProto(resp.GetQuorum()), nil
	})
}

func (u upstreamMember) Attend(
	ctx context.Context, interval time.Duration, reached func(), _ membership.Doing,
) error {
	for sleep(ctx, interval) {
		one, cancel := context.WithTimeout(ctx, time.Second)
		_, err := u.stub.Heartbeat(one, &torchftpb.LighthouseHeartbeatRequest{ReplicaId: u.g.life.id})
		cancel()
		if err != nil {
			return err
		}
		reached()
	}
	return ctx.Err()
}

func (u upstreamMember) Close() error { return u.conn.Close() }

// note reports to the judge (job.note), unless the group has failed: its processes may act until they end,
// but without an effect on other groups.
func (g *group) note(what func(*judge)) (alive bool) {
	g.j.note(func(judge *judge) {
		if alive = !g.life.killed; alive {
			what(judge)
		}
	})
	return alive
}

// end ends a group, and starts another one in its slot. The connections break if its processes end, but not
// if its host vanishes. A group that shuts down reports it.
func (g *group) end(how faultKind, why string, down time.Duration) {
	j := g.j
	if !g.note(func(judge *judge) {
		judge.fails(g.life, why, how == vanish)
		j.groups[g.slot] = nil
		for _, r := range g.ranks {
			r.leaveComm(how == vanish)
		}
	}) {
		return
	}
	for _, r := range g.ranks {
		switch host := j.net.Host(r.host); {
		case how == vanish:
			host.Vanish()
		case how == leave && r.index == 0: // its server still has to report the end
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
