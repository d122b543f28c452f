package quorum

import (
	"math"
	"slices"
	"time"
)

// Machine decides which members form a quorum. It is a state machine for one goroutine: Step takes an event, and returns the actions
// that follow from it.
//
// It passes events to its parts, the fields below, each of which keeps its own invariants, and forms quorums (form.go). The state
// that the parts share is in core.
//
// The cost of a request does not depend on the number of groups; only the request that completes a quorum costs as much as the quorum
// has members. All waiters get the same *Quorum.
type Machine struct {
	core

	past      memory    // the latest quorum, the ids used, and the job's step
	reconnect reconnect // whether the next quorum needs a new id, even with the same members
	drains    drains    // members of the latest quorum that left it, and whose processes are still needed
	suspicion suspicion // reports of broken collectives
	watch     watch     // members that make no progress
	search    search    // for a quorum that a member knows, and this lighthouse does not

	// For a lighthouse of a list:
	list     succession // the rule by which only one of them serves the job
	terms    terms      // the terms of this lighthouse and of the others
	ends     ends       // ends of members, which may be votes
	votes    votes      // decides whether this lighthouse may continue after the latest quorum
	failback failback   // to an earlier lighthouse

	lastTick time.Time
	wakeAt   time.Time // of the latest Wake, zero if there is nothing to wake for
	reported cause     // of the last Waiting since the latest quorum
	inUse    InUse     // as last reported
}

// maxKnownID is the largest quorum id that a member may claim to know. From a larger one, new ids would soon overflow.
const maxKnownID = math.MaxInt64 / 2

// NewMachine returns the machine of a lighthouse that starts at the given time. The policy must be valid.
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

// Step handles an event and returns the actions, in the order in which they are to be done.
func (m *Machine) Step(event Event, now time.Time) []Action {
	m.open(now)
	if slept, ok := event.(Slept); ok {
		// This comes before expire: the messages of that time have not been handled yet. Otherwise all members would count as failed,
		// and a quorum would no longer wait for members whose requests have arrived.
		m.roster.forgive(slept.For)
		m.watch.forgive(slept.For)
		m.past.forgive(slept.For)
		m.search.forgive(slept.For)
		m.votes.forgive(slept.For)
		m.lastTick = m.lastTick.Add(slept.For)
		// All bonds are released: the time is only an estimate, so any bond may have run out, and its member may have asked another
		// lighthouse.
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
		// Failback comes after the decision: members that have just received a quorum have no pending request any more, and show
		// that quorum to the other lighthouse.
		if !m.drains.any() && !m.search.pending(m.now) {
			m.failback.tick()
		}
		m.lastTick = m.now
	}
	m.reportUse()
	m.wake()
	return m.actions
}

// take passes an event to the parts that handle it, and reports whether it may complete a quorum even if no member fails by it.
func (m *Machine) take(event Event) (decide bool) {
	switch e := event.(type) {
	case Asked:
		return m.asked(e)
	case Withdrawn: // No decision: a withdrawal cannot make a quorum possible.
		m.roster.withdraw(e.Waiter, m.now)
	case Beat: // No decision here: if it makes a member with a request a candidate again, the next tick decides. Heartbeats must stay cheap.
		// Before the first quorum a call of any name counts: after a restart of the lighthouse, the members of upstream groups show only
		// so that they are in the middle of a step. Later a name that never asks would count in the majority, and could keep the job
		// from forming a quorum.
		unknown := e.Call && !m.Knows(e.ReplicaID) && m.past.latest != nil
		r := m.roster.beat(e.ReplicaID, m.now)
		if unknown {
			m.roster.update(r, m.now, func() { r.out = OnlyBeats })
		}
	case Greeted:
		m.greeted(e)
		return true // a new term ends requests: the remaining ones may complete a quorum
	case Disconnected:
		m.disconnected(e.ReplicaID)
	case Incomplete: // Ignored if the group has a pending request: it asks only when all of its ranks have, so the report is older than the request.
		if r := m.roster.members[e.ReplicaID]; r != nil && r.alive() && !r.waiting() {
			m.fail(r, RankFailed, e.Reason)
		}
	case Suspected: // A report alone evicts no member, a check has to fail first: otherwise one faulty member could evict a healthy peer.
		m.suspicion.suspected(e)
	case Checked:
		m.suspicion.lookedAt(e)
	case Progressed: // The next tick evaluates all answers together: a member is stalled only if another one waits for it.
		m.watch.progressed(e)
	case Drained: // No decision: the member is in the next quorum as before, since it leaves only after a step.
		m.drains.drained(e)
	case Leaving:
		if m.drains.leaving(e.ReplicaID) {
			m.ends.left(e.ReplicaID)
		}
		return true // the member counts as failed: the pending requests may be those of all healthy members
	case ShuttingDown:
		m.drains.shuttingDown(e)
		m.ends.left(e.ReplicaID)
		m.finish()
	case Recalled:
		if m.search.recalled(e) {
			m.adopted()
		}
		return true // a decision may have been waiting for this quorum (search.pending)
	case Ended:
		m.ends.ended(e.ReplicaID)
		return true // even if no member fails: the end of a bound member is a vote, which may have been missing
	case VotesWaived:
		return m.ends.votesWaived(e)
	case Bound: // No decision: a bond is a vote only once its member has ended.
		m.list.answered(e.ReplicaID, e.Since)
	case Reaches: // No failback here: Step does that after the decision of a tick, so that a quorum which is due is delivered first.
		m.failback.reaches(e.ReplicaID, e.Places)
	case Slept, Woken: // Step has handled them: Woken comes when the grace of a suspect is over, and expire finds that.
	case Tick: // All conditions that depend on time alone are checked here, so they take effect at most one tick late.
		m.search.tick()
		m.ends.tick()
		m.watch.tick()
		m.list.sweep(m.now, func(id string) bool { return m.roster.members[id] != nil })
		m.drains.tick()
		return true
	}
	return false
}

