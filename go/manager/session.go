package manager

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/rankclient"
	"github.com/torchft/torchft/go/round"
	"github.com/torchft/torchft/go/torchftpb"
)

// sessions serves torchft.RankService.
type sessions struct {
	torchftpb.UnimplementedRankServiceServer
	service service
}

// Session serves one rank's stream until either side ends it. A server that shuts down sends the last answers first.
func (s sessions) Session(stream grpc.BidiStreamingServer[torchftpb.RankRequest, torchftpb.RankResponse]) error {
	server := s.service.server
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	o := &openSession{
		stream: stream, server: server, conn: connectionOf(ctx), parent: tracing.Incoming(ctx), wake: make(chan struct{}, 1),
	}
	notices, stop := server.notices.Listen()
	defer stop()
	received := make(chan error, 1)
	rpc.Go(&server.tasks, server.log, "session", func() { received <- o.receive(ctx) })
	for {
		select {
		case <-o.wake:
			o.sendAnswers()
		case n := <-notices:
			_ = stream.Send(wire.NoticeToRank(n)) // fails only if the stream has broken: receive returns then
		case err := <-received:
			cancel()
			o.finish()
			return err
		case <-server.ctx.Done():
			o.finish()
			return status.Error(codes.Unavailable, "the manager server of "+server.cfg.ReplicaID+" is shutting down")
		}
	}
}

// mostCalls bounds the open calls of a session: a rank makes one quorum call and one vote at a time, and a few that it has
// cancelled may still be open.
const mostCalls = 64

// openSession is one rank's stream with its calls in progress. It needs two goroutines for any number of calls: one receives requests
// and feeds the machine, the other one sends the answers. In a group with thousands of ranks, a goroutine for each call would be half
// of a step's cost for the server.
type openSession struct {
	stream grpc.BidiStreamingServer[torchftpb.RankRequest, torchftpb.RankResponse]
	server *Server
	conn   *connection
	parent string         // trace context of the stream; empty unless it is traced
	leaves sync.WaitGroup // calls that wait for the lighthouse
	wake   chan struct{}  // not empty while there are answers

	// Lock order: this lock may be taken while the server's is held, never the other way round.
	mu       sync.Mutex
	finished bool
	refused  sync.Once
	open     []*sessionCall // calls whose answers have not been sent, mostly one or two; mostCalls bounds unsent answers, too
	answers  []*sessionCall // still to be sent
}

// sessionCall is a call in progress. The session's lock guards the fields that it adds to rankCall; once its answer is queued, only
// the sender uses it.
type sessionCall struct {
	rankCall
	number uint64

	cancel context.CancelFunc // of a leaveCall that has begun
	done   bool
	answer answer
}

// receive handles the requests of the rank until the stream ends.
func (o *openSession) receive(ctx context.Context) (err error) {
	defer rpc.Recovered(o.server.log, "a session", &err)
	for {
		req, err := o.stream.Recv()
		if err != nil {
			return err
		}
		if !o.take(ctx, req) {
			return nil
		}
	}
}

// take handles a request of the rank. It returns false if the session must end.
func (o *openSession) take(ctx context.Context, req *torchftpb.RankRequest) bool {
	switch {
	case req.GetCancel():
		o.cancelCall(req.GetCall())
	case !o.takeReport(req):
		return o.start(ctx, req)
	}
	return true
}

// takeReport handles a request that has no answer. It returns false for any other request.
func (o *openSession) takeReport(req *torchftpb.RankRequest) bool {
	switch r := req.GetRequest().(type) {
	case *torchftpb.RankRequest_Suspected:
		o.server.suspect(r.Suspected.GetQuorumId(), r.Suspected.GetReplicaId())
	case *torchftpb.RankRequest_Hello:
		o.server.present(o.conn, r.Hello)
	case *torchftpb.RankRequest_Healing:
		o.server.healing(wire.HealProgressFromProto(r.Healing))
	case *torchftpb.RankRequest_Recovered:
		o.server.recovered(wire.RecoveredFromProto(r.Recovered))
	case *torchftpb.RankRequest_Counted:
		c := r.Counted
		o.server.counted(rankclient.Counted{GroupRank: c.GetGroupRank(), Name: c.GetName(), Number: c.GetNumber()})
	case *torchftpb.RankRequest_Progress:
		p := r.Progress
		o.server.feed(round.RankProgressed{GroupRank: p.GetGroupRank(), Waits: p.GetWaits(), What: p.GetWhat()})
	default:
		return false
	}
	return true
}

// start begins a call. It returns false if the session must end.
func (o *openSession) start(ctx context.Context, req *torchftpb.RankRequest) bool {
	call := &sessionCall{rankCall: callFromProto(req), number: req.GetCall()}
	timeout := rpc.Microseconds(req.GetTimeoutUs())
	call.conn, call.traceparent, call.deadline = o.conn, cmp.Or(call.traceparent, o.parent), time.Now().Add(timeout)
	if !o.admit(call) {
		return false
	}
	switch {
	case timeout <= 0:
		o.answer(call, answer{err: status.Errorf(codes.InvalidArgument, "timeout_us is %d: a call of a session needs a deadline, above 0", req.GetTimeoutUs())})
	case call.kind == unknownCall:
		o.answer(call, answer{err: status.Error(codes.Unimplemented, "this request of a session is not known here")})
	case call.kind == leaveCall:
		o.leave(ctx, call)
	default:
		o.server.begin(&call.rankCall, func(a answer) { o.answer(call, a) })
	}
	return true
}

