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
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
	"github.com/torchft/torchft/go/torchftpb"
)

// sessions serves torchft.RankService.
type sessions struct {
	torchftpb.UnimplementedRankServiceServer
	service service
}

// Session serves a rank's stream until either side ends it. At a shutdown the last answers are sent first.
func (s sessions) Session(
	stream grpc.BidiStreamingServer[torchftpb.RankRequest, torchftpb.RankResponse],
) error {
	server := s.service.server
	ctx := stream.Context()
	o := &openSession{
		stream: stream, server: server, conn: connectionOf(ctx), parent: tracing.Incoming(ctx),
		sender: rpc.Sender{Pool: &server.pool},
	}
	notices, stop := server.notices.Listen()
	defer stop()
	received := make(chan error, 1)
	rpc.Go(&server.tasks, server.log, "session", func() { received <- o.receive() })
	for {
		select {
		case n := <-notices:
			o.notify(n)
		case err := <-received:
			o.finish()
			return err
		case <-server.ctx.Done():
			o.finish()
			return status.Error(codes.Unavailable, "the manager server of "+server.cfg.ReplicaID+" is "+
				"shutting down")
		}
	}
}

// Leave waits for the lighthouse, not for the other ranks.
func (s sessions) Leave(ctx context.Context, _ *torchftpb.LeaveRequest) (*torchftpb.LeaveResponse, error) {
	return &torchftpb.LeaveResponse{}, s.service.server.leave(ctx)
}

// mostCalls bounds the open calls of a session: a rank makes one quorum call and one vote at a time, and a
// few that it has cancelled may still be open.
const mostCalls = 64

// openSession is one rank's stream with its calls in progress. A goroutine receives the requests and feeds
// the machine.
type openSession struct {
	stream grpc.BidiStreamingServer[torchftpb.RankRequest, torchftpb.RankResponse]
	server *Server
	conn   *connection
	parent string // trace context of the stream; empty unless it is traced

	sender rpc.Sender // of answers and notices

	// Lock order: this lock may be taken while the server's is held, never the other way round.
	mu       sync.Mutex
	finished bool
	refused  sync.Once
	// calls whose answers have not been sent, mostly one or two; mostCalls bounds unsent answers, too
	open []*sessionCall
}

// sessionCall is a call in progress. The session's lock guards the fields that it adds to rankCall.
type sessionCall struct {
	rankCall
	number uint64
	done   bool
}

// receive handles the requests of the rank until the stream ends.
func (o *openSession) receive() (err error) {
	defer rpc.Recovered(o.server.log, "a session", &err)
	for {
		req, err := o.stream.Recv()
		if err != nil {
			return err
		}
		if !o.take(req) {
			return nil
		}
	}
}

// take handles a request of the rank. It returns false if the session must end.
func (o *openSession) take(req *torchftpb.RankRequest) bool {
	switch {
	case req.GetCancel():
		o.cancelCall(req.GetCall())
	case !o.server.report(o.conn, req):
		return o.start(req)
	}
	return true
}

// report handles a request of a rank that has no answer. It returns false for any other request.
func (s *Server) report(from *connection, req *torchftpb.RankRequest) bool {
	switch r := req.GetRequest().(type) {
	case *torchftpb.RankRequest_Suspected:
		s.suspected.Store(r.Suspected)
		s.reportSuspected()
	case *torchftpb.RankRequest_Hello:
		s.present(from, r.Hello)
	case *torchftpb.RankRequest_Healing:
		s.healing(r.Healing)
	case *torchftpb.RankRequest_Recovered:
		s.recovered(r.Recovered)
	case *torchftpb.RankRequest_Counted:
		s.counted(r.Counted)
	case *torchftpb.RankRequest_Progress:
		p := r.Progress
		s.feed(round.RankProgressed{GroupRank: p.GetGroupRank(), Waits: p.GetWaits(), What: p.GetWhat(),
			Phase: quorum.PhaseOf(p.GetPhase()), Begins: p.GetBegins()})
	case *torchftpb.RankRequest_Stacks:
		s.membership.Report(&torchftpb.MemberMessage{
			Message: &torchftpb.MemberMessage_Stacks{Stacks: r.Stacks},
		})
	case *torchftpb.RankRequest_Raised:
		s.membership.Report(&torchftpb.MemberMessage{
			Message: &torchftpb.MemberMessage_Raised{Raised: r.Raised},
		})
	case *torchftpb.RankRequest_Corrupted:
		s.membership.Report(&torchftpb.MemberMessage{
			Message: &torchftpb.MemberMessage_Corrupted{Corrupted: r.Corrupted},
		})
	case *torchftpb.RankRequest_Own:
		s.feed(workedFromProto(r.Own))
	case *torchftpb.RankRequest_Drain:
		s.feed(round.DrainAsked{})
	default:
		return false
	}
	return true
}

