package lighthouses

import (
	"context"
	"errors"
	"fmt"
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

// heldList has the list of members that the lighthouse sent last, and the changes to it that have arrived since.
type heldList struct {
	members  []quorum.Member
	revision quorum.Revision
	pending  quorum.Change
}

func (l *heldList) add(part *torchftpb.ListChange) error { return wire.AddPart(&l.pending, part) }

// quorum applies the changes to the list, and rebuilds a quorum from it. After an error the list is empty.
func (l *heldList) quorum(states *torchftpb.QuorumStates) (*quorum.Quorum, error) {
	members, err := l.pending.Apply(l.members)
	revision := l.revision
	if err == nil && !l.pending.Empty() {
		revision = quorum.RevisionOf(members)
	}
	*l = heldList{}
	if err != nil {
		return nil, err
	}
	if want := quorum.Revision(states.GetRevision()); revision != want {
		return nil, fmt.Errorf("the list of members has revision %x, the lighthouse's has %x", revision, want)
	}
	q, err := wire.QuorumFromStates(states, members)
	if err != nil {
		return nil, err
	}
	l.members, l.revision = q.Members, revision
	return q, nil
}

var errMoved = status.Error(codes.Unavailable, "the member moves to another lighthouse of its list")

// asked is the outcome of a request.
type asked struct {
	quorum *quorum.Quorum
	err    error
}

// memberStream is a stream with a lighthouse, until its connection breaks.
type memberStream struct {
	wire torchftpb.MemberService_AttendClient
	list *heldList // only receive uses it

	member *Member
	cancel context.CancelFunc
	// moved is set before the member itself ends the stream, in order to ask another lighthouse.
	moved atomic.Bool

	welcomed chan struct{} // closed by the lighthouse's first answer
	interval time.Duration // the longest time between two messages of the member, valid once welcomed
	bond     time.Duration // how long a stamp binds the member; only receive uses this field and the next
	unbound  bool          // the lighthouse has ended the bond: its later stamps are ignored
	place    int           // of the lighthouse in the list
	first    int64         // id of the first quorum that was sent on the stream, 0: none; only receive uses it
	stamp    atomic.Uint64 // the newest stamp that binds the member; each message carries it
	ended    chan struct{} // closed when the stream has broken
	free     chan struct{} // closed when the group has left and its peers no longer need its data
	released sync.Once     // closes free
	err      error         // why the stream has broken; valid once ended is closed

	failbackTo int // place of the lighthouse that all members fail back to, valid once ended is closed; -1: none

	sender   rpc.Sender
	posting  sync.Mutex     // guards the following two: the order of their values is that of the messages
	lastSent *quorum.Member // the last record of this group that was sent; nil: none on this stream
	reaches  quorum.Places  // the reachable earlier lighthouses, as last sent

	mu      sync.Mutex
	waiting map[uint64]chan asked // by the number of the request
}

// begun waits for the welcome. From then on the member may be bound to the lighthouse, since stamps follow. So begun returns nil even if
// the stream has broken after the welcome: on an error the caller would ask the next lighthouse, which a bound member must not do.
// Before the welcome the member is not bound, because receive handles the messages in order.
func (s *memberStream) begun(ctx context.Context) error {
	err := status.Error(codes.Unavailable, "the lighthouse does not answer")
	select {
	case <-s.welcomed:
		return nil
	case <-s.ended:
		err = s.err
	case <-ctx.Done():
		if !s.greeted() {
			s.leave() // no welcome can arrive after this
		}
	}
	if s.greeted() {
		return nil
	}
	return err
}

// leave ends the stream, and returns when receive has returned.
func (s *memberStream) leave() {
	s.moved.Store(true)
	s.cancel()
	<-s.ended
}

// sentBack returns the place of the lighthouse to fail back to. sent is false if the stream ended for another reason. The stream must
// have ended.
func (s *memberStream) sentBack() (place int, sent bool) { return s.failbackTo, s.failbackTo >= 0 }

// sendReaches tells the lighthouse which earlier lighthouses the member can reach, if that has changed.
func (s *memberStream) sendReaches(places quorum.Places) {
	s.posting.Lock()
	defer s.posting.Unlock()
	if s.reaches != places && s.post(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Reaches{Reaches: uint64(places)}}) {
		s.reaches = places
	}
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
			if s.moved.Load() {
				err = errMoved
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
	s.stamped(message.GetStamp())
	switch m := message.GetMessage().(type) {
	case *torchftpb.LighthouseMessage_Welcome:
		if s.interval != 0 {
			return nil
		}
		alive := max(time.Millisecond, time.Duration(m.Welcome.GetAliveIntervalUs())*time.Microsecond)
		s.member.expectMessages(alive)
		s.interval, s.bond = alive, time.Duration(m.Welcome.GetBondUs())*time.Microsecond
		if s.bond > 0 {
			s.interval = max(time.Millisecond, min(alive, s.bond/quorum.StampsInBond))
		}
		s.member.learnTerm(m.Welcome.GetTerm())
		close(s.welcomed)
	case *torchftpb.LighthouseMessage_Recall:
		if q := s.member.last.Load(); q != nil && q.ID >= m.Recall {
			s.post(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Past{Past: wire.PastToProto(q.Past())}})
		}
	case *torchftpb.LighthouseMessage_FailBack:
		if place := int(m.FailBack); place < len(s.member.unary) {
			s.failbackTo = place
			s.unbind()
			s.moved.Store(true)
			return errMoved
		}
	case *torchftpb.LighthouseMessage_ListChange:
		if err := s.list.add(m.ListChange); err != nil {
			*s.list = heldList{}
			return status.Error(codes.Unavailable, err.Error())
		}
	case *torchftpb.LighthouseMessage_Quorum:
		q, err := s.list.quorum(m.Quorum)
		if err != nil {
			// The greeting of the next stream has no revision, and the lighthouse sends the whole list.
			return status.Error(codes.Unavailable, err.Error())
		}
		s.member.last.Store(q)
		if s.first == 0 {
			s.first = q.ID
		}
		s.answer(message.GetNumber(), asked{quorum: q})
	case *torchftpb.LighthouseMessage_Failure:
		code := codes.Code(m.Failure.GetCode())
		if code == codes.OutOfRange && s.waits(message.GetNumber()) {
			s.unbind() // before the caller gets the error, and asks another lighthouse
		}
		s.answer(message.GetNumber(), asked{err: status.Error(code, m.Failure.GetMessage())})
	case *torchftpb.LighthouseMessage_MemberFailed:
		f := m.MemberFailed
		s.member.broadcast.Notify(membership.Notice{
			Kind: membership.MemberFailed, QuorumID: f.GetQuorumId(), ReplicaID: f.GetReplicaId(), Reason: f.GetReason(),
			Elsewhere: len(s.member.unary) > 1 && (s.first == 0 || f.GetQuorumId() < s.first),
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
	case *torchftpb.LighthouseMessage_Released:
		s.released.Do(func() { close(s.free) })
	case *torchftpb.LighthouseMessage_Probe:
		s.post(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Alive{Alive: true}})
	case *torchftpb.LighthouseMessage_Closing:
		s.unbind()
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
	ask.Reaches = uint64(s.reaches)
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
		s.member.speaks()
		message.Stamp = s.stamp.Load()
		_ = s.wire.Send(message) // fails only if the stream has broken: receive returns the error
	})
}

// attend calls reached after the welcome, and then sends at least one message in each interval until the stream breaks or ctx ends.
func (s *memberStream) attend(ctx context.Context, reached func()) error {
	select {
	case <-s.welcomed:
		reached()
	case <-s.ended:
		return s.err
	case <-ctx.Done():
		return ctx.Err()
	}
	timer := time.NewTimer(s.interval)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
			timer.Reset(s.speak())
		case <-s.ended:
			return s.err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// speak sends a heartbeat unless something else was sent within the interval, and returns when to call it again.
func (s *memberStream) speak() time.Duration {
	if silent := s.member.silent(); silent < s.interval {
		return s.interval - silent
	}
	s.post(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Alive{Alive: true}})
	return s.interval
}
