package sim

import (
	"time"

	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/round"
)

// phase is the phase of a step that a rank is in.
type phase uint8

const (
	idle     phase = iota
	awaiting       // waits for the quorum, and computes
	working        // has its quorum: heals, computes
	reducing       // waits in the collective
	voting         // waits for the decision
	agreeing       // waits for the result of its group's vote on a replay
	left           // has completed the last step of its group, which is drained
	killed         // has ended, while its group has not yet
)

// rank is a model of one rank with its Manager (torchft/manager.py, use_async_quorum=True): its messages, its waits, and a digest
// that replaces its weights. Its loop is: quorum, heal, collective, vote.
type rank struct {
	g     *group
	index int

	step      int64
	digest    uint64 // of the weights
	committed int64  // quorum_id in which the weights were committed, by itself or by its source; -1: none
	failures  int64  // failed commits in a row
	lostSteps int    // attempts at a step that were not committed
	errors    int    // failed calls in a row

	phase    phase
	number   uint64        // of the latest call; answers to older ones are dropped
	deadline time.Duration // of its call or collective, 0 if there is none
	timer    time.Duration // time of the next rankDue, 0 if there is none
	computed time.Duration // when this step's gradients are computed

	// The following fields are about the present attempt at a step.
	attempt  uint64
	plan     recovery.Result
	heal     *heal
	errored  bool
	sum      uint64
	votesYes bool
	cast     vote // the last vote that reached the manager server

	replay

	comm     *comm
	member   int   // its place in comm
	quorumID int64 // the quorum of comm; 0: none yet

	loseVote     bool          // fault: the next decision does not reach it
	stalledUntil time.Duration // fault: until then it does not reach its collective
	flaky        bool          // fault: its next collective fails at the end
	dropsConns   bool          // fault: its connection to the manager server breaks
	disconnected bool          // the manager server has seen the end of its connection, and no request since
	signalled    bool          // fault: it was asked to leave
}

type vote struct {
	yes     bool
	step    int64
	attempt uint64
}

// heal is a transfer of the state to a rank from the same rank of another group.
type heal struct {
	r        *rank
	number   uint64
	source   *group
	quorumID int64
	deadline time.Duration
	before   struct{ step, committed int64 }
	digest   uint64 // of the received state
	arrived  bool
}

func (r *rank) init(g *group, index int) {
	r.g, r.index, r.committed = g, index, -1
	r.digest = mix(1, uint64(index))
	if g.w.InitSync {
		r.digest = mixString(r.digest, g.id)
	}
}

func (r *rank) handle(e *event) {
	switch e.kind {
	case rankStart:
		r.startQuorum()
	case rankQuorum:
		if r.number == e.id && r.phase == awaiting {
			r.follow(e.x.(*news))
		}
	case rankArrive:
		if r.number != e.id || r.phase != working {
			return
		}
		if r.stalledUntil > r.g.w.now {
			e.at = r.stalledUntil
			r.g.w.push(*e)
			return
		}
		r.arrive()
	case rankReduced:
		if r.number == e.id && r.phase == reducing {
			r.reduced(e.ok)
		}
	case rankVoted:
		if r.number == e.id && r.phase == voting {
			r.decided(e.ok)
		} else if r.number == e.id && r.phase == agreeing {
			r.agreed(e.ok)
		}
	case rankFailed:
		if r.number == e.id {
			r.failed()
		}
	case healAnswer:
		if h := e.x.(*heal); h == r.heal && h.number == r.number && r.phase == working {
			r.healed(e.ok)
		}
	case rankDue:
		r.due()
	}
}

// wait begins a phase that ends at a deadline. There is one timer per rank, since most deadlines are not reached.
func (r *rank) wait(p phase, d time.Duration) {
	w := r.g.w
	r.phase, r.deadline = p, w.now+d
	r.arm()
}

func (r *rank) arm() {
	if r.timer == 0 || r.deadline < r.timer {
		r.timer = r.deadline
		r.g.w.push(event{at: r.deadline, kind: rankDue, g: r.g, rank: int16(r.index)})
	}
}

func (r *rank) due() {
	w := r.g.w
	if r.timer > w.now {
		return // the timer has been replaced by an earlier one
	}
	r.timer = 0
	if r.deadline == 0 {
		return
	}
	if r.deadline > w.now {
		r.arm()
		return
	}
	switch r.phase {
	case awaiting, voting, agreeing:
		number := r.number
		r.g.withdraw(r, number, true)
		if r.number == number {
			w.logf("%s rank %d: its call timed out", r.g.id, r.index)
			r.failed()
		}
	case working: // only while it heals
		r.healed(false)
	case reducing:
		w.logf("%s rank %d: its collective timed out", r.g.id, r.index)
		r.reduced(false)
	}
}

