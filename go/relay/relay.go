// Package relay carries the sessions of ranks to their manager server. The server of a group with thousands of ranks then has one
// stream for each relay, and receives the simultaneous requests of its ranks in one message. A relay makes no decisions: for the
// server, each session is like a rank's own stream, and ends when the connection of its rank ends.
//
// A relay does not reconnect. When its stream breaks or its process ends, its ranks connect to the server directly.
package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

const (
	// holdTime is how long a request is held for those of the other ranks.
	holdTime = 50 * time.Millisecond
	// mostConnections bounds the open connections. A relay has some hundred ranks at most, and each keeps one connection.
	mostConnections = 10_000
	// mostQueued and mostQueuedBytes bound the memory for requests when the server stops reading; mostUnsent bounds the memory for
	// the responses of a session when its rank stops reading.
	mostQueued, mostQueuedBytes, mostUnsent = 1 << 16, 64 << 20, 128
	// closeGrace is how long Close waits for calls in progress.
	closeGrace = time.Second
)

// Config has the settings of a relay.
type Config struct {
	Manager        string // address of the manager server
	Hostname       string // in the announced address
	Bind           string // host:port to listen on
	ConnectTimeout time.Duration
	Security       auth.Security // for the relay as a server, and for its connection to the manager server
	Hold           time.Duration // holdTime if 0
	Network        rpc.Network   // real TCP if nil
	Logger         *slog.Logger  // slog.Default() if nil
}

// ErrNone is the error of a start that failed although the manager server was reached: ranks then connect to it without a relay.
var ErrNone = errors.New("no relay")

// Relay is a server for ranks, and one client of their manager server.
type Relay struct {
	torchftpb.UnimplementedRankServiceServer
	log     *slog.Logger
	manager string // address of the manager server
	address string
	server  *rpc.Server
	conn    *grpc.ClientConn
	up      grpc.BidiStreamingClient[torchftpb.RelayRequests, torchftpb.RelayResponses]
	cancel  context.CancelFunc // ends up
	tasks   sync.WaitGroup
	wake    chan struct{} // the batch has changed
	ended   chan struct{} // closed when all sessions must end
	end     sync.Once

	mu       sync.Mutex
	batch    batch
	last     uint64
	sessions map[uint64]*session
	idle     chan struct{} // not nil while Close waits: closed when no call is in progress
}

// session is the session of one rank. The relay's lock guards it.
type session struct {
	number uint64
	out    []*torchftpb.RankResponse // still to be sent to the rank
	wake   chan struct{}
	cut    bool // the session must end: the server has ended it, or the rank has stopped reading
}

// Start connects to the manager server and serves. The error is ErrNone if the server was reached, but no relay can be started.
func Start(ctx context.Context, cfg Config) (*Relay, error) {
	if cfg.Hold == 0 {
		cfg.Hold = holdTime
	}
	if cfg.Network == nil {
		cfg.Network = rpc.TCP
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	conn, err := rpc.DialSecurely(ctx, cfg.Security, cfg.Network, "manager", cfg.Manager, cfg.ConnectTimeout)
	if err != nil {
		return nil, err
	}
	r := &Relay{
		log: cfg.Logger, manager: cfg.Manager, conn: conn, batch: newBatch(cfg.Hold), sessions: map[uint64]*session{},
		wake: make(chan struct{}, 1), ended: make(chan struct{}),
	}
	if err := r.start(ctx, cfg); err != nil {
		return nil, errors.Join(ErrNone, err, conn.Close())
	}
	return r, nil
}

func (r *Relay) start(ctx context.Context, cfg Config) error {
	if strings.HasPrefix(cfg.Manager, "https:") && !cfg.Security.ServesTLS() {
		return fmt.Errorf("tls_cert (%s) is \"\": a relay for a manager server with TLS needs a certificate", auth.TLSCertEnv)
	}
	gate, err := rpc.NewGate(cfg.Security, rpc.Limits{MaxConnections: mostConnections}, r.log)
	if err != nil {
		return err
	}
	var upCtx context.Context
	upCtx, r.cancel = context.WithCancel(context.Background())
	inTime := context.AfterFunc(ctx, r.cancel) // the stream outlives the start
	if r.up, err = torchftpb.NewRankServiceClient(r.conn).Relay(upCtx); err == nil {
		_, err = r.up.Recv() // the server sends an empty message first; a server that does not support relays returns an error
	}
	if !inTime() && err == nil {
		err = status.FromContextError(ctx.Err()).Err()
	}
	lis, listenErr := cfg.Network.Listen(cfg.Bind)
	if err = errors.Join(err, listenErr); err != nil {
		r.cancel()
		if listenErr == nil {
			_ = lis.Close()
		}
		return err
	}
	r.address = rpc.Announce(cfg.Hostname, lis.Addr(), cfg.Security)
	g := rpc.NewGRPC(gate, r.log, grpc.MaxRecvMsgSize(mostRequest))
	torchftpb.RegisterRankServiceServer(g, r)
	r.server = rpc.Serve(lis, gate, g, nil, r.log)
	rpc.Go(&r.tasks, r.log, "relay: requests", r.send)
	rpc.Go(&r.tasks, r.log, "relay: responses", r.receive)
	return nil
}

// Address returns the relay's address for its ranks: http://host:port, or https://.
func (r *Relay) Address() string { return r.address }

// Close ends the sessions. Calls in progress get closeGrace.
func (r *Relay) Close() error {
	idle := make(chan struct{})
	r.mu.Lock()
	r.idle = idle
	r.signalIdle()
	r.mu.Unlock()
	grace := time.NewTimer(closeGrace)
	defer grace.Stop()
	select {
	case <-idle:
	case <-grace.C:
	case <-r.ended:
	}
	r.stop()
	r.server.Stop()
	r.cancel()
	r.tasks.Wait()
	return r.conn.Close()
}

func (r *Relay) stop() { r.end.Do(func() { close(r.ended) }) }

// signalIdle wakes Close if no call is in progress. The caller holds mu.
func (r *Relay) signalIdle() {
	if r.batch.busy == 0 && r.idle != nil {
		close(r.idle)
		r.idle = nil
	}
}

// Session serves one rank until either side ends it.
func (r *Relay) Session(rank grpc.BidiStreamingServer[torchftpb.RankRequest, torchftpb.RankResponse]) error {
	select {
	case <-r.ended:
		return r.unavailable()
	default:
	}
	if err := rank.SendHeader(rpc.ManagerHeader(r.manager)); err != nil {
		return err
	}
	s := r.add()
	defer r.remove(s)
	received := make(chan error, 1)
	rpc.Go(&r.tasks, r.log, "relay: a session", func() { received <- r.readRequests(s, rank) })
	for {
		select {
		case <-s.wake:
			if !r.deliver(s, rank) {
				return status.Error(codes.Unavailable, "the manager server has ended this session")
			}
		case err := <-received:
			return err
		case <-r.ended:
			r.deliver(s, rank)
			return r.unavailable()
		}
	}
}

func (r *Relay) unavailable() error {
	return status.Error(codes.Unavailable, "the relay at "+r.address+" has ended")
}

func (r *Relay) add() *session {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last++
	s := &session{number: r.last, wake: make(chan struct{}, 1)}
	r.sessions[s.number] = s
	r.batch.open(s.number)
	return s
}

func (r *Relay) remove(s *session) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.sessions, s.number)
	r.batch.end(s.number, time.Now())
	signal(r.wake)
	r.signalIdle()
}

