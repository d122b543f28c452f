package manager

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// member is a replica group at its lighthouse, over one stream that carries only what changed. A lighthouse that knows no
// such streams gets a call for each quorum and each heartbeat.
type member struct {
	calls     *LighthouseClient
	stub      torchftpb.MemberServiceClient
	replicaID string
	ctx       context.Context // ends with Close
	cancel    context.CancelFunc
	unary     atomic.Bool // the lighthouse knows no streams
	heard     failures
	failed    <-chan Failure

	mu     sync.Mutex
	stream *memberStream // nil before the first

	// Only the stream that is open uses it: a new one begins after the last has ended.
	list heldList
}

var (
	_ Membership    = (*member)(nil)
	_ FailureSource = (*member)(nil)
)

func newMember(calls *LighthouseClient, replicaID string) *member {
	m := &member{calls: calls, stub: torchftpb.NewMemberServiceClient(calls.conn), replicaID: replicaID}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.failed, _ = m.heard.listen()
	return m
}

func (m *member) Quorum(ctx context.Context, who quorum.Member, knownQuorumID int64) (*quorum.Quorum, error) {
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	if !m.unary.Load() {
		q, err := m.ask(ctx, who, knownQuorumID)
		if !m.knowsNoStreams(err) {
			return q, rpc.Wrap("quorum", m.calls.peer, err)
		}
	}
	q, err := m.calls.Quorum(ctx, who, knownQuorumID)
	m.mayBeAnother(err)
	return q, err
}

func (m *member) ask(ctx context.Context, who quorum.Member, knownQuorumID int64) (*quorum.Quorum, error) {
	stream, err := m.connect()
	if err != nil {
		return nil, err
	}
	return stream.ask(ctx, m.calls.number.Add(1), who, knownQuorumID)
}

// Attend keeps a stream open, and is never silent on it for longer than the lighthouse asks for.
func (m *member) Attend(ctx context.Context, interval time.Duration, reached func()) error {
	if !m.unary.Load() {
		stream, err := m.connect()
		if err == nil {
			err = stream.attend(ctx, reached)
		}
		if !m.knowsNoStreams(err) {
			return rpc.Wrap("heartbeat", m.calls.peer, err)
		}
	}
	err := m.beat(ctx, interval, reached)
	m.mayBeAnother(err)
	return err
}

// beat makes a call at every interval.
func (m *member) beat(ctx context.Context, interval time.Duration, reached func()) error {
	// Long enough for a busy lighthouse; the next heartbeat waits for this one.
	timeout := max(10*interval, time.Second)
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		one, cancel := context.WithTimeout(ctx, timeout)
		err := m.calls.Heartbeat(one, m.replicaID)
		cancel()
		if err != nil {
			return err
		}
		reached()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}

func (m *member) knowsNoStreams(err error) bool {
	if status.Code(err) != codes.Unimplemented {
		return false
	}
	m.unary.Store(true)
	return true
}

// mayBeAnother looks at the error of a call: what comes back after an outage may be a lighthouse that knows streams.
func (m *member) mayBeAnother(err error) {
	if rpc.IsUnavailable(err) {
		m.unary.Store(false)
	}
}

// Failures has a value for each failure that the lighthouse tells of.
func (m *member) Failures() <-chan Failure { return m.failed }

func (m *member) Close() error {
	m.cancel()
	err := m.calls.Close()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stream != nil {
		<-m.stream.ended
	}
	return err
}

// connect returns the stream, a new one if the last one broke.
func (m *member) connect() (*memberStream, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stream != nil && !m.stream.broken() {
		return m.stream, nil
	}
	ctx, cancel := context.WithCancel(m.ctx)
	wire, err := m.stub.Attend(ctx)
	if err != nil {
		cancel()
		return nil, err
	}
	stream := &memberStream{
		wire:     wire,
		list:     &m.list,
		failed:   m.heard.tell,
		waiting:  map[uint64]chan asked{},
		welcomed: make(chan struct{}),
		ended:    make(chan struct{}),
	}
	stream.send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Greeting{
		Greeting: &torchftpb.Greeting{ReplicaId: m.replicaID, Revision: uint64(m.list.revision)},
	}})
	go stream.receive(cancel)
	m.stream = stream
	return stream, nil
}

// heldList is the list of members that the lighthouse sent last, and what changes of it have arrived so far.
type heldList struct {
	members  []quorum.Member
	revision quorum.Revision
	pending  quorum.Change
}

func (l *heldList) add(part *torchftpb.ListChange) error { return rpc.AddPart(&l.pending, part) }

// quorum brings the list up to date and rebuilds a quorum from it. After an error nothing is held any more.
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
	q, err := rpc.QuorumFromStates(states, members)
	if err != nil {
		return nil, err
	}
	l.members, l.revision = q.Members, revision
	return q, nil
}

// asked ends the wait of one ask.
type asked struct {
	quorum *quorum.Quorum
	err    error
}

