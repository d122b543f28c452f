package quorum

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// standing lets a quorum stand: its members train on in it, step after step, without a request. When
// something has to change, the lighthouse calls the next quorum (Call). Each member answers with the first
// step that none of its ranks was allowed to begin (Stopped). The largest of these is the step of the round:
// all members train until that step, and ask for the next quorum there (Round).
//
// A quorum stands if all of its members attend by stream and are at the same step with the same weights. So
// the one in which a member heals does not, nor does the one of step 0, in which the groups synchronize their
// initial weights, nor one with a group that asks for each step (Member.AsksEachStep). While a quorum does
// not stand, its members ask for each step.
//
// Invariants:
//
//  1. No member begins the step of the round, or a later one, in the quorum that was called: its answer to
//     the call is at most that step, and after the answer it begins no other step until it knows the round.
//  2. A member that asks after a lost step has left a step in which the others may wait for it: they are
//     notified (Parts), so that they end that step, and ask, too. From then on the quorum stands for nobody.
//  3. A member that has not answered the call within heartbeat_timeout_ms fails. So no call waits for ever.
//  4. While a quorum stands and no member at all is heard, it is the lighthouse that is cut off: nobody
//     counts as failed for its silence. Once a member is heard again, the others have heartbeat_timeout_ms to
//     come back, and likewise after the lighthouse was stopped.
//  5. A request below the step of the round completes no quorum: its member trains on, and withdraws it.
//     Otherwise the quorum would be delivered to the others, and its member would not know of it.
//  6. A call needs no memory: after a restart of the lighthouse, a member that asks causes another one, and
//     the others repeat their answers.
type standing struct {
	*core
	past  *memory
	watch *watch

	why     string           // why the next quorum is called; empty: there is no reason
	called  time.Time        // when it was called; zero: it was not
	awaited map[*record]bool // the members that have neither answered the call nor asked
	round   int64            // the step of the round; 0 until all members have answered

	holding bool // the latest quorum stands for one of its members
}

// maxStep is the largest step that a member may report. A larger one is ignored, as one below 0: it would
// overflow.
const maxStep = math.MaxInt64 / 2

// trains reports whether a member trains on in the latest quorum, without a request.
func (s *standing) trains(r *record) bool { return s.holds(r) && r.alive() && !r.waiting() }

// holds reports whether the latest quorum stands for a member.
func (s *standing) holds(r *record) bool {
	return r.previous && r.standsIn != 0 && r.standsIn == s.past.latestID()
}

// stands reports whether a quorum of these members stands.
func (s *standing) stands(in []*record, members []Member) bool {
	first := members[0].State()
	for i, r := range in {
		m := members[i].State()
		if !r.attends || r.draining != "" || members[i].AsksEachStep || m.Step != first.Step ||
			m.CommittedQuorumID != first.CommittedQuorumID {
			return false
		}
	}
	return first.Step > 0 && first.CommittedQuorumID != 0
}

// begins records that a quorum was delivered. Members that were left out of it are told.
func (s *standing) begins(q *Quorum, in []*record, left []string) {
	for _, id := range left {
		if r := s.roster.members[id]; r != nil {
			s.outdated(r)
		}
	}
	s.forget()
	s.holding = q.Stands
	for _, r := range in {
		r.standsIn, r.stop, r.step = 0, 0, q.Members[0].Step
		if q.Stands {
			r.standsIn = q.ID
		}
	}
}

// ends records that the members of the latest quorum are notified of a failure: they leave it at once.
func (s *standing) ends() {
	s.forget()
	s.holding = false
	for _, r := range s.past.members {
		r.standsIn, r.stop = 0, 0
	}
}

// deaf reports whether nobody is heard while a quorum stands. An event from a member ends that: the silence
// so far does not count.
func (s *standing) deaf(e Event) bool {
	unheard := s.roster.unheard(s.now)
	if !s.holding || unheard < s.policy.HeartbeatTimeout/2 {
		return false
	}
	switch e.(type) {
	case nil, Tick, Woken, Slept, Checked, Disconnected, Withdrawn, Drained:
		return true
	}
	s.pause(unheard)
	s.hears()
	return false
}

// hears begins the time that the members have to come back after the lighthouse was cut off, or was stopped.
func (s *standing) hears() {
	if s.holding {
		s.roster.lenient = s.now.Add(s.policy.HeartbeatTimeout)
	}
}

// adopted records that the latest quorum is one that was formed before.
func (s *standing) adopted() {
	s.forget()
	s.holding = false
	for _, r := range s.roster.members {
		s.outdated(r)
		s.holding = s.holding || s.holds(r)
	}
}

// forget drops the call.
func (s *standing) forget() { s.why, s.called, s.awaited, s.round = "", time.Time{}, nil, 0 }

// wants records a reason to call the next quorum.
func (s *standing) wants(reason string) {
	if s.why == "" && s.holding {
		s.why = reason
	}
}

