package lighthouse

import (
	"errors"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// memberService serves torchft.MemberService: one stream for each manager server.
type memberService struct {
	torchftpb.UnimplementedMemberServiceServer
	server *Server
}

// aliveFraction is how many messages a member sends at least in a heartbeat timeout: two of them may be late.
const aliveFraction = 3

const (
	// answeredEvery is the longest interval between the heartbeats of a member, if this lighthouse is one of
	// a cluster. Each is answered: so the member finds within about a second that this lighthouse has
	// stopped, and asks the others.
	answeredEvery = time.Second / 3
	// longestText is the length in bytes to which texts of members are shortened, as a failure's reason.
	longestText = 1 << 10
	// longestTraceback is the same for the traceback of an exception.
	longestTraceback = 16 << 10
)

var errStale = status.Error(codes.Unavailable,
	"the lighthouse has begun anew after an internal error: open a new stream")

type memberWire = grpc.BidiStreamingServer[torchftpb.MemberMessage, torchftpb.LighthouseMessage]

// stream is the stream of one member. It needs one goroutine, and a second one while it sends.
type stream struct {
	job        *job
	wire       memberWire
	replicaID  string
	recallable bool          // it can answer a Recall
	run        string        // of its launcher
	latest     quorum.Member // the last record that the member sent; only receive uses it
	received   atomic.Int64  // number of messages from the member
	ended      atomic.Bool
	list       uint64 // the number of the list of its last delivery, 0 before the first; only send uses it

	// The job's lock guards these.
	waiter   quorum.WaiterID // of the pending request; 0 if there is none
	number   uint64          // of that request
	span     *tracing.Span   // of that request, nil unless it is traced
	deadline time.Time       // of that request
	expiry   *time.Timer     // runs expire
	stale    bool            // its messages no longer count: the machine does not know its greeting (renew)
	refused  error           // the machine refused its greeting

	sender rpc.Sender
	broken bool        // nothing can be sent any more; only send uses it
	deaf   atomic.Bool // the queue was full: its member does not read
}

// Attend serves a member's stream until the member ends it, or its connection breaks. At a shutdown the
// lighthouse asks members to end their streams, so no stream needs a goroutine that waits for the shutdown.
func (m memberService) Attend(wire memberWire) error {
	job, err := m.server.use(wire.Context()) // a stream without a greeting counts, too (max_calls_per_job)
	if err != nil {
		return err
	}
	defer job.done()
	message, err := m.receive(wire)
	if err != nil {
		return err
	}
	greeting := message.GetGreeting()
	if greeting == nil {
		return status.Error(codes.InvalidArgument, "the first message of a member's stream is no greeting")
	}
	if err := checkReplicaID(greeting.GetReplicaId()); err != nil {
		return err
	}
	if err := m.server.refuseList(greeting.GetLighthouses()); err != nil {
		return err
	}
	s := &stream{
		job:        job,
		wire:       wire,
		replicaID:  greeting.GetReplicaId(),
		recallable: greeting.GetLighthouses() > 0,
		run:        greeting.GetRun(),
	}
	if err := s.begin(greeting); err != nil {
		return err
	}
	defer s.end()
	for {
		message, err := m.receive(wire)
		if err != nil {
			return err
		}
		if err := s.receive(message); err != nil {
			return err
		}
		if s.deaf.Swap(false) { // its messages are not received until it reads, so it counts as silent
			select {
			case <-s.sender.Flushed():
			case <-wire.Context().Done():
				return status.FromContextError(wire.Context().Err()).Err()
			}
		}
	}
}

// receive returns the next message of a stream, if this lighthouse leads.
func (m memberService) receive(wire memberWire) (*torchftpb.MemberMessage, error) {
	message, err := wire.Recv()
	if err == nil {
		err = m.server.cluster.check(wire.Context())
	}
	return message, err
}

func (s *stream) begin(greeting *torchftpb.Greeting) error {
	job := s.job
	job.mu.Lock()
	defer job.mu.Unlock()
	if job.ended != nil {
		return job.ended
	}
	job.greeting = s
	err := job.step(quorum.Greeted{
		ReplicaID: s.replicaID, Term: greeting.GetTerm(),
		Known:    quorum.Claim{QuorumID: greeting.GetKnownQuorumId(), Step: greeting.GetKnownStep()},
		StandsIn: greeting.GetStands().GetQuorumId(), Step: greeting.GetStands().GetStep(),
	})
	job.greeting = nil
	if err != nil && job.streams.has(s) { // the machine panicked after the welcome
		job.streams.remove(s)
	}
	if err == nil {
		err = s.refused
	}
	return err
}

// welcome adds the stream to the job's streams. Actions that the machine returned before the welcome are not
// sent on it.
func (s *stream) welcome(w quorum.Welcome) {
	s.job.streams.add(s)
	alive := s.job.cfg.HeartbeatTimeout / aliveFraction
	answers := s.job.answersAlive()
	if answers {
		alive = min(alive, answeredEvery)
	}
	s.post(encodeNews(&torchftpb.LighthouseMessage{
		Message: &torchftpb.LighthouseMessage_Welcome{Welcome: &torchftpb.Welcome{
			AliveIntervalUs: max(1, alive.Microseconds()), Term: w.Term, AnswersAlive: answers,
		}},
	}))
	if w.Draining != "" {
		s.post(encodeNews(noticeMessage(drained(w.Draining))))
	}
}

// answersAlive reports whether heartbeats on streams are answered: in a cluster, where a member can go to
// another lighthouse.
func (j *job) answersAlive() bool { return len(j.cfg.Cluster) > 0 }

// end returns when no goroutine uses the stream: gRPC allows no Send after the handler has returned.
func (s *stream) end() {
	s.ended.Store(true)
	defer func() { <-s.sender.Flushed() }()
	job := s.job
	job.mu.Lock()
	defer job.mu.Unlock()
	s.forget()
	if s.expiry != nil {
		s.expiry.Stop()
	}
	if job.streams.remove(s) && job.ended == nil {
		delete(job.heals, s.replicaID)
		_ = job.step(quorum.Disconnected{ReplicaID: s.replicaID}) // step has logged an error
	}
}

func (s *stream) receive(message *torchftpb.MemberMessage) error {
	s.received.Add(1)
	switch m := message.GetMessage().(type) {
	case *torchftpb.MemberMessage_Ask:
		return s.ask(m.Ask)
	case *torchftpb.MemberMessage_Withdraw:
		s.job.mu.Lock()
		defer s.job.mu.Unlock()
		if s.number == m.Withdraw {
			s.forget()
		}
		return nil
	case *torchftpb.MemberMessage_Past:
		return s.job.recalled(s.replicaID, m.Past)
	case *torchftpb.MemberMessage_Alive:
		s.job.board.Heard()
		if s.job.answersAlive() {
			s.post(heard)
		}
		return s.feed(quorum.Beat{ReplicaID: s.replicaID, Step: message.GetStep(),
			Phase: quorum.PhaseOf(message.GetPhase()), For: rpc.Microseconds(message.GetPhaseUs()),
			Pace: pace(message.GetPace())})
	case *torchftpb.MemberMessage_Stopped:
		return s.report(quorum.Stopped{ReplicaID: s.replicaID, QuorumID: m.Stopped.GetQuorumId(),
			Step: m.Stopped.GetStep()})
	case *torchftpb.MemberMessage_Parting:
		return s.report(quorum.Parting{
			ReplicaID: s.replicaID, QuorumID: m.Parting.GetQuorumId(), Step: m.Parting.GetStep(),
			Reason: shortened(m.Parting.GetReason()),
		})
	case *torchftpb.MemberMessage_Changes:
		return s.report(quorum.Changes{ReplicaID: s.replicaID, Reason: shortened(m.Changes)})
	case *torchftpb.MemberMessage_Drain:
		return s.report(quorum.Drained{ReplicaID: s.replicaID, Reason: shortened(m.Drain)})
	case *torchftpb.MemberMessage_Suspected:
		return s.report(quorum.Suspected{
			Reporter: s.replicaID, Suspect: m.Suspected.GetReplicaId(), QuorumID: m.Suspected.GetQuorumId(),
		})
	case *torchftpb.MemberMessage_Incomplete:
		return s.report(quorum.Incomplete{ReplicaID: s.replicaID, Reason: shortened(m.Incomplete)})
	case *torchftpb.MemberMessage_Healing:
		s.job.healing(s.replicaID, m.Healing)
		return s.feed(quorum.Beat{ReplicaID: s.replicaID})
	case *torchftpb.MemberMessage_Recovered:
		s.job.recovered(s.replicaID, m.Recovered)
		return s.feed(quorum.Beat{ReplicaID: s.replicaID})
	case *torchftpb.MemberMessage_Leaving:
		return s.job.feed(quorum.Leaving{ReplicaID: s.replicaID, Step: message.GetStep()})
	case *torchftpb.MemberMessage_ShuttingDown:
		return s.feed(quorum.ShuttingDown{ReplicaID: s.replicaID, Finished: message.GetFinished(),
			End: quorum.End{Run: s.run, Step: message.GetStep()}})
	case *torchftpb.MemberMessage_Progress:
		p := m.Progress
		return s.report(quorum.Progressed{ReplicaID: s.replicaID, Progress: quorum.Progress{
			Step: p.GetStep(), Rank: p.GetGroupRank(), What: shortened(p.GetWhat()), Waits: p.GetWaits(),
			Phase: quorum.PhaseOf(p.GetPhase()), For: rpc.Microseconds(p.GetForUs()),
		}})
	case *torchftpb.MemberMessage_Stacks:
		s.job.stacks(s.replicaID, m.Stacks)
		return s.feed(quorum.Beat{ReplicaID: s.replicaID})
	case *torchftpb.MemberMessage_Corrupted:
		s.job.corrupted(m.Corrupted)
		return s.feed(quorum.Beat{ReplicaID: s.replicaID})
	case *torchftpb.MemberMessage_Raised:
		r := m.Raised
		return s.report(quorum.Raised{ReplicaID: s.replicaID, Device: r.GetDevice(), Digest: quorum.Digest{
			Type: shortened(r.GetType()), Place: shortened(r.GetPlace()), Step: r.GetStep(),
			Unit: shortened(r.GetUnit()),
		}, Skip: shortened(r.GetSkip()), Text: shortenedTo(longestTraceback, r.GetText())})
	case *torchftpb.MemberMessage_Greeting:
		return status.Error(codes.InvalidArgument, "a member's stream has one greeting")
	default:
		return nil // a message of a later version: ignored
	}
}

// pace decodes a pace, with a text of bounded length.
func pace(p *torchftpb.Pace) quorum.Pace {
	is := wire.PaceFromProto(p)
	is.Host = shortened(is.Host)
	return is
}

// shortened bounds a text of a member that becomes a part of reports to all members.
func shortened(text string) string { return shortenedTo(longestText, text) }

func shortenedTo(most int, text string) string {
	if len(text) <= most {
		return text
	}
	// a message must not end within a character: it could not be encoded
	return strings.ToValidUTF8(text[:most], "") + "…"
}

// feed passes an event of the member to the machine, unless the stream is stale.
func (s *stream) feed(event quorum.Event) error {
	s.job.mu.Lock()
	defer s.job.mu.Unlock()
	switch {
	case s.job.ended != nil:
		return s.job.ended
	case s.stale:
		return nil
	}
	return s.job.step(event)
}

// report feeds an event, and counts its message as a heartbeat: after any message, the member sends no
// heartbeat for some time.
func (s *stream) report(event quorum.Event) error {
	_ = s.feed(quorum.Beat{ReplicaID: s.replicaID}) // the next line returns the same error
	return s.feed(event)
}

func (s *stream) ask(ask *torchftpb.Ask) error {
	if m := ask.GetMember(); m != nil {
		if m.GetReplicaId() != s.replicaID {
			return status.Errorf(codes.InvalidArgument, "replica_id is %q: the stream is that of %q",
				m.GetReplicaId(), s.replicaID)
		}
		s.latest = wire.MemberFromProto(m)
	} else if s.latest.ReplicaID == "" {
		return status.Error(codes.InvalidArgument, "the first request of a stream has no member")
	}
	if ask.GetTimeoutUs() <= 0 {
		return status.Errorf(codes.InvalidArgument, "timeout_us is %d: an ask needs a deadline, above 0",
			ask.GetTimeoutUs())
	}
	member := s.latest
	member.SetState(wire.StateFromProto(ask))

	job := s.job
	job.mu.Lock()
	defer job.mu.Unlock()
	if job.ended != nil {
		s.answer(ask.GetNumber(), answer{err: job.ended})
		return nil
	}
	if s.stale {
		s.answer(ask.GetNumber(), answer{err: errStale})
		return nil
	}
	s.forget()
	delete(job.heals, s.replicaID) // a group that requests a quorum no longer heals
	s.span = tracing.Continue(ask.GetTraceparent(), "lighthouse.quorum", ask.GetStep(),
		attribute.String("torchft.replica_id", s.replicaID))
	s.await(ask.GetNumber(), rpc.Microseconds(ask.GetTimeoutUs()))
	return job.step(quorum.Asked{
		Waiter: s.waiter, Member: member, KnownQuorumID: ask.GetKnownQuorumId(), Number: ask.GetNumber(),
		Recallable: s.recallable,
		Run:        s.run,
	})
}

// await registers the waiter of a request, and its deadline. The caller holds the job's lock.
func (s *stream) await(number uint64, timeout time.Duration) {
	s.number = number
	s.waiter = s.job.waiters.AddFunc(func(a answer) {
		s.waiter = 0
		endSpan(s.span, a)
		s.answer(number, a)
	})
	// Somewhat sooner than the member's own timeout, after which it would not receive the reason why there is
	// no quorum.
	s.deadline = rpc.Sooner(time.Now().Add(timeout), answerMargin)
	if s.expiry == nil {
		s.expiry = rpc.AfterFunc(s.job.log, "deadline of a member", s.expire)
	}
	s.expiry.Reset(time.Until(s.deadline))
}

var errWithdrawn = errors.New("the request was withdrawn")

// endSpan ends the span of a request with its result.
func endSpan(span *tracing.Span, a answer) {
	if span == nil {
		return
	}
	if d := a.delivered; d != nil {
		span.Set(attribute.Int64("torchft.quorum_id", d.quorum.ID),
			attribute.Int("torchft.groups", len(d.quorum.Members)))
	}
	span.End(a.err)
}

// expire answers a request at its deadline. The timer may be of an earlier one, which has been answered.
func (s *stream) expire() {
	s.job.mu.Lock()
	defer s.job.mu.Unlock()
	if s.waiter == 0 || time.Now().Before(s.deadline) || s.job.ended != nil {
		return
	}
	reason, refusal := s.job.reasonFor(s.replicaID) // before forget: the reason counts this request, too
	err := wire.Refused(codes.DeadlineExceeded, refusal, "no quorum in time: "+reason)
	s.answer(s.number, answer{err: err})
	s.forget()
}

// forget withdraws the pending request, if there is one. The caller holds the job's lock.
func (s *stream) forget() {
	if s.waiter == 0 {
		return
	}
	waiter := s.waiter
	s.waiter = 0
	s.span.End(errWithdrawn)
	s.job.waiters.Drop(waiter)
	if s.job.ended == nil {
		// step has logged an error
		_ = s.job.step(quorum.Withdrawn{ReplicaID: s.replicaID, Waiter: waiter})
	}
}

// post queues messages that answer no request, and never blocks.
func (s *stream) post(messages []rpc.Encoded) {
	s.queue(0, func() error {
		for _, message := range messages {
			if err := s.wire.SendMsg(message); err != nil {
				return err
			}
		}
		return nil
	})
}

// answer queues the answer to a request, and never blocks.
func (s *stream) answer(number uint64, a answer) {
	s.queue(number, func() error {
		if a.err != nil {
			return a.err
		}
		message, err := a.delivered.after(s.list)
		if err == nil {
			err = s.wire.SendMsg(rpc.Numbered{Number: number, Message: message})
		}
		if err == nil {
			s.list = a.delivered.list
		}
		return err
	})
}

// queue queues a message. It is dropped if the queue is full, which bounds the memory that a member takes. A
// request whose answer is dropped ends at its deadline.
func (s *stream) queue(number uint64, send func() error) {
	if !s.sender.Post(func() { s.send(number, send) }) {
		s.deaf.Store(true)
	}
}

// send sends a message. If that fails, it sends a failure instead; if that fails, too, the stream has broken,
// and Recv in Attend returns the error.
func (s *stream) send(number uint64, send func() error) {
	if s.broken {
		return
	}
	err := func() (err error) {
		defer rpc.Recovered(s.job.log, "an answer on a stream", &err)
		return send()
	}()
	if err != nil {
		s.broken = s.wire.Send(&torchftpb.LighthouseMessage{Number: number,
			Message: &torchftpb.LighthouseMessage_Failure{Failure: wire.FailureToProto(err)}}) != nil
	}
}
