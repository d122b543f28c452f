package quorum

import (
	"math"
	"slices"
	"time"
)

// Machine decides which members form a quorum. It is a state machine for one goroutine: Step takes an event,
// and returns the actions that follow from it.
//
// It passes events to its parts, the fields below, each of which keeps its own invariants, and forms quorums
// (form.go). The state that the parts share is in core.
//
// The cost of a request does not depend on the number of groups; only the request that completes a quorum
// costs as much as the quorum has members. All waiters get the same *Quorum.
type Machine struct {
	core

	past       memory     // the latest quorum, the ids used, and the job's step
	reconnect  reconnect  // whether the next quorum needs a new id, even with the same members
	drains     drains     // members of the latest quorum that left it, and whose processes are still needed
	suspicion  suspicion  // reports of broken collectives
	watch      watch      // members that make no progress
	stragglers stragglers // members that are slower than the others
	standing   standing   // whether the members train on without requests
	speeds     speeds     // by which the members cut a batch
	poison     poison     // exceptions that end members
	seats      seats      // newcomers that are held back
	search     search     // for a quorum that a member knows, and this lighthouse does not

	wakeAt   time.Time    // of the latest Wake, zero if there is nothing to wake for
	reported [causes]bool // since the latest quorum: why there is no other one (QuorumAwaited)
}

// maxKnownID is the largest quorum id that a member may claim to know. From a larger one, new ids would soon
// overflow.
const maxKnownID = math.MaxInt64 / 2

// NewMachine returns the machine of a lighthouse that starts at the given time. The term is that of the
// leader of a cluster, and 0 for a lighthouse without one. The policy must be valid.
func NewMachine(policy Policy, start time.Time, term int64) *Machine {
	m := &Machine{core: newCore(policy, start, term)}
	shared, past := &m.core, &m.past
	m.past = memory{core: shared, floor: firstID(term, start.UnixMilli())}
	m.drains = drains{core: shared, past: past}
	m.suspicion = suspicion{core: shared, past: past}
	m.watch = watch{core: shared, past: past, reconnect: &m.reconnect}
	m.stragglers = stragglers{core: shared, past: past}
	m.standing = standing{core: shared, past: past, watch: &m.watch}
	m.speeds = speeds{core: shared, past: past, standing: &m.standing}
	m.seats = seats{core: shared}
	m.search = search{core: shared, past: past}
	m.poison = poison{core: shared}
	return m
}

// Step handles an event and returns the actions, in the order in which they are to be done.
func (m *Machine) Step(event Event, now time.Time) []Action {
	m.open(now)
	if slept, ok := event.(Slept); ok {
		// This comes before expire. Otherwise all members would count as failed, and a quorum would no longer
		// wait for members whose requests have arrived.
		m.pause(slept.For)
		m.standing.hears()
	}
	deaf := m.standing.deaf(event)
	m.failed = append(m.failed, m.roster.expire(m.now, deaf)...)
	decide := m.take(event)
	if m.seats.assign() {
		decide = true
		m.standing.reconsider()
	}
	// A failure may complete the quorum: the remaining healthy members may all have asked.
	decide = decide || len(m.failed) > 0
	m.reportFailures()
	m.standing.advance(m.search.pending(m.now))
	m.reportFailures() // a member that has left
	if decide {
		m.act()
		m.seats.assign() // a quorum that was formed may have left members out
	}
	m.wake()
	return m.actions
}