func callFromProto(req *torchftpb.RankRequest) rankCall {
	switch r := req.GetRequest().(type) {
	case *torchftpb.RankRequest_Quorum:
		return quorumFromProto(r.Quorum)
	case *torchftpb.RankRequest_ShouldCommit:
		return voteFromProto(r.ShouldCommit)
	case *torchftpb.RankRequest_Leave:
		return rankCall{kind: leaveCall}
	default:
		return rankCall{kind: unknownCall}
	}
}

func (o *openSession) admit(call *sessionCall) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.finished {
		return false
	}
	if len(o.open) >= mostCalls || o.call(call.number) != nil {
		o.refused.Do(func() {
			o.server.log.Warn("torchft: a session is ended: its rank makes calls and does not read the answers, or uses the number of a call in progress again",
				"calls", len(o.open))
		})
		return false
	}
	o.open = append(o.open, call)
	return true
}

// call returns the call in progress with this number, nil if there is none. The caller holds mu.
func (o *openSession) call(number uint64) *sessionCall {
	if i := slices.IndexFunc(o.open, func(c *sessionCall) bool { return c.number == number }); i >= 0 {
		return o.open[i]
	}
	return nil
}

// leave starts a goroutine for its call. No other call has one: this call waits for the lighthouse, and a rank makes it only once.
func (o *openSession) leave(ctx context.Context, call *sessionCall) {
	ctx, cancel := context.WithDeadline(ctx, call.deadline)
	o.mu.Lock()
	call.cancel = cancel
	o.mu.Unlock()
	rpc.Go(&o.leaves, o.server.log, "leave", func() {
		defer cancel()
		var a answer
		defer func() { o.answer(call, a) }()
		defer rpc.Recovered(o.server.log, "a call of a session", &a.err)
		a.err = o.server.leave(ctx)
	})
}

// cancelCall ends a call that the rank no longer waits for.
func (o *openSession) cancelCall(number uint64) {
	o.mu.Lock()
	call := o.call(number)
	if call == nil || call.done {
		o.mu.Unlock()
		return
	}
	cancel := call.cancel
	o.mu.Unlock()
	if cancel != nil {
		cancel()
		return
	}
	o.server.abandon(&call.rankCall, context.Canceled)
}

// answer ends a call, and queues its answer. It does not block, since the server's lock may be held.
func (o *openSession) answer(call *sessionCall, a answer) {
	o.mu.Lock()
	defer o.mu.Unlock()
	call.done, call.answer = true, a
	o.answers = append(o.answers, call)
	select {
	case o.wake <- struct{}{}:
	default: // the sender has been woken and has not taken the answers yet: it will take this one with them
	}
}

// sendAnswers sends the queued answers. A call whose answer has been sent makes room for another one.
func (o *openSession) sendAnswers() {
	o.mu.Lock()
	answers := o.answers
	o.answers = nil
	o.mu.Unlock()
	for _, call := range answers {
		_ = o.stream.Send(o.response(call)) // fails only if the stream has broken: receive returns then
		o.mu.Lock()
		o.open = slices.DeleteFunc(o.open, func(open *sessionCall) bool { return open == call })
		o.mu.Unlock()
	}
}

func (o *openSession) response(c *sessionCall) *torchftpb.RankResponse {
	resp, err := o.wrap(c, c.end(c.answer))
	if err != nil {
		s := status.Convert(err)
		resp = &torchftpb.RankResponse{Response: &torchftpb.RankResponse_Failure{
			Failure: &torchftpb.CallFailure{Code: uint32(s.Code()), Message: s.Message()},
		}}
	}
	resp.Call = c.number
	return resp
}

func (o *openSession) wrap(c *sessionCall, a answer) (resp *torchftpb.RankResponse, err error) {
	defer rpc.Recovered(o.server.log, "an answer of a session", &err)
	if a.err != nil {
		return nil, a.err
	}
	switch c.kind {
	case quorumCall:
		return &torchftpb.RankResponse{Response: &torchftpb.RankResponse_Quorum{Quorum: wire.ResultToProto(*a.result)}}, nil
	case voteCall:
		return &torchftpb.RankResponse{Response: &torchftpb.RankResponse_ShouldCommit{
			ShouldCommit: &torchftpb.ShouldCommitResponse{ShouldCommit: a.commit},
		}}, nil
	default:
		return &torchftpb.RankResponse{Response: &torchftpb.RankResponse_Left{Left: true}}, nil
	}
}

// finish ends the calls in progress, and sends their answers. receive may still run.
func (o *openSession) finish() {
	o.mu.Lock()
	o.finished = true
	var open []uint64
	for _, call := range o.open {
		open = append(open, call.number)
	}
	o.mu.Unlock()
	for _, number := range open {
		o.cancelCall(number)
	}
	o.leaves.Wait()
	o.sendAnswers()
}
