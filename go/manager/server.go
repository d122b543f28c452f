package manager

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/torchft/torchft/go/internal/local"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/round"
	"github.com/torchft/torchft/go/torchftpb"
)

// Server is the manager server of one replica group.
type Server struct {
	cfg        ServerConfig
	log        *slog.Logger
	address    string
	rpc        *rpc.Server
	membership membership.Membership
	ctx        context.Context // ends with Shutdown
	cancel     context.CancelFunc
	tasks      sync.WaitGroup
	notices    membership.Broadcast
	pool       rpc.Pool // sends the answers to all ranks
	unregister func()   // ends the direct calls of ranks in this process (direct.go)

	suspected atomic.Pointer[torchftpb.PeerSuspected] // the last broken collective of the latest round

	mu       sync.Mutex
	machine  *round.Machine
	waiters  rpc.Waiters[round.WaiterID, answer]
	asking   map[uint64]context.CancelFunc // requests to the lighthouse, by round
	presence presence
	meters   *meters
	// trace context of the rank that was the last one to ask for the quorum; empty if no rank traces
	parent string
	heals  groupHeal

	badCount sync.Once // logs only the first refused torchftpb.Counted, whichever rank sent it
	closed   bool
}

// spareConnections are for clients that mostConnections does not count one by one: Prometheus, operators,
// and, if several groups heal at the same time, the ranks of all but one of them.
const spareConnections = 10_000

// mostConnections returns how many connections to a manager server may be open. Each rank keeps one. After a
// network failure all ranks reconnect before the server notices that the old connections are broken
// (rpc.RankPings). And the ranks of a healing group, as many again, connect to request the metadata of the
// checkpoint.
func mostConnections(worldSize int64) int { return spareConnections + 3*int(worldSize) }

// NewServer starts the server of a replica group: it is bound and serving on return. End it with Shutdown.
func NewServer(cfg ServerConfig) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, errors.Join(err, cfg.Membership.Close())
	}
	cfg = cfg.withDefaults()
	tracing.Setup(cfg.Logger)
	gate, err := rpc.NewGate(cfg.Security, rpc.Limits{MaxConnections: mostConnections(cfg.WorldSize)},
		cfg.Logger)
	if err != nil {
		return nil, errors.Join(err, cfg.Membership.Close())
	}
	lis, err := cfg.Network.Listen(cfg.Bind)
	if err != nil {
		return nil, errors.Join(err, cfg.Membership.Close())
	}
	s := &Server{
		cfg:        cfg,
		log:        cfg.Logger.With("replica_id", cfg.ReplicaID),
		address:    rpc.Announce(cfg.Hostname, lis.Addr(), cfg.Security),
		membership: cfg.Membership,
		asking:     map[uint64]context.CancelFunc{},
		presence:   presence{},
		meters:     newMeters(cfg.job(), cfg.ReplicaID),
	}
	s.machine = s.newMachine()
	s.ctx, s.cancel = context.WithCancel(context.Background())
	g := rpc.NewGRPC(gate, s.log, grpc.StatsHandler(connectionTracker{s}), rpc.RankPings())
	torchftpb.RegisterManagerServiceServer(g, service{server: s})
	torchftpb.RegisterRankServiceServer(g, service{server: s})
	s.rpc = rpc.Serve(lis, gate, g, s.handler(gate), s.log)
	rpc.Go(&s.tasks, s.log, "heartbeat", s.attend)
	rpc.Go(&s.tasks, s.log, "notices", s.handleNotices)
	s.unregister = local.Register(cfg.Network, s.address, func() local.Calls { return s.direct() })
	return s, nil
}

func (s *Server) newMachine() *round.Machine {
	return round.NewMachine(round.Group{
		ReplicaID:    s.cfg.ReplicaID,
		Address:      s.address,
		StoreAddress: s.cfg.StoreAddr,
		WorldSize:    s.cfg.WorldSize,
	})
}

