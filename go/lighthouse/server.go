package lighthouse

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// Server is a running lighthouse.
type Server struct {
	cfg     Config
	log     *slog.Logger
	address string
	gate    *rpc.Gate
	rpc     *rpc.Server
	stop    chan struct{}
	tasks   sync.WaitGroup

	mu      sync.Mutex
	machine *quorum.Machine
	waiters rpc.Waiters[quorum.WaiterID, answer]
	streams streams
	news    news
	patient patience
	board   *dashboard.Feed // what people see
	wake    *time.Timer     // runs when the grace of a suspect is over
	closed  bool
}

// answer ends the wait of one quorum request.
type answer struct {
	delivered *delivery
	err       error
}

// New starts a lighthouse. It is bound and serving on return; end it with Shutdown.
func New(cfg Config) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	gate, err := rpc.NewGate(cfg.Security, rpc.Limits{
		MaxConnections: cfg.MaxConnections, MaxJoins: cfg.MaxJoinsPerSecond, IsJoin: isJoin,
	}, cfg.Logger)
	if err != nil {
		return nil, err
	}
	lis, err := cfg.Network.Listen(cfg.Bind)
	if err != nil {
		return nil, err
	}
	s := &Server{
		cfg:     cfg,
		log:     cfg.Logger,
		address: rpc.Announce(cfg.Hostname, lis.Addr(), cfg.Security),
		gate:    gate,
		stop:    make(chan struct{}),
		machine: quorum.NewMachine(cfg.policy(), time.Now()),
	}
	s.board = dashboard.NewFeed(s.Status)
	s.wake = time.AfterFunc(time.Hour, func() { _ = s.feed(quorum.Woken{}) })
	s.wake.Stop()
	s.news.timer = time.AfterFunc(time.Hour, s.tellLater)
	s.news.timer.Stop()
	g := rpc.NewGRPC(gate, s.log)
	g.RegisterService(serviceDesc(), service{server: s})
	torchftpb.RegisterMemberServiceServer(g, memberService{server: s})
	s.rpc = rpc.Serve(lis, gate, g, s.handler(), s.log)
	rpc.Go(&s.tasks, s.log, "quorum tick", s.tick)
	rpc.Go(&s.tasks, s.log, "dashboard", func() { s.board.Run(s.stop) })
	return s, nil
}

// isJoin picks the calls by which a member joins.
func isJoin(method string) bool {
	return method == torchftpb.LighthouseService_Quorum_FullMethodName || method == torchftpb.MemberService_Attend_FullMethodName
}

// Address is http://host:port, or https://, as managers and browsers use it.
func (s *Server) Address() string { return s.address }

// Shutdown answers everyone who waits, closes the port, and returns when nothing of the server is left.
func (s *Server) Shutdown() {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	s.wake.Stop()
	s.news.timer.Stop()
	s.waiters.AnswerAll(answer{err: errShutdown})
	s.streams.close()
	s.mu.Unlock()
	if first {
		close(s.stop)
	}
	s.rpc.Stop()
	s.tasks.Wait()
}

var errShutdown = status.Error(codes.Unavailable, "the lighthouse is shutting down")

// quorum waits until m is in a quorum.
func (s *Server) quorum(ctx context.Context, asked quorum.Asked) (*delivery, error) {
	id, answered, err := s.ask(asked)
	if err != nil {
		return nil, err
	}
	select {
	case a := <-answered:
		return a.delivered, a.err
	case <-ctx.Done():
	}
	reason, err := s.giveUp(id)
	if err != nil {
		return nil, err
	}
	select {
	case a := <-answered: // it came at the last moment
		return a.delivered, a.err
	default:
		return nil, status.Errorf(status.FromContextError(ctx.Err()).Code(), "no quorum in time: %s", reason)
	}
}

func (s *Server) ask(asked quorum.Asked) (quorum.WaiterID, <-chan answer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0, nil, errShutdown
	}
	id, answered := s.waiters.Add()
	asked.Waiter = id
	return id, answered, s.step(asked)
}

// giveUp ends a wait and returns why there is no quorum.
func (s *Server) giveUp(id quorum.WaiterID) (reason string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiters.Drop(id)
	if s.closed {
		return "", errShutdown
	}
	reason = s.reason(time.Now()) // while it still counts as one that waits
	return reason, s.step(quorum.GaveUp{Waiter: id})
}

func (s *Server) feed(event quorum.Event) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errShutdown
	}
	return s.step(event)
}

// step gives the machine one event and does what it says. The caller holds mu. Nothing in here waits.
func (s *Server) step(event quorum.Event) (err error) {
	now := time.Now()
	// A machine that panicked may be in any state: everyone who waits is told, and a fresh one begins. Its ids
	// start above the old ones, as after a restart.
	sound := false
	defer func() {
		if !sound {
			s.machine = quorum.NewMachine(s.cfg.policy(), now)
			s.waiters.AnswerAll(answer{err: err})
		}
	}()
	defer rpc.Recovered(s.log, "the lighthouse", &err)
	actions := s.machine.Step(event, now)
	s.announce(actions, now) // before the quorum without those who failed
	for _, action := range actions {
		switch a := action.(type) {
		case quorum.Deliver:
			s.patient.served()
			s.board.Round(maxStep(a.Quorum), len(a.Quorum.Members), now)
			d := newDelivery(a.Quorum, a.Before)
			for _, id := range a.Waiters {
				s.waiters.Answer(id, answer{delivered: d})
			}
		case quorum.Refuse:
			s.waiters.Answer(a.Waiter, answer{err: status.Error(codes.Aborted, a.Reason)})
		case quorum.Changed:
			s.log.Info("torchft: new quorum", "quorum_id", a.Quorum.ID, "replicas", len(a.Quorum.Members),
				"joined", some(a.Joined), "left", some(a.Left), "reason", a.Reason)
			s.board.Record(dashboard.Event{Time: now, Kind: dashboard.QuorumChanged, QuorumID: a.Quorum.ID, Step: maxStep(a.Quorum),
				Members: len(a.Quorum.Members), Joined: a.Joined, Left: a.Left, Reason: a.Reason})
		case quorum.Wake:
			s.wake.Reset(time.Until(a.At))
		case quorum.Waiting:
			s.patient.waits(a.Reason, now)
		}
	}
	sound = true
	return nil
}

func maxStep(q *quorum.Quorum) int64 {
	step := int64(0)
	for _, m := range q.Members {
		step = max(step, m.Step)
	}
	return step
}

// some are the first names of a list: with thousands, nobody reads more.
func some(names []string) []string {
	const most = 8
	if more := len(names) - most; more > 0 {
		return append(slices.Clone(names[:most]), fmt.Sprintf("and %d more", more))
	}
	return names
}

func (s *Server) tick() {
	ticker := time.NewTicker(s.cfg.QuorumTick)
	defer ticker.Stop()
	for {
		select {
		case <-s.stop:
			return
		case now := <-ticker.C:
			if s.feed(quorum.Tick{}) == nil {
				s.logPatience(now)
			}
		}
	}
}

// Status is what the machine says about itself, for people and dashboards.
func (s *Server) Status() quorum.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.machine.Describe(time.Now())
}
