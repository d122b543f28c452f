package lighthouse

import (
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// memberService serves torchft.MemberService: a stream for each manager.
type memberService struct {
	torchftpb.UnimplementedMemberServiceServer
	server *Server
}

// aliveFraction is how often in a heartbeat timeout a member is never silent: one word may be late, or two.
const aliveFraction = 3

// streams are the open ones. The server's lock guards them.
type streams struct {
	open map[*stream]struct{}
	of   map[string]int // how many a member has: more than one while it replaces one that is half dead
}

func (s *streams) add(one *stream) {
	if s.open == nil {
		s.open, s.of = map[*stream]struct{}{}, map[string]int{}
	}
	s.open[one] = struct{}{}
	s.of[one.replicaID]++
}

// remove reports whether it was the last of its member.
func (s *streams) remove(one *stream) bool {
	delete(s.open, one)
	if s.of[one.replicaID]--; s.of[one.replicaID] > 0 {
		return false
	}
	delete(s.of, one.replicaID)
	return true
}

func (s *streams) close() {
	for one := range s.open {
		one.post(outgoing{closing: true})
	}
}

// stream is one member's, while it lasts. It costs one goroutine, and another one while it sends.
type stream struct {
	server    *Server
	wire      grpc.BidiStreamingServer[torchftpb.MemberMessage, torchftpb.LighthouseMessage]
	replicaID string
	said      quorum.Member   // what the member said last; only receive uses it
	held      quorum.Revision // of the list that the member has once it has all that was sent; only send uses it

	// The server's lock guards these.
	waiter   quorum.WaiterID // of the ask that waits; 0 if none does
	number   uint64          // of that ask
	deadline time.Time       // of that ask
	expiry   *time.Timer     // runs expire

	mu      sync.Mutex
	outbox  []outgoing
	sending bool
	senders sync.WaitGroup
}

// outgoing is one answer on its way.
type outgoing struct {
	number  uint64
	answer  answer // to an ask
	welcome bool
	closing bool
	failed  []rpc.Encoded // news of members, a message each
}

// Attend serves a member's stream until the member ends it, or its connection breaks. A lighthouse that shuts down asks
// the member to: so no stream needs a goroutine that waits for that.
func (m memberService) Attend(wire grpc.BidiStreamingServer[torchftpb.MemberMessage, torchftpb.LighthouseMessage]) error {
	first, err := wire.Recv()
	if err != nil {
		return err
	}
	greeting := first.GetGreeting()
	if greeting == nil {
		return status.Error(codes.InvalidArgument, "the first message of a member's stream is no greeting")
	}
	if err := checkReplicaID(greeting.GetReplicaId()); err != nil {
		return err
	}
	s := &stream{
		server:    m.server,
		wire:      wire,
		replicaID: greeting.GetReplicaId(),
		held:      quorum.Revision(greeting.GetRevision()),
	}
	if err := s.begin(); err != nil {
		return err
	}
	defer s.end()
	for {
		message, err := wire.Recv()
		if err != nil {
			return err
		}
		if err := s.receive(message); err != nil {
			return err
		}
	}
}

func (s *stream) begin() error {
	server := s.server
	server.mu.Lock()
	defer server.mu.Unlock()
	if server.closed {
		return errShutdown
	}
	server.streams.add(s)
	s.post(outgoing{welcome: true})
	return server.step(quorum.Beat{ReplicaID: s.replicaID})
}

// end returns when nothing of the stream is left: nobody may send on it once its handler has returned.
func (s *stream) end() {
	server := s.server
	server.mu.Lock()
	s.forget()
	if s.expiry != nil {
		s.expiry.Stop()
	}
	if server.streams.remove(s) && !server.closed {
		_ = server.step(quorum.Lost{ReplicaID: s.replicaID}) // an error is of the machine, and logged
	}
	server.mu.Unlock()
	s.senders.Wait()
}

func (s *stream) receive(message *torchftpb.MemberMessage) error {
	switch m := message.GetMessage().(type) {
	case *torchftpb.MemberMessage_Ask:
		return s.ask(m.Ask)
	case *torchftpb.MemberMessage_GiveUp:
		s.server.mu.Lock()
		defer s.server.mu.Unlock()
		if s.number == m.GiveUp {
			s.forget()
		}
		return nil
	case *torchftpb.MemberMessage_Alive:
		return s.server.feed(quorum.Beat{ReplicaID: s.replicaID})
	case *torchftpb.MemberMessage_Greeting:
		return status.Error(codes.InvalidArgument, "a member's stream has one greeting")
	default:
		return nil // of a later version
	}
}

func (s *stream) ask(ask *torchftpb.Ask) error {
	if m := ask.GetMember(); m != nil {
		if m.GetReplicaId() != s.replicaID {
			return status.Errorf(codes.InvalidArgument, "replica_id is %q: the stream is that of %q", m.GetReplicaId(), s.replicaID)
		}
		s.said = rpc.MemberFromProto(m)
	} else if s.said.ReplicaID == "" {
		return status.Error(codes.InvalidArgument, "the first ask of a stream does not say who asks")
	}
	if ask.GetTimeoutUs() <= 0 {
		return status.Errorf(codes.InvalidArgument, "timeout_us is %d: an ask needs a deadline, above 0", ask.GetTimeoutUs())
	}
	member := s.said
	member.SetState(quorum.State{
		Step: ask.GetStep(), CommittedQuorumID: ask.GetCommittedQuorumId(), CommitFailures: ask.GetCommitFailures(),
	})
	timeout := rpc.MaxWait
	if us := ask.GetTimeoutUs(); us < rpc.MaxWait.Microseconds() {
		timeout = time.Duration(us) * time.Microsecond
	}

	server := s.server
	server.mu.Lock()
	defer server.mu.Unlock()
	if server.closed {
		s.post(outgoing{number: ask.GetNumber(), answer: answer{err: errShutdown}})
		return nil
	}
	s.forget()
	s.await(ask.GetNumber(), timeout)
	return server.step(quorum.Asked{
		Waiter: s.waiter, Member: member, KnownQuorumID: ask.GetKnownQuorumId(), Number: ask.GetNumber(),
	})
}

// await makes the waiter of an ask. The caller holds the server's lock.
func (s *stream) await(number uint64, timeout time.Duration) {
	s.number = number
	s.waiter = s.server.waiters.AddFunc(func(a answer) {
		s.waiter = 0
		s.post(outgoing{number: number, answer: a})
	})
	// A member that stops listening at that moment would not hear why there is no quorum.
	s.deadline = rpc.Sooner(time.Now().Add(timeout), answerMargin)
	if s.expiry == nil {
		s.expiry = time.AfterFunc(time.Until(s.deadline), s.expire)
	} else {
		s.expiry.Reset(time.Until(s.deadline))
	}
}

// expire answers an ask whose time is up. The timer may be that of an ask that was answered long ago.
func (s *stream) expire() {
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	if s.waiter == 0 || time.Now().Before(s.deadline) || s.server.closed {
		return
	}
	reason := s.server.reason(time.Now()) // while it still counts as one that waits
	s.forget()
	s.post(outgoing{number: s.number, answer: answer{err: status.Errorf(codes.DeadlineExceeded, "no quorum in time: %s", reason)}})
}

// forget takes back the ask that waits, if one does. The caller holds the server's lock.
func (s *stream) forget() {
	if s.waiter == 0 {
		return
	}
	waiter := s.waiter
	s.waiter = 0
	s.server.waiters.Drop(waiter)
	if !s.server.closed {
		_ = s.server.step(quorum.GaveUp{Waiter: waiter}) // an error is of the machine, and logged
	}
}

// post leaves something to be sent. It never waits.
func (s *stream) post(o outgoing) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.outbox = append(s.outbox, o)
	if !s.sending {
		s.sending = true
		rpc.Go(&s.senders, s.server.log, "answers of a stream", s.flush)
	}
}

