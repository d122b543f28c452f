package rankclient

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/torchftpb"
)

// session makes the calls of a rank over one stream, at a fraction of the cost of unary calls. If the server has no sessions, it
// makes unary calls.
type session struct {
	remote
	ctx       context.Context // ends with Close
	cancel    context.CancelFunc
	stub      torchftpb.RankServiceClient
	unary     atomic.Bool // the server has no sessions
	broadcast membership.Broadcast
	notices   <-chan membership.Notice

	opening chan struct{}                // a lock for opening a stream; waiting for it ends with a call's deadline
	stream  atomic.Pointer[clientStream] // nil before the first call
	rank    atomic.Int64                 // group rank of the calls, -1 before the first one
}

func newSession(conn *grpc.ClientConn) *session {
	s := &session{
		remote:  remote{conn: conn, stub: torchftpb.NewManagerServiceClient(conn)},
		stub:    torchftpb.NewRankServiceClient(conn),
		opening: make(chan struct{}, 1),
	}
	s.rank.Store(-1)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.notices, _ = s.broadcast.Listen()
	return s
}

// errUnary reports that a call on a session must be repeated as a unary call.
var errUnary = errors.New("the server does not support sessions")

func (s *session) Quorum(ctx context.Context, req Request) (recovery.Result, error) {
	s.rank.Store(req.GroupRank)
	resp, err := s.call(ctx, &torchftpb.RankRequest{Request: &torchftpb.RankRequest_Quorum{Quorum: quorumMessage(ctx, req)}})
	if errors.Is(err, errUnary) {
		return s.remote.Quorum(ctx, req)
	}
	if err != nil {
		return recovery.Result{}, err
	}
	return wire.ResultFromProto(resp.GetQuorum()), nil
}

func (s *session) Vote(ctx context.Context, groupRank, step int64, vote bool) (Decision, error) {
	req := &torchftpb.RankRequest{Request: &torchftpb.RankRequest_ShouldCommit{
		ShouldCommit: &torchftpb.ShouldCommitRequest{GroupRank: groupRank, Step: step, ShouldCommit: vote, Traceparent: tracing.ParentOf(ctx)},
	}}
	resp, err := s.call(ctx, req)
	if errors.Is(err, errUnary) {
		return s.remote.Vote(ctx, groupRank, step, vote)
	}
	return Decision{Commit: resp.GetShouldCommit().GetShouldCommit(), Stands: resp.GetShouldCommit().GetStands()}, err
}

func (s *session) Leave(ctx context.Context) error {
	_, err := s.call(ctx, &torchftpb.RankRequest{Request: &torchftpb.RankRequest_Leave{Leave: true}})
	if errors.Is(err, errUnary) {
		return s.remote.Leave(ctx)
	}
	return err
}

func (s *session) Notices() <-chan membership.Notice { return s.notices }

func (s *session) Suspect(quorumID int64, replicaID string) {
	s.report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Suspected{
		Suspected: &torchftpb.PeerSuspected{QuorumId: quorumID, ReplicaId: replicaID},
	}})
}

func (s *session) ReportProgress(groupRank int64, waits bool, what string) {
	s.report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Progress{
		Progress: &torchftpb.RankProgress{GroupRank: groupRank, Waits: waits, What: what},
	}})
}

func (s *session) ReportHealing(p membership.HealProgress) {
	s.report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Healing{Healing: wire.HealProgressToProto(p)}})
}

func (s *session) ReportRecovered(r membership.Recovered) {
	s.report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Recovered{Recovered: wire.RecoveredToProto(r)}})
}

func (s *session) ReportCount(c Counted) {
	s.report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Counted{
		Counted: &torchftpb.Counted{GroupRank: c.GroupRank, Name: c.Name, Number: c.Number},
	}})
}

func (s *session) RequestDrain() {
	s.report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Drain{Drain: true}})
}

// report sends a report if the session is open, and drops it otherwise. A report is not answered. report does not take the lock of
// opening: a report must not wait for a stream that is being opened, and must not be dropped because a call checks the stream at the
// same moment.
func (s *session) report(req *torchftpb.RankRequest) {
	if stream := s.stream.Load(); stream != nil && !stream.broken() {
		stream.post(req)
	}
}

func (s *session) Close() error {
	if stream := s.stream.Load(); stream != nil {
		stream.flush()
	}
	s.cancel()
	return s.remote.Close()
}

func (s *session) call(ctx context.Context, req *torchftpb.RankRequest) (*torchftpb.RankResponse, error) {
	if s.unary.Load() {
		return nil, errUnary
	}
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	stream, err := s.connect(ctx)
	if err != nil {
		return nil, err
	}
	resp, err := stream.call(ctx, req)
	if status.Code(err) == codes.Unimplemented {
		s.unary.Store(true)
		return nil, errUnary
	}
	return resp, err
}

