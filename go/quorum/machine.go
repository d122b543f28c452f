package quorum

import (
	"fmt"
	"math"
	"slices"
	"strings"
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

	// latest is the newest quorum, members its replicas in order. Both are nil before the first.
	latest  *Quorum
	members []*replica
	step    int64 // largest of the latest quorum's members

	// highest is the largest quorum_id that anybody has seen. It begins with the milliseconds of the
	// start: the next lighthouse of this job begins above all that this one can give out.
	highest int64

	// broken is who of the latest quorum was told to be gone. The others have ended what they shared with it: if it is
	// back, they must connect anew all the same.
	broken string

	recall recall    // what is to be learned before it may decide: memory.go
	behind time.Time // since when a quorum waits because it would go on below the job's step; zero if none does

	// What tells it from the other lighthouses of a list: continuity.go.
	seat     Seat
	term     int64
	ended    map[string]struct{} // voters whose process is gone
	probedAt time.Time
	outvoted time.Time // since when those who ask may not go on; zero while they may

	leavers  []string // members of the latest quorum that left it and are still there, in order: drain.go
	rejoined string   // one that left, and asked again since
	moved    string   // member of the latest quorum in whose name another process asks: the others must connect with that

	suspicion suspicion // among the members of the latest quorum
	watch     watch     // over the progress of the latest quorum

	lastTick time.Time
	wakeAt   time.Time // of the latest Wake, zero if there is nothing to wake for
	told     cause     // of the last Waiting since the latest quorum
}

// maxKnownID is what a member may claim to know. Above it a claim is nonsense and would soon overflow.
const maxKnownID = math.MaxInt64 / 2

// NewMachine makes the machine of a lighthouse that starts at a time. The policy must be valid.
func NewMachine(policy Policy, start time.Time) *Machine {
	return &Machine{
		policy:   policy,
		roster:   newRoster(policy),
		now:      start,
		highest:  max(0, start.UnixMilli()),
		lastTick: start,
	}
}

// Step takes in one event at a time and returns what to do, in this order.
func (m *Machine) Step(event Event, now time.Time) []Action {
	if now.Before(m.now) {
		now = m.now
	}
	m.now = now
	if slept, ok := event.(Slept); ok { // before anybody is found to be silent
		m.roster.forgive(slept.For)
		m.watch.began = m.watch.began.Add(slept.For)
	}
	dead := m.roster.expire(now)
	var refused []Action
	decide := len(dead) > 0 // who died may be whom the others waited for
	lastTick, tick := m.lastTick, false

	switch e := event.(type) {
	case Asked:
		if reason := m.misfit(e); reason != "" {
			refused = []Action{Refuse{e.Waiter, Misfit, reason}}
			dead = append(dead, m.turnDown(e.Member.ReplicaID, reason)...)
			decide = len(dead) > 0
			break
		}
		refused, decide = m.asked(e, decide)
	case Greeted:
		refused = m.greeted(e)
		decide = true // of those who begin again, nobody waits
	case Reaches:
		m.roster.reach(e.ReplicaID, e.Places&m.before())
	case Recalled:
		refused = m.recalled(e)
		decide = true
	case Ended:
		dead = append(dead, m.processGone(e.ReplicaID)...)
		decide = true
	case GaveUp:
		m.roster.giveUp(e.Waiter, now)
	case Beat:
		m.roster.beat(e.ReplicaID, now)
	case Drained:
		refused = m.drain(e)
	case Leaving:
		refused = m.leaves(e.ReplicaID)
		decide = true
	case ShuttingDown:
		// It may still be needed in the step that it has ended, so it is no death before its connection has ended and the
		// grace is over.
		if r := m.roster.replicas[e.ReplicaID]; r != nil {
			r.ending = true
		}
		refused = append(refused, Release(e))
	case Lost:
		m.lostLeaver(e.ReplicaID)
		m.roster.lost(e.ReplicaID, now)
		dead = append(dead, m.roster.expire(now)...) // there may be no grace
		decide = len(dead) > 0
	case Incomplete:
		if r := m.roster.replicas[e.ReplicaID]; r != nil && r.alive() && !r.waiting() {
			dead = append(dead, m.roster.putOut(r, RankGone, e.Reason, now))
		}
		decide = len(dead) > 0
	case Suspected:
		refused = m.suspect(e, now)
	case Checked:
		dead = append(dead, m.checkedOn(e, now)...)
		decide = len(dead) > 0
	case Progressed:
		m.progressed(e)
	case Slept, Woken: // Woken: for those whose grace is over
	case Tick:
		stalled, out := m.overdue(now)
		refused, dead = append(m.lookAgain(), stalled...), append(dead, out...)
		decide, tick = true, true
		m.lastTick = now
		if len(m.leavers) > 0 && !m.stay() {
			refused = append(refused, m.release()...)
		}
	}

	actions := slices.Concat(refused, m.failures(dead))
	if decide {
		actions = append(actions, m.act(tick, lastTick)...)
	}
	if tick {
		actions = append(actions, m.goBack()...)
	}
	return append(actions, m.wake()...)
}

