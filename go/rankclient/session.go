package rankclient

import (
	"context"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/torchftpb"
)

// session makes the calls of a rank over one stream, at a fraction of the cost of unary calls. The server has
// to be one of this package: upstream's has no sessions, and gets only the unary call for metadata.
type session struct {
	conn      *grpc.ClientConn
	ctx       context.Context // ends with Close
	cancel    context.CancelFunc
	broadcast membership.Broadcast
	notices   <-chan *torchftpb.Notice

	opening chan struct{}          // a lock for opening a stream; waiting for it ends with a call's deadline
	stream  atomic.Pointer[stream] // nil before the first call
	number  atomic.Uint64          // of the last call
	rank    atomic.Int64           // group rank of the calls, -1 before the first one
}

type stream = rpc.Stream[torchftpb.RankRequest, torchftpb.RankResponse, *torchftpb.RankResponse]

func newSession(conn *grpc.ClientConn) *session {
	s := &session{
		conn:    conn,
		opening: make(chan struct{}, 1),
	}
	s.rank.Store(-1)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.notices, _ = s.broadcast.Listen()
	return s
}

func (s *session) Quorum(
	ctx context.Context, req *torchftpb.ManagerQuorumRequest,
) (*torchftpb.ManagerQuorumResponse, error) {
	s.rank.Store(req.GetGroupRank())
	resp, err := s.call(ctx, &torchftpb.RankRequest{Request: &torchftpb.RankRequest_Quorum{Quorum: req}})
	return resp.GetQuorum(), err
}

func (s *session) ShouldCommit(
	ctx context.Context, req *torchftpb.ShouldCommitRequest,
) (*torchftpb.ShouldCommitResponse, error) {
	resp, err := s.call(ctx,
		&torchftpb.RankRequest{Request: &torchftpb.RankRequest_ShouldCommit{ShouldCommit: req}})
	return resp.GetShouldCommit(), err
}

func (s *session) Leave(ctx context.Context, req *torchftpb.LeaveRequest) (*torchftpb.LeaveResponse, error) {
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	return torchftpb.NewRankServiceClient(s.conn).Leave(ctx, req)
}

func (s *session) CheckpointMetadata(
	ctx context.Context, req *torchftpb.CheckpointMetadataRequest,
) (*torchftpb.CheckpointMetadataResponse, error) {
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	return torchftpb.NewManagerServiceClient(s.conn).CheckpointMetadata(ctx, req)
}

func (s *session) Notices() <-chan *torchftpb.Notice { return s.notices }

// Report sends a report if the session is open, and drops it otherwise. It does not take the lock of opening:
// a report must not wait for a stream that is being opened, and must not be dropped because a call checks the
// stream at the same moment.
func (s *session) Report(req *torchftpb.RankRequest) {
	if stream := s.stream.Load(); stream != nil {
		stream.Post(req)
	}
}

func (s *session) Close() error {
	if stream := s.stream.Load(); stream != nil {
		select {
		case <-stream.Flushed():
		case <-time.After(rpc.FarewellTime):
		}
	}
	s.cancel()
	return s.conn.Close()
}

func (s *session) call(ctx context.Context, req *torchftpb.RankRequest) (*torchftpb.RankResponse, error) {
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	stream, err := s.connect(ctx)
	if err != nil {
		return nil, err
	}
	deadline, _ := ctx.Deadline()
	req.Call, req.TimeoutUs = s.number.Add(1), max(1, time.Until(deadline).Microseconds())
	return stream.Call(ctx, req.GetCall(), func() *torchftpb.RankRequest { return req },
		&torchftpb.RankRequest{Call: req.GetCall(), Request: &torchftpb.RankRequest_Cancel{Cancel: true}})
}

// connect returns the open stream. If it broke, connect opens another one, and blocks until the connection is
// established.
func (s *session) connect(ctx context.Context) (*stream, error) {
	select {
	case s.opening <- struct{}{}:
		defer func() { <-s.opening }()
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	before := s.stream.Load()
	if before != nil && !before.Broken() {
		return before, nil
	}
	wire, cancel, err := rpc.OpenStream(ctx, s.ctx, torchftpb.NewRankServiceClient(s.conn).Session)
	if err != nil {
		return nil, err
	}
	opened := rpc.NewStream[torchftpb.RankRequest, torchftpb.RankResponse, *torchftpb.RankResponse](wire,
		cancel)
	if rank := s.rank.Load(); before != nil && rank >= 0 {
		opened.Post(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Hello{Hello: rank}})
	}
	s.stream.Store(opened)
	go func() {
		opened.Receive(func(resp *torchftpb.RankResponse) error { return s.receive(opened, resp) })
		s.reopen(opened)
	}()
	return opened, nil
}

// receive passes a message of the server to the call or the listeners that it is for.
func (s *session) receive(from *stream, resp *torchftpb.RankResponse) error {
	if notice := resp.GetNotice(); notice != nil {
		s.broadcast.Notify(notice)
	} else if failure := resp.GetFailure(); failure != nil {
		from.Answer(resp.GetCall(), nil, wire.FailureFromProto(failure))
	} else {
		from.Answer(resp.GetCall(), resp, nil)
	}
	return nil
}

// reopenTime is how long reopen retries. After that, the next call opens a stream.
const reopenTime = 10 * time.Second

// reopen opens another stream soon after one broke, so that the server learns that the rank is alive and only
// the connection broke.
func (s *session) reopen(broken *stream) {
	if status.Code(broken.Err()) == codes.Unimplemented {
		return
	}
	ctx, cancel := context.WithTimeout(s.ctx, reopenTime)
	defer cancel()
	for failed := 1; ctx.Err() == nil; failed++ {
		if _, err := s.connect(ctx); err == nil {
			return
		}
		rpc.Pause(ctx, failed)
	}
}
