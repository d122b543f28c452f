package manager

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/round"
	"github.com/torchft/torchft/go/torchftpb"
)

// sessions serves torchft.RankService.
type sessions struct {
	torchftpb.UnimplementedRankServiceServer
	service service
}

// Session serves one rank's stream until either side ends it. A server that shuts down sends the last answers before.
func (s sessions) Session(wire grpc.BidiStreamingServer[torchftpb.RankRequest, torchftpb.RankResponse]) error {
	server := s.service.server
	ctx, cancel := context.WithCancel(wire.Context())
	defer cancel()
	o := &openSession{wire: wire, service: s.service, giveUp: map[uint64]context.CancelFunc{}}
	heard, deaf := server.notices.listen()
	defer deaf()
	received := make(chan error, 1)
	rpc.Go(&server.tasks, server.log, "session", func() { received <- o.receive(ctx) })
	for {
		select {
		case f := <-heard:
			o.send(noticeToRank(f))
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

// mostCalls are open at once in a session: a rank makes one quorum call and one vote at a time, and a few may be on their way
// that it gave up.
const mostCalls = 64

// openSession is one rank's stream and its calls in progress.
type openSession struct {
	wire    grpc.BidiStreamingServer[torchftpb.RankRequest, torchftpb.RankResponse]
	service service
	calls   sync.WaitGroup

	sending sync.Mutex

	mu       sync.Mutex
	finished bool
	refused  sync.Once
	giveUp   map[uint64]context.CancelFunc
}

func (o *openSession) receive(ctx context.Context) error {
	for {
		req, err := o.wire.Recv()
		if err != nil {
			return err
		}
		if req.GetGiveUp() {
			o.mu.Lock()
			if cancel := o.giveUp[req.GetCall()]; cancel != nil {
				cancel()
			}
			o.mu.Unlock()
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
	server := o.service.server
	switch r := req.GetRequest().(type) {
	case *torchftpb.RankRequest_Suspected:
		server.suspect(r.Suspected.GetQuorumId(), r.Suspected.GetReplicaId())
	case *torchftpb.RankRequest_Hello:
		server.present(connectionOf(o.wire.Context()), r.Hello)
	case *torchftpb.RankRequest_Healing:
		server.healing(healProgressFromProto(r.Healing))
	case *torchftpb.RankRequest_Recovered:
		server.recovered(recoveredFromProto(r.Recovered))
	case *torchftpb.RankRequest_Counted:
		c := r.Counted
		server.counted(Counted{GroupRank: c.GetGroupRank(), Name: c.GetName(), Number: c.GetNumber()})
	case *torchftpb.RankRequest_Progress:
		p := r.Progress
		server.feed(round.RankProgressed{GroupRank: p.GetGroupRank(), Waits: p.GetWaits(), What: p.GetWhat()})
	default:
		return false
	}
	return true
}

// start serves a call on a goroutine of its own; false: the session takes no more.
func (o *openSession) start(ctx context.Context, req *torchftpb.RankRequest) bool {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(req.GetTimeoutUs())*time.Microsecond)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.finished {
		cancel()
		return false
	}
	if len(o.giveUp) >= mostCalls || o.giveUp[req.GetCall()] != nil {
		cancel()
		o.refused.Do(func() {
			o.service.server.log.Warn("torchft: a session is ended: its rank makes calls and takes no answers, or numbers two alike", "calls", len(o.giveUp))
		})
		return false
	}
	o.giveUp[req.GetCall()] = cancel
	rpc.Go(&o.calls, o.service.server.log, "call of a session", func() {
		defer cancel()
		resp := o.answer(ctx, req)
		o.mu.Lock()
		delete(o.giveUp, req.GetCall())
		o.mu.Unlock()
		o.send(resp)
	})
	return true
}

func (o *openSession) send(resp *torchftpb.RankResponse) {
	o.sending.Lock()
	defer o.sending.Unlock()
	_ = o.wire.Send(resp) // fails only if the stream has broken: receive returns then
}

// finish waits for the calls in progress, whose contexts or waiters have ended.
func (o *openSession) finish() {
	o.mu.Lock()
	o.finished = true
	o.mu.Unlock()
	o.calls.Wait()
}

func (o *openSession) answer(ctx context.Context, req *torchftpb.RankRequest) *torchftpb.RankResponse {
	resp := &torchftpb.RankResponse{Call: req.GetCall()}
	err := o.serve(ctx, req, resp)
	if err != nil {
		s := status.Convert(err)
		resp.Response = &torchftpb.RankResponse_Failure{Failure: &torchftpb.CallFailure{Code: uint32(s.Code()), Message: s.Message()}}
	}
	return resp
}

func (o *openSession) serve(ctx context.Context, req *torchftpb.RankRequest, resp *torchftpb.RankResponse) (err error) {
	defer rpc.Recovered(o.service.server.log, "a call of a session", &err)
	if req.GetTimeoutUs() <= 0 {
		return status.Errorf(codes.InvalidArgument, "timeout_us is %d: a call of a session needs a deadline, above 0", req.GetTimeoutUs())
	}
	switch r := req.GetRequest().(type) {
	case *torchftpb.RankRequest_Quorum:
		quorum, err := o.service.Quorum(ctx, r.Quorum)
		resp.Response = &torchftpb.RankResponse_Quorum{Quorum: quorum}
		return err
	case *torchftpb.RankRequest_ShouldCommit:
		commit, err := o.service.ShouldCommit(ctx, r.ShouldCommit)
		resp.Response = &torchftpb.RankResponse_ShouldCommit{ShouldCommit: commit}
		return err
	case *torchftpb.RankRequest_Leave:
		resp.Response = &torchftpb.RankResponse_Left{Left: true}
		return o.service.server.leave(ctx)
	default:
		return status.Error(codes.Unimplemented, "this request of a session is not known here")
	}
}
