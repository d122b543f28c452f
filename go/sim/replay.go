package sim

import "github.com/torchft/torchft/go/recovery"

// mostReplays bounds the replays of one step, as in torchft/_manager/replay.py.
const mostReplays = 5

// replay is the data that a rank keeps of a step, so that it can reduce the step's gradients again if a peer fails in that step:
// Manager(replay_failed_step=True).
type replay struct {
	batch    uint64 // number of computations so far; it is part of each gradient, so that no two gradients are equal
	gradient uint64
	kept     bool // the gradients may be reduced again
	replays  int  // of this step
	again    bool // the current attempt at the step is a replay
	leaves   bool // the quorum that was requested for a replay allows no replay, and is used for the next step
}

// replays reports whether the group of a slot announces that it replays failed steps.
func (w *world) replays(slot int) bool { return w.Replay && !w.Upstream.has(slot) }

// compute computes the gradients of a step from the rank's weights.
func (r *rank) compute() {
	r.batch++
	r.gradient = r.ownGradient()
	r.kept = r.g.w.replays(r.g.slot) && r.plan.Replay
}

func (r *rank) ownGradient() uint64 {
	return mix(mix(mix(r.digest, uint64(r.step)), uint64(r.g.slot)), r.batch)
}

// lost ends an attempt at a step that the group did not commit: its ranks vote on whether all can reduce it again.
func (r *rank) lost() {
	w := r.g.w
	if !w.replays(r.g.slot) {
		r.startQuorum()
		return
	}
	r.number++
	r.votesYes = r.kept && r.replays < mostReplays
	r.wait(agreeing, w.Timeout)
	r.toManager(managerVote)
}

// agreed handles the result of the vote on whether all ranks can reduce the step again.
func (r *rank) agreed(all bool) {
	r.phase, r.deadline = idle, 0
	if !all {
		r.g.w.check.stepRedone(r)
		r.startQuorum()
		return
	}
	r.replays++
	r.again = true
	r.g.w.result.Replays++
	r.startQuorum()
}

// followAgain handles a quorum that was requested for a replay. If that quorum allows no replay, the group uses it for the next step.
func (r *rank) followAgain(a *recovery.Result) {
	w := r.g.w
	if w.mistake.replayBehind && a.Heal {
		first := int64(0)
		a.Replay, a.Heal, a.MaxReplicaRank = true, false, &first
	}
	if a.Replay {
		if w.mistake.replaySums {
			r.gradient = r.sum
		}
		r.computed = w.now
		return
	}
	if !a.Heal {
		w.check.stepRedone(r)
	}
	r.again, r.leaves, r.replays = false, true, 0
	r.computed = w.now + r.stepTime()
}

// countJoin counts a group that starts while others replay a step.
func (w *world) countJoin() {
	for i := range w.slots {
		if g := w.slots[i].g; g != nil && g.ranks[0].again {
			w.result.replayJoins++
			return
		}
	}
}

func (w *world) living() (n int) {
	for i := range w.slots {
		if w.slots[i].g != nil {
			n++
		}
	}
	return n
}

// failInReplay kills a group with some probability in the phase of a replay that the setup names, unless it is the only one left.
func (w *world) failInReplay(g *group) {
	if w.ReplayFailure == idle || g.killed || w.living() < 2 || w.ending {
		return
	}
	r := &g.ranks[0]
	if r.phase == w.ReplayFailure && (r.again || r.phase == agreeing) && w.chance(0.2) {
		w.restart(g, "killed in a replay", w.upTo(w.Timeout))
	}
}
