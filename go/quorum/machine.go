package quorum

import (
	"math"
	"slices"
	"time"
)

// Machine decides who trains together. It is a state machine for one goroutine: events go in through Step,
// and what must be done about them comes out.
//
// It routes events to the subjects below, each of which keeps its own invariants, and forms quorums (form.go). Their shared
// state is in core.
//
// A request costs the same whatever the number of groups; only the one that completes a quorum costs as
// much as the quorum has members. The quorum that is delivered is one value for all waiters.
type Machine struct {
	core

	past      memory    // the latest quorum, ids, and the job's step
	reconnect reconnect // whether the next quorum needs an id of its own, also with the same members
	drains    drains    // members of the latest quorum that left it, and are still there
	suspicion suspicion // among the members of the latest quorum
	watch     watch     // over its progress
	search    search    // for a quorum that a member knows, and this lighthouse does not

	// Of a lighthouse that is one of a list:
	list     succession // the rule by which only one of them serves the job
	terms    terms      // of all lighthouses
	ends     ends       // of members, which may be votes
	votes    votes      // whether this lighthouse may go on
	failback failback   // to an earlier lighthouse

	lastTick time.Time
	wakeAt   time.Time // of the latest Wake, zero if there is nothing to wake for
	reported cause     // of the last Waiting since the latest quorum
	inUse    InUse     // that was reported
}

// maxKnownID is what a member may claim to know. Above it a claim is nonsense and would soon overflow.
const maxKnownID = math.MaxInt64 / 2

// NewMachine makes the machine of a lighthouse that starts at a time. The policy must be valid.
func NewMachine(policy Policy, start time.Time) *Machine {
	m := &Machine{core: newCore(policy, start), lastTick: start}
	shared, past, list := &m.core, &m.past, &m.list
	m.past = memory{core: shared, highest: max(0, start.UnixMilli())}
	m.drains = drains{core: shared, past: past}
	m.suspicion = suspicion{core: shared, past: past}
	m.watch = watch{core: shared, past: past, reconnect: &m.reconnect}
	m.terms = terms{core: shared, past: past, list: list}
	m.ends = ends{core: shared, past: past, list: list}
	m.votes = votes{core: shared, past: past, list: list, ends: &m.ends}
	m.failback = failback{core: shared, past: past, list: list}
	m.search = search{core: shared, past: past, list: list, terms: &m.terms}
	return m
}

// Step takes in one event at a time and returns what to do, in this order.
func (m *Machine) Step(event Event, now time.Time) []Action {
	m.open(now)
	if slept, ok := event.(Slept); ok {
		// Before expire: the members spoke while nobody listened. Without this they would all have failed.
		m.roster.forgive(slept.For)
		m.watch.forgive(slept.For)
		// How long it was is not certain. A bond that has run out is no proof that its member asked nobody else.
		m.list.releaseAll(m.now)
	}
	m.failed = append(m.failed, m.roster.expire(m.now)...)
	decide := m.take(event)
	decide = decide || len(m.failed) > 0 // A failure may complete the quorum: the remaining healthy members may all have asked.
	m.reportFailures()
	_, tick := event.(Tick)
	if decide {
		m.act(tick)
	}
	if tick {
		// Failback comes after the decision: members that have just got a quorum have no request here any more, and go with the others.
		if !m.drains.any() && !m.search.pending(m.now) {
			m.failback.tick()
		}
		m.past.keep(false, m.list.seat)
		m.lastTick = m.now
	}
	m.reportUse()
	m.wake()
	return m.actions
}