// start begins a call. It returns false if the session must end.
func (o *openSession) start(req *torchftpb.RankRequest) bool {
	call := &sessionCall{rankCall: callFromProto(req), number: req.GetCall()}
	timeout := rpc.Microseconds(req.GetTimeoutUs())
	call.conn, call.traceparent, call.deadline = o.conn, cmp.Or(call.traceparent, o.parent),
		time.Now().Add(timeout)
	if !o.admit(call) {
		return false
	}
	switch {
	case timeout <= 0:
		o.answer(call, answer{err: status.Errorf(codes.InvalidArgument,
			"timeout_us is %d: a call of a session needs a deadline, above 0", req.GetTimeoutUs())})
	case call.kind == unknownCall:
		o.answer(call, answer{err: status.Error(codes.Unimplemented,
			"this request of a session is not known here")})
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
			o.server.log.Warn("torchft: a session is ended: its rank makes calls and does not read the "+
				"answers, or uses the number of a call in progress again",
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

// cancelCall ends a call that the rank no longer waits for.
func (o *openSession) cancelCall(number uint64) {
	o.mu.Lock()
	call := o.call(number)
	ended := call == nil || call.done
	o.mu.Unlock()
	if !ended {
		o.server.abandon(&call.rankCall, context.Canceled)
	}
}

// answer ends a call, and queues its answer. It does not block, since the server's lock may be held. An
// answer that has been sent makes room for another call.
func (o *openSession) answer(call *sessionCall, a answer) {
	o.mu.Lock()
	call.done = true
	o.mu.Unlock()
	remove := func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.open = slices.DeleteFunc(o.open, func(open *sessionCall) bool { return open == call })
	}
	posted := o.sender.Post(func() {
		defer remove()
		_ = o.stream.SendMsg(o.response(call, a)) // fails only if the stream has broken: receive returns then
	})
	if !posted {
		remove() // the call ends at its deadline
	}
}

// notify queues a notice. It is dropped if the rank does not read, whose collectives then time out.
func (o *openSession) notify(n *torchftpb.Notice) {
	message := &torchftpb.RankResponse{Response: &torchftpb.RankResponse_Notice{Notice: n}}
	o.sender.Post(func() { _ = o.stream.Send(message) })
}

// votes are the answers to votes, encoded: all ranks of a group get the same one.
var votes = map[answer]rpc.Encoded{}

func init() {
	for _, a := range []answer{{}, {commit: true}, {commit: true, stands: true}, {stands: true}} {
		votes[a], _ = proto.Marshal(&torchftpb.RankResponse{Response: &torchftpb.RankResponse_ShouldCommit{
			// always valid
			ShouldCommit: &torchftpb.ShouldCommitResponse{ShouldCommit: a.commit, Stands: a.stands},
		}})
	}
}

func (o *openSession) response(c *sessionCall, a answer) any {
	a = c.end(a)
	if c.kind == voteCall && a.err == nil {
		return rpc.Numbered{Number: c.number, Message: votes[a]}
	}
	resp := &torchftpb.RankResponse{Call: c.number}
	if a.err != nil {
		resp.Response = &torchftpb.RankResponse_Failure{Failure: wire.FailureToProto(a.err)}
	} else {
		resp.Response = &torchftpb.RankResponse_Quorum{Quorum: wire.ResultToProto(*a.result)}
	}
	return resp
}

// finish ends the calls in progress, and waits until their answers have been sent: Send fails once the stream
// has ended. receive may still run.
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
	<-o.sender.Flushed()
}

func workedFromProto(o *torchftpb.OwnTimes) round.RankWorked {
	e := round.RankWorked{GroupRank: o.GetGroupRank(), Host: o.GetHost()}
	for _, us := range o.GetTookUs() {
		e.Took = append(e.Took, rpc.Microseconds(us))
	}
	return e
}
