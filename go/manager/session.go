package manager

import (
	"context"
	"sync"

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
	sender  rpc.Sender     // of answers and notices
	calls   sync.WaitGroup // those that have not been answered

	mu       sync.Mutex
	finished bool
	refused  sync.Once
	// ends each call whose answer has not been sent, by its number
	open map[uint64]context.CancelFunc
}

// Session serves a rank's stream until either side ends it. At a shutdown the last answers are sent first.
func (s service) Session(
	stream grpc.BidiStreamingServer[torchftpb.RankRequest, torchftpb.RankResponse],
) error {
	server := s.server
	o := &session{
		service: service{server: server, conn: connectionOf(stream.Context())}, stream: stream,
		sender: rpc.Sender{Pool: &server.pool}, open: map[uint64]context.CancelFunc{},
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
			cancel := o.open[req.GetCall()]
			o.mu.Unlock()
			if cancel != nil {
				cancel()
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

// begin begins a call on a goroutine of its own. It returns false if the session must end.
func (o *session) begin(req *torchftpb.RankRequest) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.finished {
		return false
	}
	number := req.GetCall()
	if len(o.open) >= mostCalls || o.open[number] != nil {
		o.refused.Do(func() {
			o.server.log.Warn("torchft: a session is ended: its rank makes calls and does not read the "+
				"answers, or uses the number of a call in progress again",
				"calls", len(o.open))
		})
		return false
	}
	ctx, cancel := context.WithTimeout(o.stream.Context(), rpc.Microseconds(req.GetTimeoutUs()))
	o.open[number] = cancel
	rpc.Go(&o.calls, o.server.log, "a call of a session", func() {
		resp, err := o.call(ctx, req)
		if err != nil {
			resp.Response = &torchftpb.RankResponse_Failure{Failure: wire.FailureToProto(err)}
		}
		// An answer that has been sent makes room for another call.
		if !o.sender.Post(func() {
			defer o.end(number)
			_ = o.stream.Send(resp) // fails only if the stream has broken: receive returns then
		}) {
			o.end(number) // the rank's call ends at its deadline
		}
	})
	return true
}

func (o *session) call(ctx context.Context, req *torchftpb.RankRequest) (
	resp *torchftpb.RankResponse, err error,
) {
	resp = &torchftpb.RankResponse{Call: req.GetCall()}
	defer rpc.Recovered(o.server.log, "a call of a session", &err)
	if req.GetTimeoutUs() <= 0 {
		return resp, status.Errorf(codes.InvalidArgument,
			"timeout_us is %d: a call of a session needs a deadline, above 0", req.GetTimeoutUs())
	}
	switch r := req.GetRequest().(type) {
	case *torchftpb.RankRequest_Quorum:
		result, err := o.Quorum(ctx, r.Quorum)
		resp.Response = &torchftpb.RankResponse_Quorum{Quorum: result}
		return resp, err
	case *torchftpb.RankRequest_ShouldCommit:
		decision, err := o.ShouldCommit(ctx, r.ShouldCommit)
		resp.Response = &torchftpb.RankResponse_ShouldCommit{ShouldCommit: decision}
		return resp, err
	default:
		return resp, status.Error(codes.Unimplemented, "this request of a session is not known here")
	}
}

func (o *session) end(number uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.open[number]()
	delete(o.open, number)
}

// finish ends the calls in progress, and waits until their answers have been sent: Send fails once the stream
// has ended. receive may still run.
func (o *session) finish() {
	o.mu.Lock()
	o.finished = true
	for _, cancel := range o.open {
		cancel()
	}
	o.mu.Unlock()
	o.calls.Wait()
	<-o.sender.Flushed()
}

func workedFromProto(o *torchftpb.OwnTimes) round.RankWorked {
	e := round.RankWorked{GroupRank: o.GetGroupRank(), Host: o.GetHost()}
	for _, us := range o.GetTookUs() {
		e.Took = append(e.Took, rpc.Microseconds(us))
	}
	return e
}