// take hands an event to the subjects that it concerns, and reports whether it may lead to a quorum even if nobody fails by it.
func (m *Machine) take(event Event) (decide bool) {
	switch e := event.(type) {
	case Asked:
		return m.asked(e)
	case Withdrawn: // It does not decide: with one candidate less no quorum becomes possible.
		m.roster.withdraw(e.Waiter, m.now)
	case Beat: // It decides nothing: if a waiting member that was silent is a candidate again by it, the next tick sees that.
		m.roster.beat(e.ReplicaID, m.now)
	case Greeted:
		m.greeted(e)
		return true // A new term ends requests. The members that are left may be all that are healthy.
	case Disconnected:
		m.disconnected(e.ReplicaID)
	case Incomplete: // A group asks only when all of its ranks have: one that waits has got them back, and this is older news.
		if r := m.roster.replicas[e.ReplicaID]; r != nil && r.alive() && !r.waiting() {
			m.fail(r, RankFailed, e.Reason)
		}
	case Suspected: // It evicts nobody: a check has to fail first. Else one liar could evict a peer.
		m.suspicion.suspected(e)
	case Checked:
		m.suspicion.lookedAt(e)
	case Progressed: // It decides nothing: the next tick looks at all answers together, so that none is judged before the others came.
		m.watch.progressed(e)
	case Drained: // It decides nothing: the member is in the next quorum as before, since it leaves only after a step.
		m.drains.drained(e)
	case Leaving:
		if m.drains.leaving(e.ReplicaID) {
			m.ends.left(e.ReplicaID)
		}
		return true // the others do not wait for it any more
	case ShuttingDown:
		m.drains.shuttingDown(e)
		m.ends.left(e.ReplicaID)
		m.finish()
	case Recalled:
		if m.search.recalled(e) {
			m.adopted()
		}
		return true // a decision that waited for this quorum need not any more (search.pending)
	case Ended:
		m.ends.ended(e.ReplicaID)
		return true // although nobody may have failed by it: the end of a bound member is a vote, which may have been missing
	case GivenUp:
		return m.ends.givenUp(e)
	case Bound: // It decides nothing: a bond is a vote only once its member has ended.
		m.list.answered(e.ReplicaID, e.Since)
	case Reaches: // It decides nothing, and sends nobody: Step asks failback after the decision of a tick, so that no quorum is lost by it.
		m.failback.reaches(e.ReplicaID, e.Places)
	case Slept, Woken: // Step has done what there is to do: Woken comes when the grace of a suspect is over.
	case Tick: // All that becomes true by time alone: it is noticed one tick late at most.
		m.search.tick()
		m.ends.tick()
		m.watch.tick()
		m.list.sweep(m.now, func(id string) bool { return m.roster.replicas[id] != nil })
		m.drains.tick()
		return true
	}
	return false
}

// asked takes a request in, refuses it, or redelivers the latest quorum. It reports whether it took the request in.
func (m *Machine) asked(e Asked) bool {
	id := e.Member.ReplicaID
	// Refused before it is entered in the roster: one that can be in no quorum must not count as healthy. Else the others would
	// wait for it.
	if why, reason := m.unfit(e); reason != "" {
		m.refuse(e.Waiter, why, reason)
		if why == Unshown { // it may show it now: then it counts
			m.do(Recall{id, e.KnownQuorumID})
		}
		m.turnDown(id, why, reason)
		return false
	}
	if reason := m.search.doubt(e); reason != "" {
		m.refuse(e.Waiter, Unbelieved, reason)
		return false
	}
	if m.past.plausible(e.KnownQuorumID, m.list.term) {
		m.past.highest = max(m.past.highest, e.KnownQuorumID)
	}
	newest, replaces := m.newest(e)
	if !newest {
		return false
	}
	if r := m.roster.replicas[id]; replaces && r.previous {
		m.reconnect.moved(id)
	}
	m.ends.tookAddress(&e.Member)
	if m.lostAnswer(e) {
		r := m.roster.beat(id, m.now)
		r.number, r.returned = max(r.number, e.Number), false
		m.do(Redeliver{e.Waiter, m.past.latest})
		return false
	}
	if m.drains.stayed(id) {
		m.reconnect.rejoined(id)
	}
	m.roster.ask(e, m.now)
	m.failback.reaches(id, e.Reaches)
	m.list.back(id) // it votes by its request
	if e.Member.Step >= m.past.step {
		m.past.behind = time.Time{} // the member that the others wait for is there, and will ask again if its request ends
	}
	if e.Recallable {
		m.search.heard(m.roster.replicas[id], e.KnownQuorumID)
	}
	return true
}

