package lighthouses

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

var (
	errMoved  = status.Error(codes.Unavailable, "the member has moved to another lighthouse")
	errMute   = status.Error(codes.Unavailable, "the lighthouse does not answer")
	errSilent = status.Errorf(codes.Unavailable, "the lighthouse has not answered %d heartbeats in a row", mostUnanswered)
)

// asked is the outcome of a request.
type asked struct {
	quorum *quorum.Quorum
	err    error
}

// memberStream is a stream with a lighthouse, until its connection breaks.
type memberStream struct {
	wire torchftpb.MemberService_AttendClient
	last wire.Delivered // only receive uses it

	member *Member
	client *Client // of the lighthouse
	cancel context.CancelFunc
	left   atomic.Pointer[error] // why the member itself ends the stream; set before that

	welcomed chan struct{} // closed by the lighthouse's first answer
	interval time.Duration // the longest time between two messages of the member, valid once welcomed
	answers  bool          // the lighthouse answers heartbeats, and is left if it does not; valid once welcomed
	heard    atomic.Int64  // number of messages from the lighthouse
	ended    chan struct{} // closed when the stream has broken
	free     chan struct{} // closed when the group has left and its peers no longer need its data
	released sync.Once     // closes free
	err      error         // why the stream has broken; valid once ended is closed
	replaced bool          // the reason was looked at, in the first attempt to open another stream; Member.opening guards it

	sender   rpc.Sender
	posting  sync.Mutex     // guards lastSent: the order of its values is that of the messages
	lastSent *quorum.Member // the last record of this group that was sent; nil: none on this stream

	mu      sync.Mutex
	waiting map[uint64]chan asked // by the number of the request
}

// begun waits for the welcome.
func (s *memberStream) begun(ctx context.Context) error {
	select {
	case <-s.welcomed:
		return nil
	case <-s.ended:
	case <-ctx.Done():
		s.leave(errMute)
	}
	if s.greeted() {
		return nil // the stream has broken since: the caller finds that
	}
	return s.err
}

// leave ends the stream, and returns when receive has returned. The stream's error is why, unless it had broken before.
func (s *memberStream) leave(why error) {
	s.left.CompareAndSwap(nil, &why)
	s.cancel()
	<-s.ended
}

func (s *memberStream) broken() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// greeted reports whether the lighthouse has answered.
func (s *memberStream) greeted() bool {
	select {
	case <-s.welcomed:
		return true
	default:
		return false
	}
}

// receive handles the lighthouse's messages until the stream breaks.
func (s *memberStream) receive() {
	defer s.cancel()
	for {
		err := s.takeNext()
		if errors.Is(err, io.EOF) {
			err = status.Error(codes.Unavailable, "the lighthouse ended the stream")
		}
		if err != nil {
			if left := s.left.Load(); left != nil {
				err = *left
			}
			s.err = err
			close(s.ended)
			return
		}
	}
}

func (s *memberStream) takeNext() (err error) {
	defer rpc.Recovered(slog.Default(), "an answer of the lighthouse", &err) // an uncaught panic would end the training
	message, err := s.wire.Recv()
	if err != nil {
		return err
	}
	s.heard.Add(1)
	switch m := message.GetMessage().(type) {
	case *torchftpb.LighthouseMessage_Welcome:
		if s.interval != 0 {
			return nil
		}
		if err := s.member.learnTerm(m.Welcome.GetTerm()); err != nil {
			return err
		}
		s.answers = m.Welcome.GetAnswersAlive()
		s.member.clustered.Store(s.answers)
		s.interval = max(time.Millisecond, rpc.Microseconds(m.Welcome.GetAliveIntervalUs()))
		close(s.welcomed)
	case *torchftpb.LighthouseMessage_Recall:
		if q := s.member.last.Load(); q != nil && q.ID >= m.Recall {
			past, err := wire.PastToProto(q)
			if err != nil {
				return status.Errorf(codes.Internal, "encode quorum %d: %s", q.ID, err)
			}
			s.post(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Past{Past: past}})
		}
	case *torchftpb.LighthouseMessage_Delivery:
		if err := s.last.Next(m.Delivery); err != nil {
			return status.Error(codes.Unavailable, err.Error()) // the next stream begins with the whole quorum
		}
		q := s.last.Quorum
		if known := s.member.known(); q.ID < known {
			return status.Errorf(codes.Unavailable, "the lighthouse has sent quorum %d, and this member was in quorum %d, which is later", q.ID, known)
		}
		s.member.last.Store(q)
		s.answer(message.GetNumber(), asked{quorum: q})
	case *torchftpb.LighthouseMessage_Failure:
		s.answer(message.GetNumber(), asked{err: status.Error(codes.Code(m.Failure.GetCode()), m.Failure.GetMessage())})
	case *torchftpb.LighthouseMessage_MemberFailed:
		f := m.MemberFailed
		s.member.broadcast.Notify(membership.Notice{
			Kind: membership.MemberFailed, QuorumID: f.GetQuorumId(), ReplicaID: f.GetReplicaId(), Reason: f.GetReason(),
			Step: f.GetStep(),
		})
	case *torchftpb.LighthouseMessage_MemberStalled:
		f := m.MemberStalled
		s.member.broadcast.Notify(membership.Notice{Kind: membership.Stalled, QuorumID: f.GetQuorumId(), ReplicaID: f.GetReplicaId(), Reason: f.GetReason()})
	case *torchftpb.LighthouseMessage_Regressed:
		s.member.broadcast.Notify(membership.Notice{Kind: membership.Regressed, QuorumID: m.Regressed.GetQuorumId(), Reason: m.Regressed.GetReason()})
	case *torchftpb.LighthouseMessage_ProgressAsked:
		s.member.broadcast.Notify(membership.Notice{Kind: membership.ProgressAsked})
	case *torchftpb.LighthouseMessage_Drain:
		s.member.broadcast.Notify(membership.Notice{Kind: membership.Drained, Reason: m.Drain})
	case *torchftpb.LighthouseMessage_Call:
		s.member.broadcast.Notify(membership.Notice{Kind: membership.Called, QuorumID: m.Call})
	case *torchftpb.LighthouseMessage_Round:
		s.member.broadcast.Notify(membership.Notice{Kind: membership.RoundKnown, QuorumID: m.Round.GetQuorumId(), Step: m.Round.GetStep()})
	case *torchftpb.LighthouseMessage_Released:
		s.released.Do(func() { close(s.free) })
	case *torchftpb.LighthouseMessage_Probe:
		s.post(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Alive{Alive: true}})
	case *torchftpb.LighthouseMessage_Closing:
		return status.Error(codes.Unavailable, "the lighthouse is shutting down")
	}
	return nil
}