// asked takes a request in, or refuses it.
func (m *Machine) asked(e Asked, decide bool) (actions []Action, decided bool) {
	if e.KnownQuorumID <= maxKnownID && (!m.listed() || termOf(e.KnownQuorumID) <= m.term) {
		m.highest = max(m.highest, e.KnownQuorumID)
	}
	r := m.roster.replicas[e.Member.ReplicaID]
	another := r != nil && r.address != "" && r.address != e.Member.Address // of two processes with one name the newer is believed
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
			m.moved = r.id
		}
	}
	if r := m.roster.replicas[e.Member.ReplicaID]; m.lostAnswer(r, e) {
		m.roster.beat(r.id, m.now)
		r.number, r.returned = max(r.number, e.Number), false
		return append(actions, Again{e.Waiter, m.latest}), decide
	}
	m.stayed(e.Member.ReplicaID)
	m.roster.ask(e, m.now)
	m.roster.reach(e.Member.ReplicaID, e.Reaches&m.before())
	delete(m.ended, e.Member.ReplicaID)
	if e.Member.Step >= m.step {
		m.behind = time.Time{} // whom the others wait for is there, and will ask again if it gives up
	}
	if e.Tells {
		actions = append(actions, m.lookFor(e.Member.ReplicaID, e.KnownQuorumID)...)
	}
	return actions, true
}

// replaced refuses a request because another process of the same name is newer.
func replaced(w WaiterID, id, by string) Refuse {
	return Refuse{w, Replaced, fmt.Sprintf("another process, with its manager at %q, asks as replica %s: replica ids must be unique", by, id)}
}

// act decides, and does what was decided. tick tells of the timer, and when it came before.
func (m *Machine) act(tick bool, tickBefore time.Time) (actions []Action) {
	d, in, changed, missing := m.decide(m.roster.tally(m.now), m.now)
	switch { // who comes and goes meanwhile does not make the others wait anew
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
		actions = append(m.probes(missing), m.sendOn(d.detail, in)...)
	case tick:
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
	if m.looking(now) {
		d.cause, d.detail = pastUnknown, fmt.Sprintf("a member knows of quorum %d, and is asked who was in it", m.recall.id)
		return d, nil, false, nil
	}
	in, changed = m.pick(d)
	if reason, missing := m.torn(d, in); reason != "" {
		d.cause, d.detail = outvoted, reason
		return d, in, changed, missing
	}
	if d.cause == fastPath {
		return d, in, changed, nil
	}
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
	for _, r := range in {
		for _, w := range r.waiters(func(request) bool { return true }) {
			m.roster.giveUp(w, m.now)
			actions = append(actions, Refuse{w, Behind, d.detail})
		}
	}
	return actions
}

// failures tells of those who died and are in the latest quorum.
func (m *Machine) failures(dead []death) (actions []Action) {
	for _, d := range dead {
		if d.replica.previous {
			m.broken = d.replica.id
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
	q := &Quorum{Members: make([]Member, len(in)), Created: m.now, Base: m.base(in, changed)}
	m.step = 0
	for i, r := range in {
		q.Members[i] = *r.member()
		m.step = max(m.step, q.Members[i].Step)
		if q.Members[i].CommitFailures > 0 && failing == "" {
			failing = r.id
		}
	}

	// A member may know of a later quorum than ours (it came from another lighthouse): going on with
	// our number would lead it back to an old one, and to the old one's keys in the store.
	switch {
	case m.latest == nil || changed || failing != "" || m.highest > m.latest.ID || m.broken != "" || m.rejoined != "" || m.moved != "":
		m.highest++
		q.ID = m.highest
	default:
		q.ID = m.latest.ID
	}

	q.Revision = revisionAfter(m.latest, q.Members)
	answer := Deliver{Quorum: q, Before: m.latest, Waited: d.tally.waited, Waiters: make([]WaiterID, 0, len(in))}
	for _, r := range in {
		answer.Waiters = m.roster.answer(answer.Waiters, r, m.now)
	}
	m.roster.joinAgain(m.now)
	m.told = nobodyWaits

	actions := []Action{answer}
	if m.latest == nil || q.ID != m.latest.ID {
		reason := d.String()
		switch {
		case failing != "":
			reason += fmt.Sprintf("; %s reports commit failures", failing)
		case m.broken != "":
			reason += fmt.Sprintf("; %s is gone", m.broken)
		case m.rejoined != "":
			reason += fmt.Sprintf("; %s had left, and is back", m.rejoined)
		case m.moved != "":
			reason += fmt.Sprintf("; another process asks as %s", m.moved)
		case !changed:
			reason += "; a member knows a later quorum than the latest of this lighthouse"
		}
		reason += m.farewell()
		actions = append(actions, m.change(q, in, changed, reason))
	}
	actions = append(actions, m.release()...)
	if d.regress != "" {
		actions = append(actions, Regressed{Quorum: q, Reason: d.regress})
	}
	m.latest, m.broken, m.rejoined, m.moved, m.suspicion = q, "", "", "", suspicion{}
	m.watch.next(m.now, !changed)
	for id := range m.ended {
		if !m.votes(id) {
			delete(m.ended, id)
		}
	}
	return actions
}

// pick returns the replicas of the quorum in order, and whether they differ from the latest one's.
func (m *Machine) pick(d decision) (in []*replica, changed bool) {
	t := d.tally
	if d.eligible() == t.previous && t.previousCandidates == t.previous {
		return m.members, false // the same as before, in the same order
	}
	in = make([]*replica, 0, d.eligible())
	for e := m.roster.queue.Front(); e != nil; e = e.Next() {
		if r := e.Value.(*replica); r.previous || !d.shrink {
			in = append(in, r)
		}
	}
	slices.SortFunc(in, func(a, b *replica) int { return strings.Compare(a.id, b.id) })
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