// connect returns the open stream. If it broke, connect opens another one, and blocks until the connection is established.
func (s *session) connect(ctx context.Context) (*clientStream, error) {
	select {
	case s.opening <- struct{}{}:
		defer func() { <-s.opening }()
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	before := s.stream.Load()
	if before != nil && !before.broken() {
		return before, nil
	}
	reopened := before != nil
	streamCtx, cancel := context.WithCancel(s.ctx)
	inTime := context.AfterFunc(ctx, cancel) // the stream outlives the call that opens it
	wire, err := s.stub.Session(streamCtx)
	if !inTime() {
		cancel()
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	if err != nil {
		cancel()
		return nil, err
	}
	stream := &clientStream{
		wire:    wire,
		notice:  s.broadcast.Notify,
		waiting: map[uint64]chan *torchftpb.RankResponse{},
		ended:   make(chan struct{}),
	}
	if rank := s.rank.Load(); reopened && rank >= 0 {
		stream.post(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Hello{Hello: rank}})
	}
	s.stream.Store(stream)
	go func() {
		stream.receive(cancel)
		s.reopen(stream)
	}()
	return stream, nil
}

// reopenTime is how long reopen retries. After that, the next call opens a stream.
const reopenTime = 10 * time.Second

// reopen opens another stream soon after one broke, so that the server learns that the rank is alive and only the connection broke.
func (s *session) reopen(broken *clientStream) {
	if status.Code(broken.err) == codes.Unimplemented {
		return
	}
	ctx, cancel := context.WithTimeout(s.ctx, reopenTime)
	defer cancel()
	for failed := 1; ctx.Err() == nil; failed++ {
		if _, err := s.connect(ctx); err == nil {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(rpc.RetryBackoff.Wait(failed, rand.Float64())):
		}
	}
}

// clientStream is the part of a session on one connection.
type clientStream struct {
	wire   grpc.BidiStreamingClient[torchftpb.RankRequest, torchftpb.RankResponse]
	notice func(membership.Notice)
	ended  chan struct{} // closed when the stream has broken
	err    error         // why the stream has broken; valid once ended is closed

	sender rpc.Sender

	mu      sync.Mutex
	last    uint64
	waiting map[uint64]chan *torchftpb.RankResponse
}

func (s *clientStream) broken() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// receive passes the answers to their calls until the stream breaks.
func (s *clientStream) receive(cancel context.CancelFunc) {
	defer cancel()
	defer close(s.ended)
	defer rpc.Recovered(slog.Default(), "a session with a manager server", &s.err)
	for {
		resp, err := s.wire.Recv()
		if err != nil {
			s.err = err
			return
		}
		if notice, ok := wire.NoticeFromRank(resp); ok {
			s.notice(notice)
			continue
		}
		s.mu.Lock()
		waiter := s.waiting[resp.GetCall()]
		delete(s.waiting, resp.GetCall())
		s.mu.Unlock()
		if waiter != nil { // nil: the call has been cancelled
			waiter <- resp
		}
	}
}

func (s *clientStream) call(ctx context.Context, req *torchftpb.RankRequest) (*torchftpb.RankResponse, error) {
	deadline, _ := ctx.Deadline()
	req.TimeoutUs = max(1, time.Until(deadline).Microseconds())
	answered := make(chan *torchftpb.RankResponse, 1)
	s.mu.Lock()
	s.last++
	req.Call = s.last
	s.waiting[req.GetCall()] = answered
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.waiting, req.GetCall())
	}()

	queued := s.sender.Post(func() {
		if ctx.Err() == nil { // nobody waits for the answer any more: a vote that is sent late must not count
			_ = s.wire.Send(req)
		}
	})
	if !queued {
		return nil, status.Error(codes.Unavailable, "the server does not read the requests of this rank")
	}
	var err error
	select {
	case resp := <-answered:
		return outcome(resp)
	case <-s.ended:
		err = s.err
	case <-ctx.Done():
		err = status.FromContextError(ctx.Err()).Err()
	}
	select {
	case resp := <-answered: // the answer arrived just before the end of the stream or of the call
		return outcome(resp)
	default:
	}
	if ctx.Err() != nil { // after the look at the answer: the server answers a cancelled call, too
		s.post(&torchftpb.RankRequest{Call: req.GetCall(), Request: &torchftpb.RankRequest_Cancel{Cancel: true}})
	}
	return nil, err
}

func outcome(resp *torchftpb.RankResponse) (*torchftpb.RankResponse, error) {
	if failure := resp.GetFailure(); failure != nil {
		return nil, status.Error(codes.Code(failure.GetCode()), failure.GetMessage())
	}
	return resp, nil
}

// post queues a message that nobody waits for, and does not block. It is dropped if the server has not read the earlier ones.
func (s *clientStream) post(req *torchftpb.RankRequest) {
	s.sender.Post(func() { _ = s.wire.Send(req) }) // fails only if the stream has broken: receive returns the error
}

// farewellTime bounds how long Close waits until the last reports are sent.
const farewellTime = 200 * time.Millisecond

// flush returns when the queued requests have been sent, or farewellTime is over.
func (s *clientStream) flush() {
	select {
	case <-s.sender.Flushed():
	case <-time.After(farewellTime):
	}
}
