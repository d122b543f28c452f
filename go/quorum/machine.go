package quorum

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// Machine decides who trains together. It is a state machine for one goroutine: events go in through Step,
// and what must be done about them comes out.
//
// A request costs the same whatever the number of groups; only the one that completes a quorum costs as
// much as the quorum has members. The quorum that is delivered is one value for all who waited.
type Machine struct {
	policy Policy
	roster *roster
	now    time.Time // of the last event; never goes back

	memory // of the latest quorum, and what is to be learned before it may decide

	anew   reconnect // whether the next quorum needs an id of its own, whoever is in it: reconnect.go
	behind time.Time // since when a quorum waits because it would go on below the job's step; zero if none does

	elsewhere // the other lighthouses of a list

	drains drains // members of the latest quorum that left it, and are still there

	suspicion suspicion // among the members of the latest quorum
	watch     watch     // over the progress of the latest quorum

	lastTick time.Time
	wakeAt   time.Time // of the latest Wake, zero if there is nothing to wake for
	told     cause     // of the last Waiting since the latest quorum
	inUse    InUse     // that was reported
}

// maxKnownID is what a member may claim to know. Above it a claim is nonsense and would soon overflow.
const maxKnownID = math.MaxInt64 / 2

// NewMachine makes the machine of a lighthouse that starts at a time. The policy must be valid.
func NewMachine(policy Policy, start time.Time) *Machine {
	return &Machine{
		policy:   policy,
		roster:   newRoster(policy),
		now:      start,
		memory:   memory{highest: max(0, start.UnixMilli())},
		lastTick: start,
	}
}