// readRequests queues the requests of a rank until its stream ends.
func (r *Relay) readRequests(s *session, rank grpc.BidiStreamingServer[torchftpb.RankRequest, torchftpb.RankResponse]) (err error) {
	defer rpc.Recovered(r.log, "a session of a relay", &err)
	for {
		req, err := rank.Recv()
		if err != nil {
			return err
		}
		if !r.enqueue(s, req) {
			return status.Error(codes.ResourceExhausted, "the relay's queue is full: the manager server does not read its requests")
		}
	}
}

// enqueue reports whether the request was queued: not if the queue is full, or the session has ended.
func (r *Relay) enqueue(s *session, req *torchftpb.RankRequest) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sessions[s.number] == nil || len(r.batch.queue) >= mostQueued || r.batch.bytes >= mostQueuedBytes {
		return false
	}
	r.batch.add(s.number, req, time.Now())
	signal(r.wake)
	return true
}

// signal wakes the reader of a channel of capacity one, which may have been woken already.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// deliver sends a rank its responses, and reports whether the session may continue.
func (r *Relay) deliver(s *session, rank grpc.BidiStreamingServer[torchftpb.RankRequest, torchftpb.RankResponse]) bool {
	r.mu.Lock()
	out := s.out
	s.out = nil
	cut := s.cut
	r.mu.Unlock()
	for _, resp := range out {
		_ = rank.Send(resp) // fails only if the stream has broken: readRequests returns then
	}
	return !cut
}

// send sends the queued requests, until the stream breaks.
func (r *Relay) send() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		r.mu.Lock()
		now := time.Now()
		wait, some := r.batch.wait(now)
		var message *torchftpb.RelayRequests
		if some && wait <= 0 {
			message = r.batch.take(now)
		}
		r.mu.Unlock()
		if message != nil {
			_ = r.up.Send(message) // fails only if the stream has broken: receive gets the error
			continue
		}
		due := timer.C
		if timer.Reset(wait); !some {
			due = nil
		}
		select {
		case <-r.wake:
		case <-due:
		case <-r.up.Context().Done():
			return
		}
	}
}

// receive hands out the responses, until the stream breaks.
func (r *Relay) receive() {
	defer r.stop()
	for {
		message, err := r.up.Recv()
		if err != nil {
			if r.up.Context().Err() == nil && !errors.Is(err, io.EOF) {
				r.log.Info("torchft: a relay has ended: its ranks connect to the manager server themselves", "error", err)
			}
			r.cancel()
			return
		}
		r.handOut(message.GetResponses())
	}
}

// handOut passes the responses of one message to their sessions; those for session 0 go to all. It holds the lock for the whole
// message, so that Close does not end the sessions between the last answer to a call and the responses after it.
func (r *Relay) handOut(responses []*torchftpb.RelayResponse) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, resp := range responses {
		if resp.GetSession() == 0 {
			for _, s := range r.sessions {
				s.take(resp.GetResponse())
			}
		} else if s := r.sessions[resp.GetSession()]; s != nil {
			if resp.GetResponse().GetCall() != 0 {
				r.batch.answered(s.number)
			}
			s.take(resp.GetResponse())
		}
	}
	r.signalIdle()
}

// take queues a response for the rank. nil: the server has ended the session.
func (s *session) take(resp *torchftpb.RankResponse) {
	if resp == nil || len(s.out) >= mostUnsent {
		s.cut = true
	} else {
		s.out = append(s.out, resp)
	}
	signal(s.wake)
}