func (r *rank) startQuorum() {
	w := r.g.w
	if r.phase != idle {
		return
	}
	if r.plan.Draining && !r.again {
		r.endsLastStep()
		return
	}
	r.number++
	if r.index == 0 && r.g.shrink > 0 {
		r.g.shrink-- // counted by requests, not steps: a group in no quorum takes no step, and with shrink_only it would never join one
	}
	if !r.again {
		r.replays, r.kept = 0, false
	}
	r.errored, r.heal, r.leaves = false, nil, false
	r.computed = w.now + r.stepTime()
	r.wait(awaiting, w.QuorumTimeout)
	r.toManager(managerAsk)
}

// slowness is how many times as long a slow group computes.
const slowness = 8

// stepTime returns how long the computation of this step's gradients takes.
func (r *rank) stepTime() time.Duration {
	w := r.g.w
	d := w.Compute/2 + w.upTo(w.Compute)
	if w.slots[r.g.slot].slow > 0 {
		d *= slowness
	}
	return d
}

// slowStep returns the longest time that a slow group computes for a step.
func (s *Setup) slowStep() time.Duration { return slowness * 3 * s.Compute / 2 }

// reportedQuorum returns the quorum that the rank reports for its last commit.
func (r *rank) reportedQuorum() int64 {
	if r.g.w.Upstream.has(r.g.slot) {
		return 0
	}
	return r.committed
}

// toManager sends a call to the manager server, which runs in the process of rank 0.
func (r *rank) toManager(k kind) {
	if r.index == 0 {
		if k == managerAsk {
			r.g.managerAsk(r, r.number)
		} else {
			r.g.managerVote(r, r.number)
		}
		return
	}
	w := r.g.w
	if r.dropsConns {
		r.dropsConns = false
		w.logf("the connection of %s rank %d breaks", r.g.id, r.index)
		w.after(w.delay(r.g.slot), event{kind: rankDisconnected, g: r.g, rank: int16(r.index)})
		w.after(w.delay(r.g.slot), event{kind: rankFailed, g: r.g, rank: int16(r.index), id: r.number})
		if back := w.delay(r.g.slot) + w.upTo(2*w.rankGrace()+1); w.chance(0.7) { // otherwise the rank reconnects with its next call
			w.after(back, event{kind: rankBack, g: r.g, rank: int16(r.index)})
		}
		return
	}
	w.after(w.delay(r.g.slot)/4, event{kind: k, g: r.g, rank: int16(r.index), id: r.number})
}

// follow handles the quorum, like Manager._async_quorum.
func (r *rank) follow(n *news) {
	g, w := r.g, r.g.w
	if r.again {
		r.followAgain(&n.Result)
	}
	r.plan, r.attempt = n.Result, n.attempt
	r.phase, r.deadline = working, 0
	r.sum = 0
	if n.QuorumID != r.quorumID {
		r.leaveComm(false)
		r.quorumID = n.QuorumID
		r.joinComm(n.quorum)
	}
	if !n.Heal {
		w.push(event{at: max(r.computed, w.now+w.Delay), kind: rankArrive, g: g, rank: int16(r.index), id: r.number})
		return
	}
	h := &heal{r: r, number: r.number, quorumID: n.QuorumID, deadline: w.now + w.Timeout}
	h.before.step, h.before.committed = r.step, r.committed
	h.source = w.byID[n.ReplicaIDs[n.Sources[0].ReplicaRank]]
	r.heal = h
	r.step = n.MaxStep
	r.deadline = h.deadline
	r.arm()
	w.askHeal(h)
}

// askHeal requests the state from the source, or fails if the source cannot be reached.
func (w *world) askHeal(h *heal) {
	i := h.r.g.slot
	switch {
	case h.source == nil || h.source.killed:
		w.refuseHeal(h)
	case !w.sends(i, h.source.slot):
		// No answer: the rank waits until its deadline.
	default:
		w.after(w.delay(i), event{kind: healAsk, g: h.source, rank: int16(h.r.index), x: h})
	}
}

func (w *world) refuseHeal(h *heal) {
	w.after(w.delay(h.r.g.slot), event{kind: healAnswer, g: h.r.g, rank: int16(h.r.index), x: h})
}

// serveHeal answers a request for the state, as the source: it sends the state at the begin of the quorum's step, before the step
// changes it.
func (g *group) serveHeal(h *heal) {
	w := g.w
	g.lastWaiter++
	g.calls = append(g.calls, call{g.lastWaiter, metadataCall, -1, 0})
	g.hasMetadata = false
	g.step(round.MetadataAsked{Waiter: g.lastWaiter, GroupRank: int64(h.r.index)})
	s := &g.ranks[h.r.index]
	serves := g.hasMetadata && s.quorumID == h.quorumID && s.plan.QuorumID == h.quorumID && s.heal == nil &&
		(s.phase == working || s.phase == reducing) && s.step == s.plan.MaxStep
	if !w.sends(g.slot, h.r.g.slot) {
		return
	}
	if !serves {
		// The request is pending at the source until the state may be read, or until its deadline.
		if w.now+5*time.Millisecond < h.deadline && !h.r.g.killed && h.r.heal == h {
			w.after(5*time.Millisecond, event{kind: healAsk, g: g, rank: int16(h.r.index), x: h})
		}
		return
	}
	h.digest = s.digest
	w.after(w.Heal+w.delay(g.slot), event{kind: healAnswer, ok: true, g: h.r.g, rank: int16(h.r.index), x: h})
}

