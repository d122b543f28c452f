package quorum

import (
	"container/list"
	"fmt"
	"strings"
	"time"
)

// record is the lighthouse's record of one member. It is kept while the member is alive, has a pending
// request, or is in the previous quorum. (In this file, the previous quorum is the latest one that was
// delivered.)
type record struct {
	id       string
	lastBeat time.Time
	pulse    *list.Element // its element in roster.pulses; nil once its heartbeat is too old

	brokeAt time.Time     // when its last stream broke
	suspect *list.Element // its element in roster.suspects; nil unless the member is a suspect

	presumed bool // it counts as alive because it was in the last quorum, although it has sent nothing yet

	request *request // the pending one; nil: none
	number  uint64   // of the newest request
	// of its manager server, from the newest request or from the last quorum; empty if it was in neither
	address string

	joined time.Time     // since when it is a candidate
	place  *list.Element // its element in roster.queue; nil while the member is no candidate
	// its element in roster.previousQueue; nil unless the member is a candidate and in the previous quorum
	previousPlace *list.Element

	previous bool          // member of the previous quorum
	newcomer *list.Element // its element in roster.newcomers; nil if it is none
	held     bool          // it is a standby (seats.go)
	returned bool          // it has begun a stream since its last answer, and has not asked yet
	behind   bool          // it was in the latest quorum with a smaller step than its own (behind.go)

	claim Claim // the latest round that it claims to have received, and can show
	// it claimed to know a later quorum, and did not show it in time: no decision waits for it again
	unshown bool

	attends  bool  // it has a stream, on which it receives a Call
	standsIn int64 // id of the quorum in which it trains on without requests; 0: none
	stop     int64 // its answer to the Call of that quorum; 0: none
	step     int64 // the step that it is in, as it reported last

	occupation occupation // its phase
	pace       Pace       // as it reported last

	run      string // of its launcher, as it asked last; empty: it named none
	draining string // who requested its drain; empty if it is not drained
	ending   bool   // it has reported that its manager server ends
	finished bool   // it has reported that its training is complete

	// why it counts as failed until it asks again, even if it sends heartbeats; empty if it does not
	out string
}

type request struct {
	waiter     WaiterID
	member     Member
	known      int64 // quorum_id of the last quorum that the member was in
	recallable bool  // it answers a Recall
}

func (r *record) alive() bool { return r.pulse != nil && r.out == "" }

func (r *record) waiting() bool { return r.request != nil }

func (r *record) candidate() bool { return r.alive() && r.waiting() && !r.held }

// OnlyBeats is why a member that has sent heartbeats by calls, and has not asked yet, does not count as
// healthy.
const OnlyBeats = "it has sent heartbeats only, and has not asked for a quorum yet"

// byID orders members by replica_id.
func byID(a, b *record) int { return strings.Compare(a.id, b.id) }

// member returns the member record of the pending request. There must be one.
func (r *record) member() *Member { return &r.request.member }

// roster keeps the records of the members and counts them.
//
// Invariants:
//
//  1. Every change of a field that counts depend on (pulse, out, presumed, request, previous, held) goes
//     through update, which takes the member out of the counts and adds it again. So after every event,
//     counts equals a recount of all members.
//  2. A member has a record in members while it is alive, has a pending request, or is in the latest quorum,
//     and no longer: this bounds the memory.
//  3. pulses has the members with a recent heartbeat, the oldest heartbeat first. suspects has those of them
//     whose stream broke, the longest ago first. So expire looks only at the first ones of each list.
//  4. queue has the candidates, previousQueue those of them that were in the latest quorum, both in the order
//     in which they joined: timers count from the first one.
//  5. newcomers has the members with a recent heartbeat that are not in the latest quorum, in the order in
//     which they came. Only they may be held.
//  6. out is cleared by a request, or when the heartbeat is too old. A heartbeat does not clear it, since an
//     evicted member keeps sending them. A drained member keeps it after its heartbeat was dropped, so that
//     the status shows the reason (drains.disconnected).
type roster struct {
	timeout       time.Duration // of heartbeats
	grace         time.Duration // of suspects
	members       map[string]*record
	pulses        *list.List // of *record with a recent heartbeat, the oldest heartbeat first
	suspects      *list.List // of *record that are alive and whose stream broke, the longest ago first
	queue         *list.List // of *record that are candidates, the first to join first
	previousQueue *list.List // those of them that were in the previous quorum, in the same order
	newcomers     *list.List // of *record with a recent heartbeat that are not in the latest quorum, in order
	counts        tally      // waited and joining are not set: they depend on the time
	// until then a member whose stream broke may come back: the grace of a suspect begins later
	lenient time.Time
}