func (s *memberStream) answer(number uint64, a asked) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if waiter := s.waiting[number]; waiter != nil { // otherwise the deadline of the request has passed
		delete(s.waiting, number)
		waiter <- a
	}
}

func (s *memberStream) ask(ctx context.Context, number uint64, member quorum.Member, knownQuorumID int64) (*quorum.Quorum, error) {
	answered := make(chan asked, 1)
	s.mu.Lock()
	s.waiting[number] = answered
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.waiting, number)
	}()

	deadline, _ := ctx.Deadline()
	ask := wire.AskToProto(member.State())
	ask.Number, ask.KnownQuorumId, ask.Traceparent = number, knownQuorumID, tracing.ParentOf(ctx)
	ask.TimeoutUs = max(1, time.Until(deadline).Microseconds())
	err := s.postAsk(ask, member)
	if err != nil {
		return nil, err
	}
	select {
	case a := <-answered:
		return a.quorum, a.err
	case <-s.ended:
		err = s.err
	case <-ctx.Done():
		s.post(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Withdraw{Withdraw: number}})
		err = status.FromContextError(ctx.Err()).Err()
	}
	select {
	case a := <-answered: // the answer arrived together with the deadline or the end of the stream: use it
		return a.quorum, a.err
	default:
		return nil, err
	}
}

// postAsk posts a request. It contains the member only if more than the member's state has changed.
func (s *memberStream) postAsk(ask *torchftpb.Ask, member quorum.Member) error {
	s.posting.Lock()
	defer s.posting.Unlock()
	message := &torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Ask{Ask: ask}}
	whole := s.lastSent == nil || !s.lastSent.SameButState(&member)
	if whole {
		ask.Member = wire.MemberToProto(member)
		if err := wire.CheckRequest(message, ask.GetMember()); err != nil {
			return err
		}
	}
	if !s.post(message) {
		return errUnread
	}
	if whole {
		s.lastSent = &member
	}
	return nil
}

var errUnread = status.Error(codes.Unavailable, "the lighthouse does not read the messages of this member")

// post queues a message, and does not block. It returns false if the lighthouse has not read the earlier ones.
func (s *memberStream) post(message *torchftpb.MemberMessage) bool {
	return s.sender.Post(func() {
		if s.broken() {
			return
		}
		_ = s.wire.Send(message) // fails only if the stream has broken: receive returns the error
	})
}

// attend calls reached after the welcome, and then sends a heartbeat in each interval until the stream breaks or ctx ends.
func (s *memberStream) attend(ctx context.Context, reached func()) error {
	select {
	case <-s.welcomed:
		reached()
	case <-s.ended:
		return s.err
	case <-ctx.Done():
		return ctx.Err()
	}
	ticker := time.NewTicker(s.interval)
	defer ticker.Stop()
	var hearing hearing
	for {
		select {
		case <-ticker.C:
			if s.answers && hearing.tick(s.heard.Load()) {
				s.leave(errSilent)
				return s.err
			}
			s.post(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Alive{Alive: true}, Step: s.member.step.Load()})
		case <-s.ended:
			return s.err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