// greeted records what a member that begins a stream reports. If its quorum has ended meanwhile, since a
// member of it failed (broken), or since there was a later one, the member is told.
func (s *standing) greeted(r *record, e Greeted, broken string) {
	r.attends, r.standsIn, r.stop, r.step = true, e.StandsIn, 0, 0
	r.reached(e.Step)
	if r.standsIn == s.past.latestID() && broken != "" {
		s.over(r, broken)
	}
	s.outdated(r)
	s.holding = s.holding || s.holds(r)
	s.callAgain(r)
}

// over tells a member that its quorum has ended.
func (s *standing) over(r *record, reason string) {
	if r.standsIn != 0 {
		s.do(Over{r.standsIn, r.id, reason})
		r.standsIn = 0
	}
}

// outdated tells a member that the latest quorum is later than the one in which it trains on.
func (s *standing) outdated(r *record) {
	if latest := s.past.latestID(); r.standsIn < latest {
		s.over(r, fmt.Sprintf("the job has continued in quorum %d", latest))
	}
}

// redelivered records that a member gets the latest quorum now, and not when the others got it.
func (s *standing) redelivered(r *record) {
	if s.past.latest.Stands {
		r.standsIn, r.stop = s.past.latest.ID, 0
		s.callAgain(r)
	}
}

// callAgain calls a member that may have missed the call to all. One that has begun another stream, and whose
// request was lost with the one before, asks again: the step of the round is not named before that.
func (s *standing) callAgain(r *record) {
	if s.called.IsZero() || !r.previous || !r.alive() || r.waiting() {
		return
	}
	if s.round == 0 {
		s.awaited[r] = true
	}
	if s.holds(r) {
		s.do(Call{s.past.latestID(), []string{r.id}, s.why})
	}
}

// asked handles a request, before it is in the roster. A member of the latest quorum that asks at the end of
// a step is a reason to call the next one; after a lost step it parts with the others. It reports whether the
// member trains on, and withdraws the request.
func (s *standing) asked(r *record, e Asked) (trainsOn bool) {
	switch {
	case r == nil || !r.previous || !s.holding:
	case e.Member.CommitFailures > 0 || s.trains(r) && e.Member.CommittedQuorumID != r.standsIn:
		r.reached(e.Member.Step)
		s.part(r, fmt.Sprintf("it asks for another quorum at step %d, which it has lost", e.Member.Step))
	default:
		r.stop = max(r.stop, e.Member.Step)
		delete(s.awaited, r)
		s.wants(r.id + " asks")
		if e.Member.Step < s.round {
			return s.trainsOn(r)
		}
	}
	return false
}

// joins handles a newcomer that asks, or that has asked before a quorum was known to stand: unless it is a
// standby, it is a reason to call the next quorum.
func (s *standing) joins(r *record) {
	if !r.previous && !r.held && !s.shrinks() {
		s.wants(r.id + " asks to join")
	}
}

// reconsider calls the next quorum for newcomers that asked when no member was known to train on.
func (s *standing) reconsider() {
	if t := s.roster.counts; s.why != "" || t.candidates == t.previousCandidates {
		return
	}
	for e := s.roster.queue.Front(); e != nil; e = e.Next() {
		if r := e.Value.(*record); !r.previous {
			s.joins(r)
			return
		}
	}
}

// shrinks reports whether the latest quorum has a member that accepts no newcomers: calling it for one would
// be in vain.
func (s *standing) shrinks() bool {
	return s.past.latest != nil && slices.ContainsFunc(s.past.latest.Members,
		func(m Member) bool { return m.ShrinkOnly })
}

// leaves handles the report of a member that it has ended the step before this one, and will not ask.
func (s *standing) leaves(r *record, step int64) {
	if s.holds(r) {
		r.stop = step
		delete(s.awaited, r)
		s.wants(r.id + " leaves")
	}
}

// parted handles the report of a member that it has left the quorum.
func (s *standing) parted(e Parting) {
	if r := s.roster.members[e.ReplicaID]; r != nil && s.trains(r) && e.QuorumID == r.standsIn {
		r.reached(e.Step)
		s.part(r, e.Reason)
	}
}

// part notifies the others that a member has left the step in which they are, or will be.
func (s *standing) part(r *record, reason string) {
	s.failed = append(s.failed, failure{r, Parts, reason})
}

// reached records the step that a member is in, as it reports.
func (r *record) reached(step int64) {
	if step <= maxStep {
		r.step = max(r.step, step)
	}
}

