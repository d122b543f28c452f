package lighthouse

import (
	"log/slog"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/replica"
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

	cluster *cluster // nil without one
	keepers keepers

	lock  *os.File // of the directory for states, nil without one
	store store    // of the states of the jobs, nil without a directory

	// Only tick uses these.
	// when the states of ended jobs were last removed, or the first look after this lighthouse began to serve
	swept   time.Time
	sweptIn uint64 // the term of swept

	mu       sync.Mutex
	jobs     map[string]*job
	reserved string // a job that must not begin: its state is being removed (reserve)
	closed   bool
}

// New starts a lighthouse. It is bound and serving on return; end it with Shutdown.
func New(cfg Config) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if err := cfg.findSelf(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	tracing.Setup(cfg.Logger)
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
	lock, err := cfg.takeState()
	if err != nil {
		_ = lis.Close()
		return nil, err
	}
	s := &Server{
		cfg:     cfg,
		log:     cfg.Logger,
		address: rpc.Announce(cfg.Hostname, lis.Addr(), cfg.Security),
		gate:    gate,
		stop:    make(chan struct{}),
		lock:    lock,
		jobs:    map[string]*job{},
		keepers: keepers{began: time.Now()},
	}
	var options []grpc.ServerOption
	if len(cfg.Cluster) > 0 {
		s.address = cfg.Advertise
		if s.cluster, err = s.joinCluster(); err != nil {
			_ = lis.Close()
			_ = lock.Close()
			return nil, err
		}
		s.store = s.cluster.node
		options = append(options, grpc.ChainUnaryInterceptor(s.cluster.forwardUnary))
	} else {
		if cfg.StateDir != "" {
			s.store = openFiles(cfg.StateDir, s.log, cfg.disk, s.restore)
		}
		s.mu.Lock()
		s.jobs[rpc.DefaultJob] = newJob(s, rpc.DefaultJob)
		s.mu.Unlock()
	}
	g := rpc.NewGRPC(gate, s.log, options...)
	g.RegisterService(serviceDesc(), service{server: s})
	torchftpb.RegisterMemberServiceServer(g, memberService{server: s})
	if s.cluster != nil {
		replica.Register(g, s.cluster.node)
	}
	s.rpc = rpc.Serve(lis, gate, g, s.handler(), s.log)
	if s.cluster != nil {
		rpc.Go(&s.tasks, s.log, "leader of the cluster", s.cluster.follow)
	}
	rpc.Go(&s.tasks, s.log, "quorum tick", s.tick)
	return s, nil
}

// restore continues the jobs from states that were read from disk after the jobs had begun.
func (s *Server) restore(states map[string][]byte) {
	for _, j := range s.allJobs() {
		j.mu.Lock()
		j.restore(states[j.name])
		j.mu.Unlock()
	}
}

// isJoin reports whether a member joins a job by this call.
func isJoin(method string) bool {
	return method == torchftpb.LighthouseService_Quorum_FullMethodName ||
		method == torchftpb.MemberService_Attend_FullMethodName
}

// Address returns the address for managers and browsers: http://host:port, or https://.
func (s *Server) Address() string { return s.address }

// Shutdown answers all pending requests, closes the port, and returns when no goroutine is left.
func (s *Server) Shutdown() {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	s.mu.Unlock()
	if first {
		close(s.stop)
		for _, j := range s.allJobs() {
			j.close(errShutdown)
		}
	}
	if first && s.cluster != nil {
		s.cluster.close() // hands over to another lighthouse
	}
	s.rpc.Stop()
	s.tasks.Wait()
	if first && s.lock != nil {
		// after the tasks, which wait for the last writes: another lighthouse may use the directory now
		_ = s.lock.Close()
	}
	tracing.Flush()
}

var errShutdown = status.Error(codes.Unavailable, "the lighthouse is shutting down")

func (s *Server) tick() {
	ticks := time.Tick(s.cfg.QuorumTick)
	for {
		select {
		case <-s.stop:
			return
		case now := <-ticks:
			if s.confirm() != nil {
				continue
			}
			for _, j := range s.allJobs() {
				j.tick(now)
			}
			s.forgetJobs(now)
			s.sweep(now)
		}
	}
}

// Status returns the status of the default job.
func (s *Server) Status() dashboard.Status {
	status, _ := s.StatusOf(rpc.DefaultJob)
	return status
}