// unfit says why a member can be in no quorum here, whatever it asks; empty if it can.
func (m *Machine) unfit(e Asked) (why Refusal, reason string) {
	if reason := m.list.streamless(e); reason != "" {
		return Streamless, reason
	}
	if reason := m.search.unshown(e); reason != "" {
		return Unshown, reason
	}
	return Misfit, m.past.misfit(e)
}

// greeted lets a stream begin.
func (m *Machine) greeted(e Greeted) {
	r := m.terms.admit(e)
	if r == nil {
		// A refused greeting counts as unsaid: its term or quorum would otherwise end the requests of the others. Where there is no list,
		// there are no terms and no failback, and the member is asked for its quorum when it asks for the next one: no other lighthouse
		// can form one meanwhile.
		return
	}
	m.failback.cameBack(e.KnownQuorumID)
	m.terms.greeted(r, e)
	m.search.heard(r, e.KnownQuorumID)
}

// disconnected makes a member a suspect. It counts as alive until its grace is over: a short cut of the network must not cost a step.
// Its host is asked at once all the same: its end is a vote only while its bond holds (bondHolds).
func (m *Machine) disconnected(id string) {
	m.drains.disconnected(id)
	m.roster.disconnected(id, m.now)
	m.failed = append(m.failed, m.roster.expire(m.now)...) // the grace may be 0
	m.ends.disconnected(id)
}

// adopted begins with a latest quorum that was formed elsewhere, or before the start.
func (m *Machine) adopted() {
	m.failed = m.failed[:0] // They are of the quorum before. The members of this one have heartbeat_timeout_ms to come.
	m.suspicion.forget()
	m.reconnect.forget()
	m.failback.away = false // all of this quorum have the time to come
	m.list.keep(m.past.votes)
	m.watch.next(false)
}

// finish forgets the past of a job whose training has ended on purpose, as every member of its latest quorum said: what begins
// here next is another training, which loses nothing. One member that only went away may come back, and its weights count. So may
// those of a quorum at another lighthouse of a list.
func (m *Machine) finish() {
	if m.past.latest == nil || m.list.listed() || slices.ContainsFunc(m.past.members, func(r *replica) bool { return !r.finished }) {
		return
	}
	m.drains.release()
	m.past.forget(m.list.seat)
	m.reconnect = reconnect{}
	m.suspicion.forget()
	m.watch.forget()
}

// reportFailures reports the members that failed and are in the latest quorum. Nobody is in a step with any other one.
func (m *Machine) reportFailures() {
	for _, d := range m.failed {
		if !d.replica.previous {
			continue
		}
		m.reconnect.memberFailed(d.replica.id)
		if d.replica.ending {
			d.cause, d.reason = ShutDown, "its manager server was shut down"
		}
		m.do(Failed{QuorumID: m.past.latest.ID, ReplicaID: d.replica.id, Cause: d.cause, Reason: d.reason})
	}
}

// reportUse reports whether there is somebody, and something to go on after, when either changes.
func (m *Machine) reportUse() {
	if is := (InUse{m.roster.counts.healthy > 0, m.past.latest != nil}); is != m.inUse {
		m.inUse = is
		m.do(is)
	}
}

// wake asks for an event at the end of the first suspect's grace.
func (m *Machine) wake() {
	if due := m.roster.due(); !due.Equal(m.wakeAt) {
		m.wakeAt = due
		if !due.IsZero() {
			m.do(Wake{At: due})
		}
	}
}