// stopped records the answer to a call.
func (s *standing) stopped(e Stopped) {
	r := s.roster.members[e.ReplicaID]
	if r == nil || !s.trains(r) || e.QuorumID != r.standsIn || e.Step <= 0 || e.Step > maxStep ||
		s.called.IsZero() {
		return // it has asked meanwhile, or the quorum has ended
	}
	r.stop = max(e.Step, r.step+1) // it is in r.step, whatever it answers
	delete(s.awaited, r)
	switch {
	case s.round == 0:
		r.reached(r.stop - 1) // after the round it answers with that, if its step is earlier
	case r.stop > s.round:
		r.reached(r.stop - 1)
		s.part(r, fmt.Sprintf("it has begun step %d, and the next quorum is that of step %d", r.stop-1,
			s.round))
	default: // it has begun another stream, and may have missed the round
		s.do(Round{e.QuorumID, s.round, []string{r.id}})
	}
}

// advance calls the next quorum if there is a reason, and tells the members the step of the round when all
// have answered. It comes after each event. While a member may still show a later round, the step is not
// named: a member that asks may be in that round.
func (s *standing) advance(searching bool) {
	if s.why == "" || s.round != 0 {
		return
	}
	if s.called.IsZero() {
		s.call()
	}
	if s.called.IsZero() || len(s.awaited) > 0 || searching {
		return
	}
	var told []string
	for _, r := range s.past.members {
		if r.alive() {
			s.round = max(s.round, r.stop)
		}
		if s.holds(r) && r.alive() {
			// also one that waits for the next quorum: it has to train on if the others have begun a later
			// step
			told = append(told, r.id)
		}
	}
	if len(told) == 0 {
		s.forget()
		return
	}
	s.do(Round{s.past.latestID(), s.round, told})
	for _, r := range s.past.members {
		switch {
		case r.stop >= s.round:
		case s.holds(r) && !r.alive(): // it has left, and the others have begun another step with it
			s.part(r, fmt.Sprintf("it left before step %d", r.stop))
		case !s.holds(r) && r.alive():
			s.trainsOn(r)
		case r.waiting():
			s.roster.withdraw(r, s.now)
		}
	}
}

// trainsOn handles a member that asks before the round, which it may have missed. If the quorum does not
// stand for it any more, it cannot train on, and the others are told.
func (s *standing) trainsOn(r *record) bool {
	if !s.holds(r) {
		s.part(r, fmt.Sprintf("it asks at step %d, and the quorum does not stand for it", r.stop))
		return false
	}
	s.do(Round{r.standsIn, s.round, []string{r.id}})
	return true
}

// call calls the next quorum, unless no member trains on.
func (s *standing) call() {
	awaited, ids := map[*record]bool{}, []string{}
	for _, r := range s.past.members {
		if r.alive() && !r.waiting() {
			// it trains on, is about to ask, or has not been heard since this lighthouse started
			awaited[r] = true
		}
		if s.trains(r) {
			ids = append(ids, r.id)
		}
	}
	if len(ids) == 0 {
		s.forget()
		return
	}
	s.called, s.awaited = s.now, awaited
	s.do(Call{s.past.latestID(), ids, s.why})
}

// tick evicts the members that have not answered the call, and records how far the quorum has come: to the
// step that all of its members have begun.
func (s *standing) tick() {
	s.reconsider()
	if !s.called.IsZero() && s.now.Sub(s.called) >= s.policy.HeartbeatTimeout {
		for _, r := range s.past.members {
			if s.awaited[r] && s.trains(r) && r.attends {
				s.fail(r, Unanswered, fmt.Sprintf("it has not answered the call of the next quorum for %s ms",
					milliseconds(s.now.Sub(s.called))))
			}
		}
	}
	if s.now.Before(s.roster.lenient) {
		// heartbeats from before an absence may still arrive: the steps of that time would be divided by a
		// part of it
		return
	}
	least := int64(0)
	for i, r := range s.past.members {
		if !s.holds(r) || r.lastBeat.Before(s.watch.began) {
			// the heartbeats of one interval together: else the steps of an interval would be divided by a
			// part of it
			return
		}
		if i == 0 || r.step < least {
			least = r.step
		}
	}
	if least > s.past.step {
		s.watch.advanced(least - s.past.step)
		s.come(least)
	}
}

// come records the step that the latest quorum has come to.
func (s *standing) come(step int64) {
	s.past.step = step
	s.do(Advanced{s.past.latestID(), step, len(s.past.members)})
}

// ended records the steps that the members have made in a quorum that stood, since their last heartbeats. Its
// members ask for the next one.
func (s *standing) ended(in []*record) {
	if s.past.latest == nil || !s.past.latest.Stands {
		return
	}
	step := s.past.step
	for _, r := range in {
		if m := r.member(); r.previous && m.CommittedQuorumID == s.past.latestID() {
			step = max(step, m.Step)
		}
	}
	if step > s.past.step {
		s.come(step)
	}
}

// String returns the state in words, for the status; empty if the latest quorum stands for nobody.
func (s *standing) String() string {
	switch {
	case !slices.ContainsFunc(s.past.members, s.trains):
		return ""
	case s.round != 0:
		return fmt.Sprintf("the quorum stands until step %d: %s", s.round, s.why)
	case !s.called.IsZero():
		return "the next quorum is called: " + s.why
	}
	return "the quorum stands"
}