// Step takes in one event at a time and returns what to do, in this order.
func (m *Machine) Step(event Event, now time.Time) []Action {
	if now.Before(m.now) {
		now = m.now
	}
	m.now = now
	if slept, ok := event.(Slept); ok {
		// Before expire: the members spoke while nobody listened. Without this they would all have failed.
		m.roster.forgive(slept.For)
		m.watch.began = m.watch.began.Add(slept.For)
		// How long it was is not certain. A bond that has run out is no proof that its member asked nobody else.
		m.list.releaseAll(now)
	}
	failed := m.roster.expire(now)
	var refused []Action
	decide := len(failed) > 0 // A failure may complete the quorum: the remaining healthy members may all have asked.
	lastTick, tick := m.lastTick, false

	switch e := event.(type) {
	case Asked:
		// Refused before it is entered in the roster: one that can be in no quorum must not count as healthy. Else the others would
		// wait for it.
		if why, reason := m.unfit(e); reason != "" {
			refused = []Action{Refuse{e.Waiter, why, reason}}
			if why == Unshown { // it may show it now: then it counts
				refused = append(refused, Recall{e.Member.ReplicaID, e.KnownQuorumID})
			}
			failed = append(failed, m.turnDown(e.Member.ReplicaID, why, reason)...)
			decide = len(failed) > 0
			break
		}
		refused, decide = m.asked(e, decide)
	case Greeted:
		refused = m.greeted(e)
		decide = true // A new term ends requests. The members that are left may be all that are healthy.
	case Reaches:
		// Only earlier lighthouses count: members go back by it, never on to a later one.
		m.roster.reach(e.ReplicaID, e.Places&m.before())
	case Recalled:
		before := m.latest
		refused = m.recalled(e)
		if m.latest != before {
			failed = nil // They are of the quorum before. The members of this one have heartbeat_timeout_ms to come.
		}
		decide = true
	case Bound: // It decides nothing: a bond is a vote only once its member has ended.
		m.list.answered(e.ReplicaID, e.Since)
	case GivenUp:
		refused = m.givenUp(e)
		decide = decide || len(refused) > 0
	case Ended:
		// It decides although nobody may have failed by it: the end of a bound member is a vote, which may have been missing.
		failed = append(failed, m.processEnded(e.ReplicaID)...)
		decide = true
	case GaveUp: // It does not decide: with one candidate less no quorum becomes possible.
		m.roster.giveUp(e.Waiter, now)
	case Beat:
		m.roster.beat(e.ReplicaID, now)
	case Drained:
		refused = m.drain(e)
	case Leaving:
		// The others do not wait for it from here on: it counts as failed. It is released when they have ended the step that it was
		// in, since what it sent last may be on its way to them.
		refused = m.leaves(e.ReplicaID)
		decide = true
	case ShuttingDown:
		// It counts as alive until its connection has ended and the grace is over: its peers may still receive what it sent in the
		// step that it has ended, and a failure would abort that.
		if r := m.roster.replicas[e.ReplicaID]; r != nil {
			r.ending, r.finished = true, e.Finished
		}
		m.over(e.ReplicaID, m.list.promised(e.ReplicaID, m.latestID()))
		refused = append(append(refused, Release{e.ReplicaID}), m.finish()...)
	case Disconnected:
		// It is a suspect, and counts as alive until its grace is over: a short cut of the network must not cost a step. Its host
		// is asked at once all the same: its end is a vote only while its bond holds, for 4.5 s.
		m.lostLeaver(e.ReplicaID)
		m.roster.disconnected(e.ReplicaID, now)
		failed = append(failed, m.roster.expire(now)...) // the grace may be 0
		refused = m.broke(e.ReplicaID)
		decide = len(failed) > 0
	case Incomplete: // A group asks only when all of its ranks have: one that waits has got them back, and this is older news.
		if r := m.roster.replicas[e.ReplicaID]; r != nil && r.alive() && !r.waiting() {
			failed = append(failed, m.roster.markFailed(r, RankFailed, e.Reason, now))
		}
		decide = len(failed) > 0
	case Suspected: // It puts nobody out: a check has to fail first. Else one liar could evict a peer.
		refused = m.suspect(e)
	case Checked:
		failed = append(failed, m.checkedOn(e)...)
		decide = len(failed) > 0
	case Progressed:
		m.watch.progressed(e, now)
	case Slept, Woken: // expire has done what there is to do: Woken comes when the grace of a suspect is over.
	case Tick: // All that becomes true by time alone: it is noticed one tick late at most.
		stalled, out := m.overdue()
		again, unshown := m.lookAgain()
		refused, failed = slices.Concat(again, m.probeEnds(), stalled), slices.Concat(failed, out, unshown)
		m.list.sweep(now, func(id string) bool { return m.roster.replicas[id] != nil })
		decide, tick = true, true
		m.lastTick = now
		if m.drains.any() && !m.stay() {
			refused = append(refused, m.drains.release()...)
		}
	}

	actions := slices.Concat(refused, m.failures(failed))
	if decide {
		actions = append(actions, m.act(tick, lastTick)...)
	}
	if tick {
		actions = slices.Concat(actions, m.goBack(), m.keep(false, m.list.seat, m.now))
	}
	if is := (InUse{m.roster.counts.healthy > 0, m.latest != nil}); is != m.inUse {
		m.inUse = is
		actions = append(actions, is)
	}
	return append(actions, m.wake()...)
}

// unfit says why a member can be in no quorum here, whatever it asks; empty if it can.
func (m *Machine) unfit(e Asked) (why Refusal, reason string) {
	if reason := m.streamless(e); reason != "" {
		return Streamless, reason
	}
	if reason := m.stillUnshown(e); reason != "" {
		return Unshown, reason
	}
	return Misfit, m.misfit(e)
}

