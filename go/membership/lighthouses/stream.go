package lighthouses

import (
	"context"
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
	errSilent = status.Errorf(codes.Unavailable, "the lighthouse has not answered %d heartbeats in a row",
		mostUnanswered)
)

// memberStream is a stream with a lighthouse, until its connection breaks.
type memberStream struct {
	*rpc.Stream[torchftpb.MemberMessage, torchftpb.LighthouseMessage, *quorum.Quorum]
	last wire.Delivered // only take uses it

	member *Member
	client *Client // of the lighthouse

	welcomed chan struct{} // closed by the lighthouse's first answer
	interval time.Duration // the longest time between two messages of the member, valid once welcomed
	// the lighthouse answers heartbeats, and is left if it does not; valid once welcomed
	answers  bool
	heard    atomic.Int64  // number of messages from the lighthouse
	free     chan struct{} // closed when the group has left and its peers no longer need its data
	released sync.Once     // closes free
	// the reason was looked at, in the first attempt to open another stream; Member.opening guards it
	replaced bool

	// the last record of this group that was sent; nil: none on this stream. Only the sender uses it
	lastSent *quorum.Member
}

func newMemberStream(
	m *Member, of *Client, attend torchftpb.MemberService_AttendClient, cancel context.CancelFunc,
) *memberStream {
	return &memberStream{
		Stream: rpc.NewStream[torchftpb.MemberMessage, torchftpb.LighthouseMessage, *quorum.Quorum](attend,
			cancel),
		member: m, client: of, welcomed: make(chan struct{}), free: make(chan struct{}),
	}
}

// begun waits for the welcome.
func (s *memberStream) begun(ctx context.Context) error {
	select {
	case <-s.welcomed:
		return nil
	case <-s.Ended:
	case <-ctx.Done():
		s.End(errMute)
	}
	if s.greeted() {
		return nil // the stream has broken since: the caller finds that
	}
	return s.Err()
}

// greeted reports whether the lighthouse has answered.
func (s *memberStream) greeted() bool { return rpc.IsClosed(s.welcomed) }

// take handles a message of the lighthouse.
func (s *memberStream) take(message *torchftpb.LighthouseMessage) error {
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
			past, err := wire.PackPast(q)
			if err != nil {
				return status.Errorf(codes.Internal, "encode quorum %d: %s", q.ID, err)
			}
			s.Post(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Past{Past: past}})
		}
	case *torchftpb.LighthouseMessage_Delivery:
		if err := s.last.Next(m.Delivery); err != nil {
			// the next stream begins with the whole quorum
			return status.Error(codes.Unavailable, err.Error())
		}
		q := s.last.Quorum
		if known := s.member.known(); q.ID < known {
			return status.Errorf(codes.Unavailable,
				"the lighthouse has sent quorum %d, and this member was in quorum %d, which is later", q.ID,
				known)
		}
		s.member.last.Store(q)
		s.Answer(message.GetNumber(), q, nil)
	case *torchftpb.LighthouseMessage_Failure:
		s.Answer(message.GetNumber(), nil, wire.FailureFromProto(m.Failure))
	case *torchftpb.LighthouseMessage_Notice:
		s.member.broadcast.Notify(m.Notice)
	case *torchftpb.LighthouseMessage_Released:
		s.released.Do(func() { close(s.free) })
	case *torchftpb.LighthouseMessage_Probe:
		s.Post(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Alive{Alive: true}})
	case *torchftpb.LighthouseMessage_Closing:
		return status.Error(codes.Unavailable, "the lighthouse is shutting down")
	}
	return nil
}

func (s *memberStream) ask(
	ctx context.Context, number uint64, member quorum.Member, knownQuorumID int64,
) (*quorum.Quorum, error) {
	deadline, _ := ctx.Deadline()
	ask := wire.AskToProto(member.State())
	ask.Number, ask.KnownQuorumId, ask.Traceparent = number, knownQuorumID, tracing.ParentOf(ctx)
	ask.TimeoutUs = max(1, time.Until(deadline).Microseconds())
	ask.Member = wire.MemberToProto(member)
	message := &torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Ask{Ask: ask}}
	if err := wire.CheckRequest(message, ask.GetMember()); err != nil {
		return nil, err
	}
	request := func() *torchftpb.MemberMessage {
		if s.lastSent != nil && s.lastSent.SameButState(&member) {
			ask.Member = nil // only its state has changed
		}
		s.lastSent = &member
		return message
	}
	return s.Call(ctx, number, request, &torchftpb.MemberMessage{
		Message: &torchftpb.MemberMessage_Withdraw{Withdraw: number},
	})
}

// attend calls reached after the welcome, and then sends a heartbeat in each interval until the stream breaks
// or ctx ends.
func (s *memberStream) attend(ctx context.Context, reached func(), doing membership.Doing) error {
	select {
	case <-s.welcomed:
		reached()
	case <-s.Ended:
		return s.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
	ticks := time.Tick(s.interval)
	var hearing hearing
	for {
		select {
		case <-ticks:
			if s.answers && hearing.tick(s.heard.Load()) {
				s.End(errSilent)
				return s.Err()
			}
			s.Post(s.alive(doing()))
		case <-s.Ended:
			return s.Err()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// alive returns a heartbeat.
func (s *memberStream) alive(doing quorum.Doing) *torchftpb.MemberMessage {
	return &torchftpb.MemberMessage{
		Message: &torchftpb.MemberMessage_Alive{Alive: true}, Step: s.member.step.Load(),
		Phase: torchftpb.Phase(doing.Phase), PhaseUs: doing.For.Microseconds(),
		Pace: wire.PaceToProto(doing.Pace),
	}
}

// mostUnanswered is how many heartbeats in a row one of several lighthouses may leave unanswered.
const mostUnanswered = 3

// hearing counts the intervals in which a lighthouse has sent nothing. It counts intervals, and does not look
// at a clock: after a pause of this process or of its host, one interval has passed, and messages that
// arrived meanwhile are read in the next one.
type hearing struct {
	heard int64 // number of messages at the last tick
	mute  int   // intervals since the last message
}

// tick ends an interval; heard: number of messages so far. It reports whether the lighthouse is silent.
func (h *hearing) tick(heard int64) (silent bool) {
	if h.mute++; heard != h.heard {
		h.heard, h.mute = heard, 0
	}
	return h.mute >= mostUnanswered
}