// flush sends what there is, and errors in place of what cannot be sent. If that fails too the stream has broken: Attend
// hears of it.
func (s *stream) flush() {
	for {
		s.mu.Lock()
		batch := s.outbox
		s.outbox = nil
		s.sending = len(batch) > 0
		s.mu.Unlock()
		if len(batch) == 0 {
			return
		}
		for _, o := range batch {
			if err := s.send(o); err != nil && s.fail(o.number, err) != nil {
				return // sending stays true: nothing more goes out
			}
		}
	}
}

func (s *stream) send(o outgoing) (err error) {
	defer rpc.Recovered(s.server.log, "an answer on a stream", &err)
	switch {
	case o.welcome:
		interval := s.server.cfg.HeartbeatTimeout / aliveFraction
		return s.wire.Send(&torchftpb.LighthouseMessage{Message: &torchftpb.LighthouseMessage_Welcome{
			Welcome: &torchftpb.Welcome{AliveIntervalUs: max(1, interval.Microseconds())},
		}})
	case o.closing:
		return s.wire.Send(&torchftpb.LighthouseMessage{Message: &torchftpb.LighthouseMessage_Closing{Closing: true}})
	case o.failed != nil:
		return s.sendAll(o.failed)
	case o.answer.err != nil:
		return o.answer.err
	}
	d := o.answer.delivered
	states, err := d.states()
	if err != nil {
		return err
	}
	parts, err := d.lacks(s.held)
	if err != nil {
		return err
	}
	if err := s.sendAll(parts); err != nil {
		return err
	}
	s.held = d.quorum.Revision
	return s.wire.SendMsg(rpc.Numbered{Number: o.number, Message: states})
}

func (s *stream) sendAll(messages []rpc.Encoded) error {
	for _, message := range messages {
		if err := s.wire.SendMsg(message); err != nil {
			return err
		}
	}
	return nil
}

func (s *stream) fail(number uint64, err error) error {
	f := status.Convert(err)
	return s.wire.Send(&torchftpb.LighthouseMessage{Number: number, Message: &torchftpb.LighthouseMessage_Failure{
		Failure: &torchftpb.CallFailure{Code: uint32(f.Code()), Message: f.Message()},
	}})
}
