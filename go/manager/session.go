package manager

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
	"github.com/torchft/torchft/go/torchftpb"
)

// mostCalls bounds the open calls of a session: a rank makes one quorum call and one vote at a time, and a
// few that it has cancelled may still be open.
const mostCalls = 64

// session is one rank's stream with its calls in progress.
type session struct {
	service // its calls come from the connection of the stream
	stream  grpc.BidiStreamingServer[torchftpb.RankRequest, torchftpb.RankResponse]
	sender  rpc.Sender // of answers and notices

	// Lock order: this lock may be taken while the server's is held, never the other way round.
	mu       sync.Mutex
	finished bool
	refused  sync.Once
	open     map[uint64]*rankCall // whose answers have not been sent, by their numbers
}

// Session serves a rank's stream until either side ends it. At a shutdown the last answers are sent first.
func (s service) Session(
	stream grpc.BidiStreamingServer[torchftpb.RankRequest, torchftpb.RankResponse],
) error {
	server := s.server
	o := &session{
		service: service{server: server, conn: connectionOf(stream.Context())}, stream: stream,
		sender: rpc.Sender{Pool: &server.pool}, open: map[uint64]*rankCall{},
	}
	notices, stop := server.notices.Listen()
	defer stop()
	received := make(chan error, 1)
	rpc.Go(&server.tasks, server.log, "session", func() { received <- o.receive() })
	for {
		select {
		case n := <-notices:
			// dropped if the rank does not read, whose collectives then time out
			o.sender.Post(func() {
				_ = stream.Send(&torchftpb.RankResponse{Response: &torchftpb.RankResponse_Notice{Notice: n}})
			})
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

// receive handles the requests of the rank until the stream ends.
func (o *session) receive() (err error) {
	defer rpc.Recovered(o.server.log, "a session", &err)
	for {
		req, err := o.stream.Recv()
		if err != nil {
			return err
		}
		switch {
		case req.GetCancel():
			o.mu.Lock()
			call := o.open[req.GetCall()]
			o.mu.Unlock()
			if call != nil {
				o.server.abandon(call, context.Canceled)
			}
		case o.server.report(o.conn, req):
		case !o.begin(req):
			return nil
		}
	}
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

// begin begins a call. It returns false if the session must end.
func (o *session) begin(req *torchftpb.RankRequest) bool {
	var call rankCall
	var err error
	switch r := req.GetRequest().(type) {
	case *torchftpb.RankRequest_Quorum:
		call = quorumFromProto(r.Quorum)
	case *torchftpb.RankRequest_ShouldCommit:
		call = voteFromProto(r.ShouldCommit)
	default:
		err = status.Error(codes.Unimplemented, "this request of a session is not known here")
	}
	timeout, number := rpc.Microseconds(req.GetTimeoutUs()), req.GetCall()
	if err == nil && timeout <= 0 {
		err = status.Errorf(codes.InvalidArgument,
			"timeout_us is %d: a call of a session needs a deadline, above 0", req.GetTimeoutUs())
	}
	call.conn, call.deadline = o.conn, time.Now().Add(timeout)
	if !o.admit(number, &call) {
		return false
	}
	if err != nil {
		o.answer(number, call.kind, answer{err: err})
	} else {
		o.server.begin(&call, func(a answer) { o.answer(number, call.kind, a) })
	}
	return true
}

func (o *session) admit(number uint64, call *rankCall) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.finished {
		return false
	}
	if len(o.open) >= mostCalls || o.open[number] != nil {
		o.refused.Do(func() {
			o.server.log.Warn("torchft: a session is ended: its rank makes calls and does not read the "+
				"answers, or uses the number of a call in progress again",
				"calls", len(o.open))
		})
		return false
	}
	o.open[number] = call
	return true
}

// answer queues the answer to a call. It does not block, since the server's lock may be held. An answer that
// has been sent makes room for another call.
func (o *session) answer(number uint64, kind callKind, a answer) {
	end := func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		delete(o.open, number)
	}
	if !o.sender.Post(func() {
		defer end()
		// fails only if the stream has broken: receive returns then
		_ = o.stream.Send(response(number, kind, a))
	}) {
		end() // the rank's call ends at its deadline
	}
}

func response(number uint64, kind callKind, a answer) *torchftpb.RankResponse {
	resp := &torchftpb.RankResponse{Call: number}
	switch {
	case a.err != nil:
		resp.Response = &torchftpb.RankResponse_Failure{Failure: wire.FailureToProto(a.err)}
	case kind == voteCall:
		resp.Response = &torchftpb.RankResponse_ShouldCommit{
			ShouldCommit: &torchftpb.ShouldCommitResponse{ShouldCommit: a.commit, Stands: a.stands},
		}
	default:
		resp.Response = &torchftpb.RankResponse_Quorum{Quorum: wire.ResultToProto(a.result)}
	}
	return resp
}

// finish ends the calls in progress, and waits until their answers have been sent: Send fails once the stream
// has ended. receive may still run.
func (o *session) finish() {
	o.mu.Lock()
	o.finished = true
	open := slices.Collect(maps.Values(o.open))
	o.mu.Unlock()
	for _, call := range open {
		o.server.abandon(call, context.Canceled)
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