// asked takes a request in, or refuses it.
func (m *Machine) asked(e Asked, decide bool) (actions []Action, decided bool) {
	if why, reason := m.doubt(e); reason != "" {
		return []Action{Refuse{e.Waiter, why, reason}}, decide
	}
	r := m.roster.replicas[e.Member.ReplicaID]
	if m.plausible(e.KnownQuorumID, m.list.term, m.now) {
		m.highest = max(m.highest, e.KnownQuorumID)
	}
	another := r != nil && r.address != "" && r.address != e.Member.Address // of two processes with one name the newer is believed
	// A request that was held up on the way says what held before. Believed, it would complete a quorum at a step that its member
	// has left, and its members would divide by different numbers.
	switch inOrder := m.roster.inOrder(e.Member.ReplicaID, e.Number); {
	case !inOrder && another:
		return []Action{replaced(e.Waiter, r.id, r.address)}, decide
	case !inOrder:
		return []Action{Refuse{e.Waiter, Overtaken, "a newer request of " + e.Member.ReplicaID + " came before this one"}}, decide
	case another:
		for _, w := range r.waiters(func(q request) bool { return q.member.Address != e.Member.Address }) {
			m.roster.giveUp(w, m.now)
			actions = append(actions, replaced(w, r.id, e.Member.Address))
		}
		if r.previous {
			m.anew.moved(r.id)
		}
	}
	m.tookAddress(&e.Member)
	// The same quorum once more, as if the answer had been slow. That is safe only while nothing has happened since: again.go.
	if r := m.roster.replicas[e.Member.ReplicaID]; m.lostAnswer(r, e) {
		m.roster.beat(r.id, m.now)
		r.number, r.returned = max(r.number, e.Number), false
		return append(actions, Again{e.Waiter, m.latest}), decide
	}
	if m.drains.stayed(e.Member.ReplicaID) {
		m.anew.rejoined(e.Member.ReplicaID)
	}
	m.roster.ask(e, m.now)
	m.roster.reach(e.Member.ReplicaID, e.Reaches&m.before())
	m.list.back(e.Member.ReplicaID)
	if e.Member.Step >= m.step {
		m.behind = time.Time{} // whom the others wait for is there, and will ask again if it gives up
	}
	if e.Tells {
		actions = append(actions, m.lookFor(m.roster.replicas[e.Member.ReplicaID], e.KnownQuorumID)...)
	}
	return actions, true
}

// replaced refuses a request because another process of the same name is newer.
func replaced(w WaiterID, id, by string) Refuse {
	return Refuse{w, Replaced, fmt.Sprintf("another process, with its manager at %q, asks as replica %s: replica ids must be unique", by, id)}
}

// act decides, and does what was decided. tick tells of the timer, and when it came before.
func (m *Machine) act(tick bool, tickBefore time.Time) (actions []Action) {
	t := m.roster.tally(m.now)
	if !tick && m.heldUp(t) {
		return nil
	}
	d, in, changed, missing := m.decide(t, m.now)
	// The wait for those that are ahead begins once. Membership churn must not restart it: other causes leave it as it is.
	switch {
	case d.cause == nobodyWaits, d.cause == forbidden, d.ready():
		m.behind = time.Time{}
	case d.cause == behindJob && m.behind.IsZero():
		m.behind = m.now
	}
	switch {
	case d.ready():
		actions = m.deliver(d, in, changed)
	case d.cause == forbidden:
		actions = m.forbid(d, in)
	case d.cause == outvoted:
		// The votes may be at another lighthouse. Without sending them on they might wait here for ever.
		actions = append(m.probes(missing), m.sendOn(d.detail, in)...)
	case tick:
		// They wait for something else: time, or other members. If not even all that are alive have the votes, that wait is in vain.
		actions = m.stranded()
	}
	if d.ready() || d.cause == nobodyWaits {
		m.outvoted = time.Time{}
	}
	if tick && !d.ready() {
		actions = append(actions, m.waiting(d, tickBefore)...)
	}
	return actions
}