// Address returns the address that is announced to the other groups: http://host:port, or https://.
func (s *Server) Address() string { return s.address }

// Shutdown answers all pending calls, closes the port and the connection to the lighthouse, and returns
// when no goroutine of the server is left.
func (s *Server) Shutdown() {
	s.unregister()
	s.mu.Lock()
	if !s.closed {
		s.step(round.Closed{Reason: "the manager server of " + s.cfg.ReplicaID + " is shutting down"})
		s.closed = true
	}
	s.mu.Unlock()
	s.cancel()
	s.rpc.Stop()
	if err := s.membership.Close(); err != nil {
		s.log.Debug("torchft: closing the connection to the lighthouse", "error", err)
	}
	s.tasks.Wait()
	tracing.Flush()
}

// Finish makes Shutdown announce that the group's training is complete, after a number of committed steps.
func (s *Server) Finish(step int64) { s.membership.Finish(step) }

// leave announces that the group has completed its last step, and waits until its peers have completed that
// step too and no longer need the group's data.
func (s *Server) leave(ctx context.Context) error {
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	stop := context.AfterFunc(s.ctx, cancel)
	defer stop()
	return s.membership.Leave(ctx)
}

// has reports whether the group has a rank.
func (s *Server) has(groupRank int64) bool { return groupRank >= 0 && groupRank < s.cfg.WorldSize }

// step feeds the machine one event, and carries out its actions. The caller holds mu: nothing may block.
func (s *Server) step(event round.Event) {
	_ = rpc.Guarded(s.log, "the manager server", func() {
		now := time.Now()
		actions := s.machine.Step(event, now)
		// before the actions: a stop or a request must not overtake it
		s.membership.Trains(s.machine.Standing())
		s.meters.observe(event, actions, now)
		s.carryOut(actions)
	}, func(err error) { // all pending calls get the error, and a new machine begins
		for _, cancel := range s.asking {
			cancel()
		}
		s.machine = s.newMachine()
		if s.closed {
			s.machine.Step(round.Closed{}, time.Now())
		}
		s.waiters.AnswerAll(answer{err: err})
	})
}

func (s *Server) carryOut(actions []round.Action) {
	for _, action := range actions {
		switch a := action.(type) {
		case round.AskLighthouse:
			s.ask(a)
		case round.CancelLighthouse:
			if cancel := s.asking[a.Round]; cancel != nil {
				cancel()
			}
		case round.AnswerQuorum:
			s.waiters.Answer(a.Waiter, answer{result: a.Result})
		case round.AnswerVote:
			s.waiters.Answer(a.Waiter, answer{commit: a.ShouldCommit, stands: a.Stands})
		case round.AnswerMetadata:
			s.waiters.Answer(a.Waiter, answer{metadata: a.Metadata})
		case round.Stop:
			s.membership.Report(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Stopped{
				Stopped: &torchftpb.Step{QuorumId: a.QuorumID, Step: a.Step},
			}})
		case round.Part:
			s.membership.Report(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Parting{
				Parting: &torchftpb.Parting{QuorumId: a.QuorumID, Step: a.Step, Reason: a.Reason},
			}})
		case round.NeedQuorum:
			s.membership.Report(&torchftpb.MemberMessage{
				Message: &torchftpb.MemberMessage_Changes{Changes: a.Reason},
			})
		case round.RequestDrain:
			s.membership.Report(&torchftpb.MemberMessage{
				Message: &torchftpb.MemberMessage_Drain{Drain: "a signal to the group"},
			})
		case round.ReportIncomplete:
			s.membership.Report(&torchftpb.MemberMessage{
				Message: &torchftpb.MemberMessage_Incomplete{Incomplete: a.Reason},
			})
		case round.Fail:
			s.waiters.Answer(a.Waiter, answer{err: wire.ToStatus(a.Failure)})
		}
	}
}