// memberStream is a stream while its connection lasts.
type memberStream struct {
	wire torchftpb.MemberService_AttendClient
	list *heldList // only receive uses it

	failed func(Failure)

	welcomed chan struct{} // closed by the lighthouse's first answer
	interval time.Duration // in which something must be said, valid once welcomed
	ended    chan struct{} // closed when the stream has broken
	err      error         // why, valid once ended is closed

	sending sync.Mutex
	said    *quorum.Member // what the lighthouse knows of this group
	spoke   time.Time      // when something was sent last

	mu      sync.Mutex
	waiting map[uint64]chan asked // by the number of the ask
}

func (s *memberStream) broken() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// receive takes what the lighthouse says until the stream breaks.
func (s *memberStream) receive(cancel context.CancelFunc) {
	defer cancel()
	for {
		message, err := s.wire.Recv()
		if err == nil {
			err = s.take(message)
		}
		if errors.Is(err, io.EOF) {
			err = status.Error(codes.Unavailable, "the lighthouse ended the stream")
		}
		if err != nil {
			s.err = err
			close(s.ended)
			return
		}
	}
}

func (s *memberStream) take(message *torchftpb.LighthouseMessage) error {
	switch m := message.GetMessage().(type) {
	case *torchftpb.LighthouseMessage_Welcome:
		if s.interval != 0 {
			return nil
		}
		s.interval = max(time.Millisecond, time.Duration(m.Welcome.GetAliveIntervalUs())*time.Microsecond)
		close(s.welcomed)
	case *torchftpb.LighthouseMessage_ListChange:
		if err := s.list.add(m.ListChange); err != nil {
			*s.list = heldList{}
			return status.Error(codes.Unavailable, err.Error())
		}
	case *torchftpb.LighthouseMessage_Quorum:
		q, err := s.list.quorum(m.Quorum)
		if err != nil {
			// On the next stream the lighthouse is told that nothing is held.
			return status.Error(codes.Unavailable, err.Error())
		}
		s.answer(message.GetNumber(), asked{quorum: q})
	case *torchftpb.LighthouseMessage_Failure:
		s.answer(message.GetNumber(), asked{err: status.Error(codes.Code(m.Failure.GetCode()), m.Failure.GetMessage())})
	case *torchftpb.LighthouseMessage_MemberFailed:
		f := m.MemberFailed
		s.failed(Failure{QuorumID: f.GetQuorumId(), ReplicaID: f.GetReplicaId(), Reason: f.GetReason()})
	case *torchftpb.LighthouseMessage_Closing:
		return status.Error(codes.Unavailable, "the lighthouse is shutting down")
	}
	return nil
}

func (s *memberStream) answer(number uint64, a asked) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if waiter := s.waiting[number]; waiter != nil { // else it gave up in the meantime
		delete(s.waiting, number)
		waiter <- a
	}
}

func (s *memberStream) ask(ctx context.Context, number uint64, who quorum.Member, knownQuorumID int64) (*quorum.Quorum, error) {
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
	s.sendAsk(&torchftpb.Ask{
		Number:            number,
		TimeoutUs:         max(1, time.Until(deadline).Microseconds()),
		KnownQuorumId:     knownQuorumID,
		Step:              who.Step,
		CommittedQuorumId: who.CommittedQuorumID,
		CommitFailures:    who.CommitFailures,
	}, who)
	select {
	case a := <-answered:
		return a.quorum, a.err
	case <-s.ended:
	case <-ctx.Done():
		s.send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_GiveUp{GiveUp: number}})
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	select {
	case a := <-answered: // it came before the end
		return a.quorum, a.err
	default:
		return nil, s.err
	}
}

// sendAsk says who asks only if that is news.
func (s *memberStream) sendAsk(ask *torchftpb.Ask, who quorum.Member) {
	s.sending.Lock()
	defer s.sending.Unlock()
	if s.said == nil || !s.said.SameButState(&who) {
		s.said = &who
		ask.Member = rpc.MemberToProto(who)
	}
	s.sendLocked(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Ask{Ask: ask}})
}

func (s *memberStream) send(message *torchftpb.MemberMessage) {
	s.sending.Lock()
	defer s.sending.Unlock()
	s.sendLocked(message)
}

// sendLocked leaves errors to receive, which gets the reason.
func (s *memberStream) sendLocked(message *torchftpb.MemberMessage) {
	s.spoke = time.Now()
	_ = s.wire.Send(message)
}

// attend is never silent for longer than the lighthouse wants, until the stream breaks or ctx ends.
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

// speak says that the group is alive unless something was said a moment ago, and returns when to come back.
func (s *memberStream) speak() time.Duration {
	s.sending.Lock()
	defer s.sending.Unlock()
	if silent := time.Since(s.spoke); silent < s.interval {
		return s.interval - silent
	}
	s.sendLocked(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Alive{Alive: true}})
	return s.interval
}