// asked accepts a request, refuses it, or redelivers the latest quorum. It reports whether it accepted the request.
func (m *Machine) asked(e Asked) bool {
	id := e.Member.ReplicaID
	// An unfit request is refused before the roster counts it as a heartbeat: otherwise the others would wait for a member that
	// counts as healthy, and that no quorum may include.
	if why, reason := m.unfit(e); reason != "" {
		m.refuse(e.Waiter, why, reason)
		if why == Unshown { // the member gets another chance to show its quorum, and is accepted after that
			m.do(Recall{id, e.KnownQuorumID})
		}
		if why == Misfit {
			m.do(Refused{id, reason})
		}
		m.failRefused(id, why, reason)
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
	if r := m.roster.members[id]; replaces && r.previous {
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
	m.past.outfit(e)
	m.failback.reaches(id, e.Reaches)
	m.list.back(id) // the member has not ended: its request is its vote
	if e.Member.Step >= m.past.step {
		m.past.behind = time.Time{} // this member has the job's step: the wait for such a member is over
	}
	if e.Recallable {
		m.search.claimed(m.roster.members[id], e.KnownQuorumID)
	}
	if m.policy.ForbidRegression && m.past.least && e.Recallable && m.roster.members[id].previous && e.KnownQuorumID == m.past.latestID() {
		m.do(Recall{id, e.KnownQuorumID}) // it knows how far the quorum has come (mayRegress)
	}
	return true
}

// unfit returns the reason why no quorum here may include a member; empty if it may.
func (m *Machine) unfit(e Asked) (why Refusal, reason string) {
	if reason := m.list.streamless(e); reason != "" {
		return Streamless, reason
	}
	if reason := m.search.unshown(e); reason != "" {
		return Unshown, reason
	}
	return Misfit, m.past.misfit(e)
}

// greeted handles the beginning of a stream.
func (m *Machine) greeted(e Greeted) {
	r := m.terms.admit(e)
	if r == nil {
		// The greeting was refused, or there is no list. The term and the quorum of a refused greeting are ignored: they could end the
		// requests of the others. Without a list there are no terms and no failback, and the member can be asked for its quorum later, at
		// its request: no other lighthouse can form one meanwhile.
		return
	}
	m.failback.cameBack(e.KnownQuorumID)
	m.terms.greeted(r, e)
	m.search.claimed(r, e.KnownQuorumID)
}

// disconnected makes a member a suspect. It counts as alive until its grace is over, so that a short interruption of the network costs
// no step. Its host is still asked at once: the end of its process is a vote only while its bond holds (bondHolds).
func (m *Machine) disconnected(id string) {
	m.drains.disconnected(id)
	m.roster.disconnected(id, m.now)
	m.failed = append(m.failed, m.roster.expire(m.now)...) // the grace may be 0
	m.ends.disconnected(id)
}

// adopted resets the state that belongs to the previous quorum, after a quorum that was formed elsewhere, or before this lighthouse
// started, became the latest.
func (m *Machine) adopted() {
	m.failed = m.failed[:0] // failures of the previous quorum; the members of this one have heartbeat_timeout_ms to connect
	m.suspicion.forget()
	m.reconnect.forget()
	m.failback.away = false // all members of this quorum are presumed alive
	m.list.keep(m.past.votes)
	m.watch.next(false)
}

// finish forgets the past of a job whose training is complete, as all members of the latest quorum have reported: the next group
// that asks begins another training, and must not be refused for being behind. The past is kept if a member has not reported that,
// since this member may come back with its weights, or if there is a list, since the job may continue at another lighthouse.
func (m *Machine) finish() {
	if m.past.latest == nil || m.list.listed() || slices.ContainsFunc(m.past.members, func(r *record) bool { return !r.finished }) {
		return
	}
	m.drains.release()
	m.past.forget(m.list.seat)
	m.reconnect = reconnect{}
	m.suspicion.forget()
	m.watch.forget()
}

// reportFailures reports the failures of members of the latest quorum. Other members are in no step, so no peer waits for them.
func (m *Machine) reportFailures() {
	for _, d := range m.failed {
		if !d.member.previous {
			continue
		}
		m.reconnect.memberFailed(d.member.id)
		if d.member.ending {
			d.cause, d.reason = ShutDown, "its manager server was shut down"
		}
		m.do(Failed{QuorumID: m.past.latest.ID, ReplicaID: d.member.id, Cause: d.cause, Reason: d.reason})
	}
}

// reportUse reports InUse when it has changed.
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
