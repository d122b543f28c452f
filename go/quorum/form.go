package quorum

import (
	"fmt"
	"slices"
	"time"
)

// This file forms quorums: it asks the parts of the machine whether the pending requests suffice for a
// quorum, and delivers it.

// reportAfter is how long requests must have been pending before it is reported why. In each step of a
// healthy job some members wait for others for a moment.
const reportAfter = 5 * time.Second

// act decides whether there is a quorum now, and appends the resulting actions.
func (m *Machine) act() {
	m.past.refuseLate()
	t := m.roster.tally(m.now)
	d := m.decide(t, m.now)
	if d.cause == behindJob && d.behind != "" && m.past.behind.IsZero() {
		m.do(Report{What: CopyAwaited, Reason: d.detail})
	}
	m.past.decided(d)
	switch {
	case d.ready():
		m.deliver(d)
	case d.cause == forbidden:
		slices.SortFunc(d.in, byID)
		for _, r := range d.in {
			m.refusePending(r, Behind, d.detail)
		}
	}
	if d.cause != noRequest && !d.ready() && d.tally.waited >= reportAfter && !m.reported[d.cause] {
		m.reported[d.cause] = true
		m.do(Report{What: QuorumAwaited, Reason: m.roster.explain(d)})
	}
}

// decide returns whether there is a quorum now, and its members. It changes nothing.
func (m *Machine) decide(t tally, now time.Time) decision {
	d := compute(m.policy, t)
	if !d.ready() {
		return d
	}
	// A member knows a later quorum. If the decision did not wait for it to be shown, the job would continue
	// from an older quorum, with an id that was used already.
	if m.search.pending(now) {
		return d.unknown(m.search.round)
	}
	d.in, d.changed = m.past.pick(d)
	if d.cause == fastPath {
		// all members of the latest quorum ask, also those with the largest step: no step can be lost
		return d
	}
	return m.past.mayRegress(d, now)
}

// deliver forms the quorum of a decision, and answers all of its members.
func (m *Machine) deliver(d decision) {
	if d.changed {
		slices.SortFunc(d.in, byID)
	}
	if d.behind != "" {
		m.past.copies.abandon()
	}
	before := m.past.latest
	m.standing.ended(d.in)
	q := &Quorum{Members: make([]Member, len(d.in)), Created: m.clock(m.now)}
	failing := ""
	for i, r := range d.in {
		q.Members[i] = *r.member()
		if q.Members[i].CommitFailures > 0 && failing == "" {
			failing = r.id
		}
	}
	m.past.lowerSteps(q.Members, d.in)
	q.ID = m.past.newID(d.changed || failing != "" || m.reconnect.needed() || !m.past.isKnownTo(d.in))
	q.Stands = m.standing.stands(d.in, q.Members)
	q.Speeds = m.speeds.next(q.Members, d.in)
	q.Skipped = m.poison.leftOut(q.MaxStep())
	m.search.delivers()
	answer := Deliver{Quorum: q, Waited: d.tally.waited, Waiters: make([]WaiterID, 0, len(d.in))}
	for _, r := range d.in {
		answer.Waiters = append(answer.Waiters, m.roster.answer(r, m.now))
	}
	m.roster.joinAgain(m.now)

	fresh := before == nil || q.ID != before.ID
	joined, left := m.past.follow(q, d.in, d.changed)
	m.standing.begins(q, d.in, left)
	if fresh {
		m.past.keep()
	}
	m.do(answer)
	if fresh {
		m.do(Changed{Quorum: q, Joined: joined, Left: left, Reason: m.whyFresh(d, failing)})
	}
	m.drains.release() // no member is in the last step of the drained ones any more
	if d.regress != "" {
		m.do(Report{What: JobRegressed, QuorumID: q.ID, Step: q.MaxStep(), Reason: d.regress})
	}
	m.reported, m.reconnect = [causes]bool{}, reconnect{}
	m.suspicion.forget()
	m.seats.taken = false
	m.watch.next(!d.changed)
}

// whyFresh returns the reason why a quorum has a new id.
func (m *Machine) whyFresh(d decision, failing string) string {
	reason := d.String()
	switch {
	case failing != "":
		reason += fmt.Sprintf("; %s reports commit failures", failing)
	case m.reconnect.needed():
		reason += "; " + m.reconnect.reason()
	case !d.changed:
		reason += "; a member knows another quorum than the latest of this lighthouse"
	}
	return reason + m.drains.whoLeft()
}
