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

	// highest is the largest quorum_id that anybody has seen. It begins with the milliseconds of the
	// start: the next lighthouse of this job begins above all that this one can give out.
	highest int64

	lastTick time.Time
	told     cause // of the last Waiting since the latest quorum
}

// maxKnownID is what a member may claim to know. Above it a claim is nonsense and would soon overflow.
const maxKnownID = math.MaxInt64 / 2

// NewMachine makes the machine of a lighthouse that starts at a time. The policy must be valid.
func NewMachine(policy Policy, start time.Time) *Machine {
	return &Machine{
		policy:   policy,
		roster:   newRoster(policy.HeartbeatTimeout),
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
	m.roster.expire(now)

	switch e := event.(type) {
	case Asked:
		if e.KnownQuorumID <= maxKnownID {
			m.highest = max(m.highest, e.KnownQuorumID)
		}
		m.roster.ask(e.Waiter, e.Member, now)
		if d := compute(m.policy, m.roster.tally(now)); d.ready() {
			return m.deliver(d)
		}
	case GaveUp:
		m.roster.giveUp(e.Waiter, now)
	case Beat:
		m.roster.beat(e.ReplicaID, now)
	case Tick:
		since := m.lastTick
		m.lastTick = now
		d := compute(m.policy, m.roster.tally(now))
		if d.ready() {
			return m.deliver(d)
		}
		return m.waiting(d, since)
	}
	return nil
}

// deliver makes the quorum that was decided and answers everybody in it.
func (m *Machine) deliver(d decision) []Action {
	in, changed := m.pick(d)

	failing := ""
	q := &Quorum{Members: make([]Member, len(in)), Created: m.now}
	for i, r := range in {
		q.Members[i] = *r.member()
		if q.Members[i].CommitFailures > 0 && failing == "" {
			failing = r.id
		}
	}

	// A member may know of a later quorum than ours (it came from another lighthouse): going on with
	// our number would lead it back to an old one, and to the old one's keys in the store.
	switch {
	case m.latest == nil || changed || failing != "" || m.highest > m.latest.ID:
		m.highest++
		q.ID = m.highest
	default:
		q.ID = m.latest.ID
	}

	answer := Deliver{Quorum: q, Waiters: make([]WaiterID, 0, len(in))}
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
		case !changed:
			reason += "; a member knows a later quorum than the latest of this lighthouse"
		}
		actions = append(actions, m.change(q, in, changed, reason))
	}
	m.latest = q
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