func newRoster(p Policy) *roster {
	return &roster{
		timeout:       p.HeartbeatTimeout,
		grace:         p.SuspectGrace,
		members:       map[string]*record{},
		pulses:        list.New(),
		suspects:      list.New(),
		queue:         list.New(),
		previousQueue: list.New(),
		newcomers:     list.New(),
	}
}

// tally returns the counts and waiting times on which a decision at the time now is based.
func (s *roster) tally(now time.Time) tally {
	t := s.counts
	if first := s.queue.Front(); first != nil {
		t.waited = now.Sub(first.Value.(*record).joined)
		t.joining = t.waited
	}
	if first := s.previousQueue.Front(); first != nil {
		t.joining = now.Sub(first.Value.(*record).joined)
	}
	return t
}

// failure is a member that counts as failed from now on, with the cause.
type failure struct {
	member *record
	cause  Cause
	reason string
}

// expire drops the members whose heartbeat is too old, unless this lighthouse is deaf, and the suspects whose
// grace is over.
func (s *roster) expire(now time.Time, deaf bool) (failed []failure) {
	for e := s.pulses.Front(); e != nil && !deaf; e = s.pulses.Front() {
		r := e.Value.(*record)
		if now.Sub(r.lastBeat) < s.timeout {
			break
		}
		reported := r.out != ""
		s.drop(r, now)
		if reported {
			continue
		}
		failed = append(failed, failure{r, Silent,
			fmt.Sprintf("no sign of life for %d ms", now.Sub(r.lastBeat).Milliseconds())})
	}
	for e := s.suspects.Front(); e != nil; e = s.suspects.Front() {
		r := e.Value.(*record)
		if now.Sub(r.brokeAt) < s.grace {
			break
		}
		s.drop(r, now)
		failed = append(failed, failure{r, Connection, fmt.Sprintf("its connection broke, and it did not "+
			"come back within %s ms", milliseconds(s.grace))})
	}
	return failed
}

func (s *roster) drop(r *record, now time.Time) {
	s.trust(r)
	s.update(r, now, func() {
		s.pulses.Remove(r.pulse)
		r.pulse, r.presumed, r.out = nil, false, ""
	})
}

// markFailed lets a member count as failed until it asks again.
func (s *roster) markFailed(r *record, cause Cause, reason string, now time.Time) failure {
	s.trust(r)
	s.update(r, now, func() { r.out = reason })
	return failure{r, cause, reason}
}

// unheard returns how long no member has given a sign of life.
func (s *roster) unheard(now time.Time) time.Duration {
	newest := s.pulses.Back()
	if newest == nil {
		return 0
	}
	return now.Sub(newest.Value.(*record).lastBeat)
}

// disconnected makes a member a suspect.
func (s *roster) disconnected(id string, now time.Time) {
	if r := s.members[id]; r != nil && r.alive() && r.suspect == nil {
		if r.brokeAt = now; now.Before(s.lenient) {
			r.brokeAt = s.lenient
		}
		r.suspect = s.suspects.PushBack(r)
	}
}

// trust ends a suspicion, if there is one.
func (s *roster) trust(r *record) {
	if r.suspect != nil {
		s.suspects.Remove(r.suspect)
		r.suspect = nil
	}
}

// due returns when the first suspect's grace is over, zero if there is no suspect.
func (s *roster) due() time.Time {
	e := s.suspects.Front()
	if e == nil {
		return time.Time{}
	}
	return e.Value.(*record).brokeAt.Add(s.grace)
}

