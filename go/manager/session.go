package manager

import (
	"cmp"
	"context"
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

// Session serves one rank's stream until either side ends it. A server that shuts down sends the last answers before.
func (s sessions) Session(stream grpc.BidiStreamingServer[torchftpb.RankRequest, torchftpb.RankResponse]) error {
	server := s.service.server
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	o := &openSession{
		wire:   stream,
		server: server,
		conn:   connectionOf(ctx),
		parent: tracing.Incoming(ctx),
		open:   map[uint64]*sessionCall{},
		wake:   make(chan struct{}, 1),
	}
	heard, deaf := server.notices.Listen()
	defer deaf()
	received := make(chan error, 1)
	rpc.Go(&server.tasks, server.log, "session", func() { received <- o.receive(ctx) })
	for {
		select {
		case <-o.wake:
			o.sendAnswers()
		case f := <-heard:
			o.send(wire.NoticeToRank(f))
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

// openSession is one rank's stream and its calls in progress. It costs two goroutines, however many calls wait: one receives
// and feeds the machine, the other one sends what the machine answers. A goroutine for each call would be half of what a step
// costs the server of a group with thousands of ranks.
type openSession struct {
	wire   grpc.BidiStreamingServer[torchftpb.RankRequest, torchftpb.RankResponse]
	server *Server
	conn   *connection
	parent string // trace context of the stream; empty unless it is traced
	leaves sync.WaitGroup
	wake   chan struct{} // has something when there are answers

	// The server's lock may be held where this one is taken, never the other way round.
	mu       sync.Mutex
	finished bool
	refused  sync.Once
	open     map[uint64]*sessionCall // that are not sent their answers, so that mostCalls bounds those too
	answers  []*sessionCall
}

// sessionCall is a call in progress. The session's lock guards what it adds; once it is among the answers, only the sender uses it.
type sessionCall struct {
	rankCall
	number uint64

	cancel context.CancelFunc // of a leaveCall that has begun
	done   bool
	answer answer
}

func (o *openSession) receive(ctx context.Context) (err error) {
	defer rpc.Recovered(o.server.log, "a session", &err)
	for {
		req, err := o.wire.Recv()
		if err != nil {
			return err
		}
		if req.GetGiveUp() {
			o.giveUp(req.GetCall())
			continue
		}
		if o.said(req) {
			continue
		}
		if !o.start(ctx, req) {
			return nil
		}
	}
}

// said takes what has no answer.
func (o *openSession) said(req *torchftpb.RankRequest) bool {
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

// start begins a call; false: the session takes no more.
func (o *openSession) start(ctx context.Context, req *torchftpb.RankRequest) bool {
	call := &sessionCall{rankCall: callFromProto(req), number: req.GetCall()}
	timeout := time.Duration(req.GetTimeoutUs()) * time.Microsecond
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
	if len(o.open) >= mostCalls || o.open[call.number] != nil {
		o.refused.Do(func() {
			o.server.log.Warn("torchft: a session is ended: its rank makes calls and takes no answers, or numbers two alike", "calls", len(o.open))
		})
		return false
	}
	o.open[call.number] = call
	return true
}

// leave has a goroutine: it is called once in the life of a rank.
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

// giveUp ends a call that the rank does not wait for any more.
func (o *openSession) giveUp(number uint64) {
	o.mu.Lock()
	call := o.open[number]
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

// answer lets a call's answer be sent. It does not wait.
func (o *openSession) answer(call *sessionCall, a answer) {
	o.mu.Lock()
	defer o.mu.Unlock()
	call.done, call.answer = true, a
	o.answers = append(o.answers, call)
	select {
	case o.wake <- struct{}{}:
	default: // the sender has not woken up for the one before
	}
}

// sendAnswers sends all that there are. Only the session's own goroutine sends.
func (o *openSession) sendAnswers() {
	o.mu.Lock()
	answers := o.answers
	o.answers = nil
	o.mu.Unlock()
	for _, call := range answers {
		o.send(o.response(call))
		o.mu.Lock()
		delete(o.open, call.number)
		o.mu.Unlock()
	}
}

func (o *openSession) response(call *sessionCall) *torchftpb.RankResponse {
	a := call.end(call.answer)
	resp, err := o.wrap(call.kind, a)
	if err != nil {
		s := status.Convert(err)
		resp = &torchftpb.RankResponse{Response: &torchftpb.RankResponse_Failure{
			Failure: &torchftpb.CallFailure{Code: uint32(s.Code()), Message: s.Message()},
		}}
	}
	resp.Call = call.number
	return resp
}

func (o *openSession) wrap(kind callKind, a answer) (resp *torchftpb.RankResponse, err error) {
	defer rpc.Recovered(o.server.log, "an answer of a session", &err)
	if a.err != nil {
		return nil, a.err
	}
	switch kind {
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

func (o *openSession) send(resp *torchftpb.RankResponse) {
	_ = o.wire.Send(resp) // fails only if the stream has broken: receive returns then
}

// finish ends the calls in progress, and sends the answers that there are.
func (o *openSession) finish() {
	o.mu.Lock()
	o.finished = true
	var open []uint64
	for number := range o.open {
		open = append(open, number)
	}
	o.mu.Unlock()
	for _, number := range open {
		o.giveUp(number)
	}
	o.leaves.Wait()
	o.sendAnswers()
}