// decide says whether there is a quorum at a time, and of whom. It changes nothing.
func (m *Machine) decide(t tally, now time.Time) (d decision, in []*replica, changed bool, missing []Voter) {
	d = compute(m.policy, t)
	if !d.ready() {
		return d, nil, false, nil
	}
	// A member knows a later quorum. Without it the job would go on from an older one, with an id that was used.
	if m.looking(m.list.listed(), m.policy, now) {
		d.cause, d.detail = pastUnknown, fmt.Sprintf("a member knows of quorum %d, and is asked who was in it", m.recall.id)
		return d, nil, false, nil
	}
	in, changed = m.pick(d)
	if id := m.ahead(in); id != 0 {
		d.cause, d.detail = pastUnknown, fmt.Sprintf("a member knows of quorum %d, and is asked who was in it", id)
		return d, nil, false, nil
	}
	// Without the votes another lighthouse may serve the rest: two histories. Looked at for whom it would really be of, as
	// shrink_only leaves some out.
	if reason, missing := m.torn(d, in); reason != "" {
		d.cause, d.detail = outvoted, reason
		return d, in, changed, missing
	}
	// A base of any length would be as right, but somebody has to carry it. Members that wait for this hear of the last quorum.
	if changed && tooLong(m.base(in, changed)) {
		d.cause, d.detail = outvoted, fmt.Sprintf("too few members know of quorum %d and of those before it: its members stay the same until more do", m.latest.ID)
		return d, in, changed, nil
	}
	// All of the last quorum are there: whoever was ahead is.
	if d.cause == fastPath {
		return d, in, changed, nil
	}
	// Below the job's step only those go on that have waited for whoever was there: its weights would be lost.
	reason, mayCome := m.regress(in)
	switch {
	case reason == "":
	case mayCome && (m.behind.IsZero() || now.Sub(m.behind) < m.policy.HeartbeatTimeout):
		d.cause, d.detail = behindJob, "they have heartbeat_timeout_ms to come: "+reason
	case m.policy.ForbidRegression:
		d.cause, d.detail = forbidden, "forbid_regression is set: "+reason
	default:
		d.regress = reason
	}
	return d, in, changed, nil
}

// forbid refuses all who would go on below the job's step.
func (m *Machine) forbid(d decision, in []*replica) (actions []Action) {
	slices.SortFunc(in, byID)
	for _, r := range in {
		for _, w := range r.waiters(func(request) bool { return true }) {
			m.roster.giveUp(w, m.now)
			actions = append(actions, Refuse{w, Behind, d.detail})
		}
	}
	return actions
}

// failures tells of those that failed and are in the latest quorum.
func (m *Machine) failures(failed []failure) (actions []Action) {
	for _, d := range failed {
		if d.replica.previous {
			m.anew.gone(d.replica.id)
			if d.replica.ending {
				d.cause, d.reason = ShutDown, "its manager server was shut down"
			}
			actions = append(actions, Failed{QuorumID: m.latest.ID, ReplicaID: d.replica.id, Cause: d.cause, Reason: d.reason})
		}
	}
	return actions
}

// wake asks for an event at the end of the first suspect's grace.
func (m *Machine) wake() []Action {
	due := m.roster.due()
	if due.Equal(m.wakeAt) {
		return nil
	}
	m.wakeAt = due
	if due.IsZero() {
		return nil
	}
	return []Action{Wake{At: due}}
}