// take passes an event to the parts that handle it, and reports whether it may complete a quorum even if no
// member fails by it.
func (m *Machine) take(event Event) (decide bool) {
	switch e := event.(type) {
	case Asked:
		return m.asked(e)
	case Copied:
		m.past.copied(e) // No decision: the steps of the members that ask stay what they are.
	case Withdrawn: // No decision: a withdrawal cannot make a quorum possible.
		r := m.roster.members[e.ReplicaID]
		if r != nil && r.waiting() && r.request.waiter == e.Waiter { // otherwise it has been answered already
			m.roster.withdraw(r, m.now)
		}
	case Beat:
		// No decision here: if it makes a member with a request a candidate again, the next tick decides.
		// Heartbeats must stay cheap. Before the first quorum a call of any name counts: after a restart of
		// the lighthouse, the members of upstream groups show only so that they are in the middle of a step.
		// Later a name that never asks would count in the majority, and could keep the job from forming a
		// quorum.
		unknown := e.Call && !m.Knows(e.ReplicaID) && m.past.latest != nil
		r := m.roster.beat(e.ReplicaID, m.now)
		r.reached(e.Step)
		m.watch.occupied(r, e.Phase, e.For, m.now)
		if e.Pace.Own > 0 {
			r.pace = e.Pace
		}
		if unknown {
			m.roster.update(r, m.now, func() { r.out = OnlyBeats })
		}
	case Greeted:
		m.greeted(e)
	case Disconnected:
		m.disconnected(e.ReplicaID)
	case Incomplete:
		// Ignored if the group has a pending request: it asks only when all of its ranks have, so the report
		// is older than the request.
		if r := m.roster.members[e.ReplicaID]; r != nil && r.alive() && !r.waiting() {
			m.fail(r, RankFailed, e.Reason)
		}
	case Suspected:
		// A report alone evicts no member, a check has to fail first: otherwise one faulty member could evict
		// a healthy peer.
		m.suspicion.suspected(e)
	case Checked:
		m.suspicion.lookedAt(e)
	case Progressed:
		// The next tick evaluates all answers together: a member is stalled only if another one waits for it.
		m.watch.progressed(e)
	case Raised:
		m.poison.raised(e)
	case Limited: // Step lets standbys in
		m.policy.MaxReplicas = e.MaxReplicas
	case Drained:
		// No decision: the member is in the next quorum as before, since it leaves only after a step.
		m.drains.drained(e)
		m.standing.wants(e.ReplicaID + " is asked to leave")
	case Stopped:
		m.standing.stopped(e)
	case Parting:
		m.standing.parted(e)
	case Changes:
		m.standing.wants(e.ReplicaID + ": " + e.Reason)
	case Leaving:
		if r := m.roster.members[e.ReplicaID]; r != nil {
			m.standing.leaves(r, e.Step)
		}
		m.drains.leaving(e.ReplicaID)
		return true // the member counts as failed: the pending requests may be those of all healthy members
	case ShuttingDown:
		m.drains.shuttingDown(e)
		m.seats.completes(e)
		told := m.past.ends(e)
		if !m.finish() && told {
			m.past.keep()
		}
	case Recalled:
		if m.search.recalled(e) {
			m.adopted()
			if e.From != "" { // neither the disk nor the log of the cluster has it
				m.past.keep()
			}
		}
		m.redeliverPending()
		return true // a decision may have been waiting for this quorum (search.pending)
	case Slept, Woken:
		// Step has handled them: Woken comes when the grace of a suspect is over, and expire finds that.
	case Tick:
		// All conditions that depend on time alone are checked here, so they take effect at most one tick
		// late.
		m.search.tick()
		m.redeliverPending()
		m.standing.tick()
		m.watch.tick()
		m.stragglers.tick()
		m.speeds.tick()
		m.drains.tick()
		m.poison.tick()
		return true
	}
	return false
}

// asked accepts a request, refuses it, or redelivers the latest quorum. It reports whether it accepted the
// request.
func (m *Machine) asked(e Asked) bool {
	id := e.Member.ReplicaID
	if m.poison.refuses(e.Run) {
		m.refuse(e.Waiter, Poisoned, m.poison.verdict)
		return false
	}
	// A request that does not fit the job is refused before the roster counts it as a heartbeat: otherwise
	// the others would wait for a member that counts as healthy, and that no quorum may include.
	if reason := m.past.misfit(e); reason != "" {
		m.misfits(id, e.Waiter, reason)
		return false
	}
	if reason := m.search.doubt(e); reason != "" {
		m.refuse(e.Waiter, Unbelieved, reason)
		return false
	}
	if m.past.plausible(e.KnownQuorumID) {
		m.past.highest = max(m.past.highest, e.KnownQuorumID)
	}
	newest, replaces := m.newest(e)
	if !newest {
		return false
	}
	if r := m.roster.members[id]; replaces && r.previous {
		m.reconnect.moved(id)
	}
	if m.lostAnswer(e) {
		r := m.roster.beat(id, m.now)
		r.number, r.returned = max(r.number, e.Number), false
		m.do(Redeliver{e.Waiter, m.past.latest})
		m.standing.redelivered(r)
		return false
	}
	if m.drains.stayed(id) {
		m.reconnect.rejoined(id)
	}
	if m.standing.asked(m.roster.members[id], e) {
		r := m.roster.beat(id, m.now)
		r.number = max(r.number, e.Number)
		return false
	}
	m.accept(e)
	m.seats.assign()
	m.standing.joins(m.roster.members[id])
	m.past.outfit(e)
	if e.Member.Step >= max(m.past.step, m.past.copies.newest.Step) {
		m.past.behind = time.Time{} // this member has the job's step: the wait for such a member is over
	}
	if e.Recallable {
		// its greeting names the step
		m.search.claimed(m.roster.members[id], Claim{e.KnownQuorumID, math.MinInt64})
	}
	return true
}

