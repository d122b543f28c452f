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

// Session serves one rank's stream.
func (s sessions) Session(stream grpc.BidiStreamingServer[torchftpb.RankRequest, torchftpb.RankResponse]) error {
	ctx, out := stream.Context(), newOutbox()
	return s.service.server.carry(ctx, out, &rankStream{stream, newSession(s.service.server, out, connectionOf(ctx), tracing.Incoming(ctx))})
}

// carrier is a stream with the session of one rank, or with those of a relay's ranks.
type carrier interface {
	// receive handles the requests of the ranks until the stream ends.
	receive(ctx context.Context) error
	send(answers []*sessionCall)
	notify(n *torchftpb.RankResponse)
	// finish ends the calls in progress. receive may still run.
	finish()
}

// carry serves a stream until either side ends it. A server that shuts down sends the last answers first.
func (s *Server) carry(ctx context.Context, out *outbox, c carrier) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	notices, stop := s.notices.Listen()
	defer stop()
	finish := func() {
		c.finish()
		out.leaves.Wait()
		c.send(out.take())
	}
	received := make(chan error, 1)
	rpc.Go(&s.tasks, s.log, "session", func() {
		var err error
		defer func() { received <- err }()
		defer rpc.Recovered(s.log, "a session", &err)
		err = c.receive(ctx)
	})
	for {
		select {
		case <-out.wake:
			c.send(out.take())
		case n := <-notices:
			c.notify(wire.NoticeToRank(n))
		case err := <-received:
			cancel()
			finish()
			return err
		case <-s.ctx.Done():
			finish()
			return status.Error(codes.Unavailable, "the manager server of "+s.cfg.ReplicaID+" is shutting down")
		}
	}
}

// outbox holds the answers of a stream until they are sent.
type outbox struct {
	wake   chan struct{}  // not empty while there are answers
	leaves sync.WaitGroup // calls that wait for the lighthouse

	mu      sync.Mutex
	answers []*sessionCall
}

func newOutbox() *outbox { return &outbox{wake: make(chan struct{}, 1)} }

// add queues an answer. It does not block, since the server's lock may be held.
func (b *outbox) add(call *sessionCall) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.answers = append(b.answers, call)
	select {
	case b.wake <- struct{}{}:
	default: // the sender has been woken and has not taken the answers yet: it will take this one with them
	}
}

func (b *outbox) take() (answers []*sessionCall) {
	b.mu.Lock()
	defer b.mu.Unlock()
	answers, b.answers = b.answers, nil
	return answers
}

// rankStream is the stream of one rank.
type rankStream struct {
	wire grpc.BidiStreamingServer[torchftpb.RankRequest, torchftpb.RankResponse]
	*openSession
}

func (r *rankStream) receive(ctx context.Context) error {
	for {
		req, err := r.wire.Recv()
		if err != nil {
			return err
		}
		if !r.take(ctx, req) {
			return nil
		}
	}
}

// Sending fails only if the stream has broken: receive returns then.

func (r *rankStream) send(answers []*sessionCall) {
	for _, call := range answers {
		_ = r.wire.Send(call.response())
		call.sent()
	}
}

func (r *rankStream) notify(n *torchftpb.RankResponse) { _ = r.wire.Send(n) }

// mostCalls bounds the open calls of a session: a rank makes one quorum call and one vote at a time, and a few that it has
// cancelled may still be open.
const mostCalls = 64

// openSession has one rank's calls in progress. Its stream needs two goroutines for any number of calls: one receives requests and
// feeds the machine, the other one sends the answers. In a group with thousands of ranks, a goroutine for each call would be half
// of a step's cost for the server.
type openSession struct {
	number uint64 // of the session at its relay
	out    *outbox
	server *Server
	conn   *connection
	parent string // trace context of the stream; empty unless it is traced

	// Lock order: this lock may be taken while the server's is held, never the other way round.
	mu       sync.Mutex
	finished bool
	refused  sync.Once
	open     []*sessionCall // calls whose answers have not been sent, mostly one or two; mostCalls bounds unsent answers, too
}

func newSession(server *Server, out *outbox, conn *connection, parent string) *openSession {
	return &openSession{server: server, out: out, conn: conn, parent: parent}
}

// sessionCall is a call in progress. The session's lock guards the fields that it adds to rankCall; once its answer is queued, only
// the sender uses it.
type sessionCall struct {
	rankCall
	session *openSession
	number  uint64

	cancel context.CancelFunc // of a leaveCall that has begun
	done   bool
	answer answer
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
	call := &sessionCall{rankCall: callFromProto(req), session: o, number: req.GetCall()}
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
	rpc.Go(&o.out.leaves, o.server.log, "leave", func() {
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

// answer ends a call, and queues its answer. It does not block.
func (o *openSession) answer(call *sessionCall, a answer) {
	o.mu.Lock()
	call.done, call.answer = true, a
	o.mu.Unlock()
	o.out.add(call)
}

// sent removes a call whose answer has been sent, so that the session accepts another one.
func (c *sessionCall) sent() {
	c.session.mu.Lock()
	defer c.session.mu.Unlock()
	c.session.open = slices.DeleteFunc(c.session.open, func(open *sessionCall) bool { return open == c })
}

func (c *sessionCall) response() *torchftpb.RankResponse {
	resp, err := c.wrap(c.end(c.answer))
	if err != nil {
		s := status.Convert(err)
		resp = &torchftpb.RankResponse{Response: &torchftpb.RankResponse_Failure{
			Failure: &torchftpb.CallFailure{Code: uint32(s.Code()), Message: s.Message()},
		}}
	}
	resp.Call = c.number
	return resp
}

func (c *sessionCall) wrap(a answer) (resp *torchftpb.RankResponse, err error) {
	defer rpc.Recovered(c.session.server.log, "an answer of a session", &err)
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

// finish ends the calls in progress.
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
}