// deliver makes the quorum that was decided and answers everybody in it.
func (m *Machine) deliver(d decision, in []*replica, changed bool) []Action {
	failing := ""
	if changed {
		slices.SortFunc(in, byID)
	}
	q := &Quorum{Members: make([]Member, len(in)), Created: m.now, Base: m.base(in, changed)}
	m.step = 0
	shows := true
	for i, r := range in {
		q.Members[i] = *r.member()
		shows = shows && r.newest().tells
		m.step = max(m.step, q.Members[i].Step)
		if q.Members[i].CommitFailures > 0 && failing == "" {
			failing = r.id
		}
	}

	// A member may know of a later quorum than ours (it came from another lighthouse): going on with
	// our number would lead it back to an old one, and to the old one's keys in the store.
	switch {
	case m.latest == nil || changed || failing != "" || m.highest > m.latest.ID || m.anew.needed():
		m.highest++
		q.ID = m.highest
	default:
		q.ID = m.latest.ID
	}

	q.Revision = revisionAfter(m.latest, q.Members)
	answer := Deliver{Quorum: q, Before: m.latest, Waited: d.tally.waited, Waiters: make([]WaiterID, 0, len(in)), Kept: m.list.listed() && !shows}
	for _, r := range in {
		answer.Waiters = m.roster.answer(answer.Waiters, r, m.now)
	}
	m.roster.joinAgain(m.now)
	m.told = nobodyWaits

	actions := []Action{answer}
	if m.recall.id > q.ID {
		actions = append(actions, Doubted{m.recall.whom, notShown(m.recall.id)})
		if r := m.roster.replicas[m.recall.whom]; r != nil {
			r.unshown = true // the next quorum does not wait for it again
		}
		m.recall = recall{}
	}
	if m.latest == nil || q.ID != m.latest.ID {
		reason := d.String()
		switch {
		case failing != "":
			reason += fmt.Sprintf("; %s reports commit failures", failing)
		case m.anew.needed():
			reason += "; " + m.anew.reason()
		case !changed:
			reason += "; a member knows a later quorum than the latest of this lighthouse"
		}
		reason += m.drains.farewell()
		actions = append(actions, m.change(q, in, changed, reason))
	}
	actions = append(actions, m.drains.release()...)
	if d.regress != "" {
		actions = append(actions, Regressed{Quorum: q, Reason: d.regress})
	}
	fresh := m.latest == nil || q.ID != m.latest.ID
	m.latest, m.anew, m.suspicion = q, reconnect{}, suspicion{}
	m.watch.next(m.now, !changed)
	m.list.spend()
	if fresh {
		actions = append(actions, m.keep(true, m.list.seat, m.now)...)
	}
	return actions
}

// pick returns the replicas of the quorum, and whether they differ from the latest one's: if not they are in order. Most that are
// picked are not delivered (an event of a member each, while the others have the time to come), so only those that are get sorted.
func (m *Machine) pick(d decision) (in []*replica, changed bool) {
	t := d.tally
	if d.eligible() == t.previous && t.previousCandidates == t.previous {
		return m.members, false // the same as before, in the same order
	}
	in = make([]*replica, 0, d.eligible())
	for e := m.roster.queue.Front(); e != nil; e = e.Next() {
		r := e.Value.(*replica)
		r.looks++
		if r.previous || !d.shrink {
			in = append(in, r)
		}
	}
	return in, true
}

// change makes the report of a new quorum_id and moves on to the new set of members.
func (m *Machine) change(q *Quorum, in []*replica, changed bool, reason string) Changed {
	report := Changed{Quorum: q, Reason: reason}
	if !changed {
		return report
	}
	for _, r := range in {
		if !r.previous {
			report.Joined = append(report.Joined, r.id)
		}
	}
	before := m.members
	m.members = in
	for _, r := range before {
		m.roster.setPrevious(r, false, m.now)
	}
	for _, r := range in {
		m.roster.setPrevious(r, true, m.now)
	}
	for _, r := range before {
		if !r.previous {
			report.Left = append(report.Left, r.id)
		}
	}
	return report
}

// waiting reports at a tick why there is no quorum, once a reason, and only when somebody waits since the
// tick before: a round of a healthy job is over long before, and would flood the log.
func (m *Machine) waiting(d decision, tickBefore time.Time) []Action {
	joined := m.now.Add(-d.tally.waited)
	if d.cause == nobodyWaits || d.cause == m.told || joined.After(tickBefore) {
		return nil
	}
	m.told = d.cause
	return []Action{Waiting{Reason: m.explain(d)}}
}