// greeted handles the beginning of a stream. If it is refused, it is no sign of life: the others must not
// wait for a member that a later leader serves.
func (m *Machine) greeted(e Greeted) {
	if reason := m.deposed(e); reason != "" {
		m.do(RefuseStream{e.ReplicaID, reason})
		return
	}
	r := m.roster.beat(e.ReplicaID, m.now)
	r.returned, r.ending, r.finished = true, false, false
	m.do(Welcome{ReplicaID: r.id, Term: m.term, Draining: r.draining})
	m.standing.greeted(r, e, m.reconnect.failed)
	m.search.claimed(r, e.Known)
}

// disconnected makes a member a suspect. It counts as alive until its grace is over, so that a short
// interruption of the network costs no step.
func (m *Machine) disconnected(id string) {
	if r := m.roster.members[id]; r != nil {
		r.attends = false
	}
	m.drains.disconnected(id)
	deaf := m.standing.deaf(nil)
	if !deaf { // otherwise the lighthouse's own pings have found that it is cut off
		m.roster.disconnected(id, m.now)
	}
	m.failed = append(m.failed, m.roster.expire(m.now, deaf)...) // the grace may be 0
}

// adopted resets the state that belongs to the previous quorum, after a quorum that was formed before this
// lighthouse started became the latest.
func (m *Machine) adopted() {
	// failures of the previous quorum; the members of this one have heartbeat_timeout_ms to connect
	m.failed = m.failed[:0]
	m.suspicion.forget()
	m.reconnect.forget()
	m.standing.adopted()
	m.poison.adopted(m.past.latest.Skipped)
	m.watch.next(false)
}

// finish forgets the past of a job whose training is complete, as all members of the latest quorum have
// reported: the next group that asks begins another training, and must not be refused for being behind. The
// past is kept if a member has not reported that, since this member may come back with its weights. It
// reports whether the past is forgotten.
func (m *Machine) finish() bool {
	if m.past.latest == nil || slices.ContainsFunc(m.past.members,
		func(r *record) bool { return !r.finished }) {
		return false
	}
	m.drains.release()
	m.standing.ends()
	m.seats.end()
	m.past.forget()
	m.reconnect = reconnect{}
	m.suspicion.forget()
	m.watch.forget()
	m.poison.forget()
	return true
}

// reportFailures reports the failures of members of the latest quorum. Other members are in no step, so no
// peer waits for them.
func (m *Machine) reportFailures() {
	for _, d := range m.failed {
		if !d.member.previous {
			continue
		}
		m.reconnect.memberFailed(d.member.id)
		if d.member.ending {
			d.cause, d.reason = ShutDown, "its manager server was shut down"
		}
		m.do(Failed{QuorumID: m.past.latest.ID, ReplicaID: d.member.id, Step: d.member.step, Cause: d.cause,
			Reason: d.reason})
		m.standing.ends()
	}
	m.failed = m.failed[:0]
}

// wake asks for an event at the end of the first suspect's grace.
func (m *Machine) wake() {
	due := m.roster.due()
	if !due.IsZero() {
		due = m.clock(due)
	}
	if !due.Equal(m.wakeAt) {
		m.wakeAt = due
		if !due.IsZero() {
			m.do(Wake{At: due})
		}
	}
}