// beat records a sign of life, which ends a suspicion.
func (s *roster) beat(id string, now time.Time) *record {
	r := s.members[id]
	if r == nil {
		r = &record{id: id}
		s.members[id] = r
	}
	r.lastBeat = now
	s.trust(r)
	if r.presumed {
		s.update(r, now, func() { r.presumed = false })
	}
	if r.pulse != nil {
		s.pulses.MoveToBack(r.pulse)
		return r
	}
	s.update(r, now, func() { r.pulse = s.pulses.PushBack(r) })
	return r
}

// presume makes a member that has sent nothing yet count as alive.
func (s *roster) presume(id string, now time.Time) *record {
	if r := s.members[id]; r != nil && r.alive() {
		return r
	}
	r := s.beat(id, now)
	s.update(r, now, func() { r.presumed = true })
	return r
}

// ask makes a request the pending one of its member, and returns the one that it replaces, nil if there is
// none.
func (s *roster) ask(e Asked, now time.Time) (earlier *request) {
	r := s.beat(e.Member.ReplicaID, now)
	r.number, r.address, r.ending, r.finished = max(r.number, e.Number), e.Member.Address, false, false
	r.run = e.Run
	earlier = r.request
	s.update(r, now, func() {
		r.out = ""
		r.request = &request{e.Waiter, e.Member, e.KnownQuorumID, e.Recallable}
	})
	return earlier
}

// inOrder reports whether a request with this number is newer than all earlier ones of its member. A request
// without a number counts as newer.
func (s *roster) inOrder(id string, number uint64) bool {
	r := s.members[id]
	return number == 0 || r == nil || number > r.number
}

// withdraw removes the request of a member, and returns its waiter. Without one it is no candidate any more.
func (s *roster) withdraw(r *record, now time.Time) WaiterID {
	w := r.request.waiter
	s.update(r, now, func() { r.request = nil })
	return w
}

// answer does the same when the request is answered by a quorum.
func (s *roster) answer(r *record, now time.Time) WaiterID {
	r.returned = false
	return s.withdraw(r, now)
}

// joinAgain restarts the join timer of the candidates that were left out of a quorum.
func (s *roster) joinAgain(now time.Time) {
	for e := s.queue.Front(); e != nil; e = e.Next() {
		e.Value.(*record).joined = now
	}
}

// setPrevious marks whether a member is in the latest quorum.
func (s *roster) setPrevious(r *record, previous bool, now time.Time) {
	s.update(r, now, func() { r.previous = previous })
}

// update changes the record of one member, and adapts the counts, the queues and the map.
func (s *roster) update(r *record, now time.Time, change func()) {
	was := r.candidate()
	s.count(r, -1)
	change()
	s.isNewcomer(r)
	s.count(r, +1)

	switch is := r.candidate(); {
	case is && !was:
		r.joined = now
		r.place = s.queue.PushBack(r)
	case was && !is:
		s.queue.Remove(r.place)
		r.place = nil
	}
	switch is := r.previous && r.candidate(); {
	case is && r.previousPlace == nil:
		r.previousPlace = pushInOrder(s.previousQueue, r)
	case !is && r.previousPlace != nil:
		s.previousQueue.Remove(r.previousPlace)
		r.previousPlace = nil
	}
	if r.pulse == nil && !r.waiting() && !r.previous {
		delete(s.members, r.id)
	}
}

// pushInOrder puts a candidate after those that joined before it: nearly always at the end.
func pushInOrder(queue *list.List, r *record) *list.Element {
	e := queue.Back()
	for e != nil && e.Value.(*record).joined.After(r.joined) {
		e = e.Prev()
	}
	if e == nil {
		return queue.PushFront(r)
	}
	return queue.InsertAfter(r, e)
}

func (s *roster) count(r *record, by int) {
	t := &s.counts
	if r.alive() && !r.held {
		t.healthy += by
		if r.previous {
			t.present += by
		}
		if r.presumed {
			t.presumed += by
		}
	}
	if r.previous {
		t.previous += by
	}
	if !r.candidate() {
		return
	}
	t.candidates += by
	if r.previous {
		t.previousCandidates += by
	}
	if r.member().ShrinkOnly {
		t.shrinkers += by
	}
}