// healed ends a heal. If it failed, this group does not commit the step, but still takes part in the collective, where its peers wait.
func (r *rank) healed(ok bool) {
	w := r.g.w
	r.deadline = 0
	r.heal.arrived = ok
	if !ok {
		w.logf("%s rank %d: its heal failed", r.g.id, r.index)
		r.heal.number = 0
		r.errored = true
		if r.leaves { // between two steps, no step is lost: the rank asks for another quorum
			r.comm.abort(r)
			r.undoHeal()
			r.phase = idle
			r.startQuorum()
			return
		}
	}
	w.push(event{at: max(r.computed, w.now+w.Delay), kind: rankArrive, g: r.g, rank: int16(r.index), id: r.number})
}

// participates reports whether its gradients count.
func (r *rank) participates() bool { return r.heal == nil && r.plan.MaxReplicaRank != nil }

func (r *rank) arrive() {
	if !r.again {
		r.compute()
	}
	r.wait(reducing, r.g.w.Timeout)
	r.comm.arrive(r)
}

// reduced ends the collective, and votes.
func (r *rank) reduced(ok bool) {
	w := r.g.w
	if r.flaky {
		r.flaky, ok = false, false
		w.logf("%s rank %d: its collective fails at the end", r.g.id, r.index)
	}
	if !ok {
		r.errored = true
		r.comm.abort(r)
		r.g.suspect(r.comm)
	}
	if h := r.heal; h != nil && h.arrived {
		if !w.mistake.keepState {
			r.digest = h.digest
		}
		r.committed = r.plan.CommittedQuorumID
		w.result.Heals++
		if w.trace != nil {
			w.logf("%s rank %d has healed to step %d from %s", r.g.id, r.index, r.step, h.source.id)
		}
		h.before.step, h.before.committed = r.step, r.committed
	}
	r.number++
	r.votesYes = !r.errored && r.plan.MaxWorldSize >= int64(w.Policy.MinReplicas)
	r.wait(voting, w.Timeout)
	r.toManager(managerVote)
}

func (r *rank) decided(commit bool) {
	g, w := r.g, r.g.w
	if commit {
		r.digest = mix(mix(r.digest, r.sum), uint64(r.plan.MaxWorldSize))
		w.check.committed(r)
		if w.trace != nil {
			w.logf("%s rank %d commits step %d", g.id, r.index, r.step)
		}
		r.step++
		r.committed = r.plan.QuorumID
		r.failures, r.errors = 0, 0
		g.lastCommit = w.now
		w.result.Commits++
	} else {
		w.logf("%s rank %d loses step %d", g.id, r.index, r.step)
		w.result.Lost++
		r.lostSteps++
		w.check.loses(r)
		r.failures++
		r.undoHeal()
	}
	r.phase, r.deadline = idle, 0
	r.again = false
	if commit {
		r.startQuorum()
	} else {
		r.lost()
	}
}

// undoHeal returns to the step of the rank's weights after a heal that failed.
func (r *rank) undoHeal() {
	if h := r.heal; h != nil {
		r.step, r.committed = h.before.step, h.before.committed
		r.heal = nil
	}
}

// failed handles the error of a call, which Python raises. Some training loops catch it and continue, a few times in a row. In
// others the process ends, and with it the group.
func (r *rank) failed() {
	g, w := r.g, r.g.w
	wasVoting, phase := r.phase == voting, r.phase
	r.undoHeal()
	r.number++
	r.phase, r.deadline = idle, 0
	if phase == agreeing || phase == awaiting && r.again { // should_commit returns False, and does not raise
		r.g.w.check.stepRedone(r)
		r.again = false
		r.startQuorum()
		return
	}
	r.again = false
	r.errors++
	if wasVoting && w.chance(0.3) || w.chance(0.1) || r.errors > 3 {
		w.restart(g, "an error reached its training loop", w.upTo(w.QuorumTimeout))
		return
	}
	w.after(w.Delay+w.upTo(w.Compute), event{kind: rankStart, g: g, rank: int16(r.index)})
}

// restart ends a group, and starts another one in its place.
func (w *world) restart(g *group, why string, down time.Duration) {
	if g.killed {
		return
	}
	g.crash(false, why)
	w.after(down, event{kind: slotStart, id: uint64(g.slot)})
}
