package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/torchft/torchft/go/torchftpb"
)

// phase is the phase of a step that a rank is in.
type phase uint8

const (
	idle     phase = iota
	awaiting       // waits for the quorum
	working        // has its quorum: heals, computes
	reducing       // waits in the collective
	voting         // waits for the decision
	agreeing       // waits for the result of its group's vote on a replay
	left           // has completed the last step of its group, which is drained
	killed         // has ended
)

// mostReplays bounds the replays of one step, as in torchft/_manager/step/replay.py.
const mostReplays = 5

// model is a model of one rank with its Manager (torchft/manager.py, use_async_quorum=True): its messages,
// and a digest that replaces its weights. Its loop is: quorum, heal, collective, vote. The runner makes the
// calls and does the waiting (rank_test.go).
type model struct {
	j     *judge
	l     *life
	index int

	step      int64
	digest    uint64 // of the weights
	committed int64  // quorum_id in which the weights were committed, by itself or by its source; -1: none
	failures  int64  // failed commits in a row
	lost      int    // attempts at a step that were not committed
	errors    int    // failed calls in a row

	phase    phase
	arrived  time.Duration // when it arrived at its collective
	attempt  int           // the quorum of its group (life.attempt) in which the present attempt at a step is
	plan     *torchftpb.ManagerQuorumResponse
	heal     *heal
	errored  bool
	sum      uint64
	votesYes bool
	cast     vote // the last vote that it sent
	plane    *plane

	// With replay, the rank keeps its gradients of a step, and reduces them again if a peer fails in that
	// step. number of computations so far; it is part of each gradient, so that no two gradients are equal
	batch    uint64
	gradient uint64
	kept     bool // the gradients may be reduced again
	replays  int  // of this step
	again    bool // the current attempt at the step is a replay
	// the quorum that was requested for a replay allows no replay, and is used for the next step
	leaves bool
}

type vote struct {
	yes     bool
	step    int64
	attempt int
}

// heal is a transfer of the state to a rank from the same rank of another group.
type heal struct {
	digest uint64 // of the received state
	done   bool
	before struct{ step, committed int64 }
}

// planeKey identifies the process group of the ranks with one index: there is one for each quorum_id.
type planeKey struct {
	quorumID int64
	index    int
}

// plane is what ranks contribute and commit in a process group.
type plane struct {
	head    *model // the first contributor to the present collective; the others are compared with it
	commits [4]commit
	recent  int
}

// commit is the state of the first rank that committed a step here.
type commit struct {
	step   int64
	digest uint64
	by     string
}

func newModel(j *judge, l *life, index int) *model {
	r := &model{j: j, l: l, index: index, committed: -1, digest: mix(1, uint64(index))}
	if j.initSync {
		for _, c := range l.id {
			r.digest = mix(r.digest, uint64(c))
		}
	}
	return r
}

func (r *model) String() string { return fmt.Sprintf("%s rank %d", r.l.id, r.index) }

// ask returns the rank's request for a quorum.
func (r *model) ask() *torchftpb.ManagerQuorumRequest {
	if !r.again {
		r.replays, r.kept = 0, false
	}
	r.errored, r.heal, r.leaves, r.phase = false, nil, false, awaiting
	return &torchftpb.ManagerQuorumRequest{
		GroupRank: int64(r.index), Step: r.step, CommitFailures: r.failures, CommittedQuorumId: r.committed,
		InitSync:       r.j.initSync,
		GroupWorldSize: int64(r.j.ranks), ReplaysFailedSteps: r.j.replays(r.l.slot), CutsBySpeed: true,
	}
}

// follow handles the answer. It returns the replica_id of the source if the rank has to heal, and ""
// otherwise.
func (r *model) follow(a *torchftpb.ManagerQuorumResponse) (source string) {
	j := r.j
	if r.l.quorum == nil {
		j.broken(ruleHeal, "%s receives quorum %d, and its group of none", r, a.GetQuorumId())
		return ""
	}
	j.trainsOn(r.l, a)
	j.answered(r, a)
	if r.again {
		r.followAgain(a)
	}
	r.plan, r.attempt, r.phase, r.sum = a, r.l.attempt, working, 0
	key := planeKey{a.GetQuorumId(), r.index}
	if j.planes[key] == nil {
		j.planes[key] = &plane{}
	}
	r.plane = j.planes[key]
	if !a.GetHeal() || a.RecoverSrcReplicaRank == nil {
		return ""
	}
	r.heal = &heal{}
	r.heal.before.step, r.heal.before.committed = r.step, r.committed
	r.step = a.GetMaxStep()
	return a.GetReplicaIds()[a.GetRecoverSrcReplicaRank()]
}

// followAgain handles a quorum that was requested for a replay. If that quorum allows no replay, the group
// uses it for the next step.
func (r *model) followAgain(a *torchftpb.ManagerQuorumResponse) {
	if r.j.mistake == "a replay of a committed step" && a.GetHeal() {
		first := int64(0)
		a.Replay, a.Heal, a.MaxReplicaRank = true, false, &first
	}
	if a.GetReplay() {
		if r.j.mistake == "a replay reduces sums" {
			r.gradient = r.sum
		}
		return
	}
	if !a.GetHeal() {
		r.redone()
	}
	r.again, r.leaves, r.replays = false, true, 0
}

// serves returns the state that the rank sends to a healing rank in a quorum, if it can do so now: at the
// begin of the quorum's step, before the step changes it.
func (r *model) serves(quorumID int64) (digest uint64, ok bool) {
	ok = !r.l.killed && r.plan.GetQuorumId() == quorumID && r.heal == nil &&
		(r.phase == working || r.phase == reducing) && r.step == r.plan.GetMaxStep()
	return r.digest, ok
}

// healed ends a heal. If it failed, the group does not commit the step, but the rank still takes part in the
// collective, where its peers wait. It reports false if the rank asks for another quorum instead.
func (r *model) healed(digest uint64, ok bool) bool {
	r.heal.done, r.heal.digest = ok, digest
	if ok {
		return true
	}
	r.j.logf("%s: its heal failed", r)
	r.errored = true
	if r.leaves { // between two steps, no step is lost
		r.undoHeal()
		r.phase = idle
		return false
	}
	return true
}

func (r *model) ownGradient() uint64 {
	return mix(mix(mix(r.digest, uint64(r.step)), uint64(r.l.slot)), r.batch)
}

// computed ends the computation of the step's gradients, from the rank's weights.
func (r *model) computed() {
	if !r.again {
		r.batch++
		r.gradient = r.ownGradient()
		r.kept = r.j.replays(r.l.slot) && r.plan.GetReplay()
	}
}

// contribute returns the rank's contribution to the average: zero if it heals.
func (r *model) contribute() uint64 {
	r.phase, r.arrived = reducing, r.j.now
	if r.heal != nil || r.plan.MaxReplicaRank == nil {
		return 0
	}
	if h := r.plane.head; h != nil && h.l.killed { // it did not live to see the end of its collective
		r.plane.head = nil
	}
	r.j.contributes(r.plane, r)
	if r.plane.head == nil {
		r.plane.head = r
	}
	return r.gradient
}

// contributes checks, before gradients are averaged, that all contributing ranks have the same weights.
func (j *judge) contributes(p *plane, r *model) {
	h, id := p.head, r.plan.GetQuorumId()
	switch {
	case r.gradient != r.ownGradient():
		j.broken(ruleOwn, "%s contributes at step %d in quorum %d what is not its own gradient", r, r.step,
			id)
	case r.step != r.plan.GetMaxStep():
		j.broken(ruleHeal, "%s trains step %d in quorum %d, whose max_step is %d", r, r.step, id,
			r.plan.GetMaxStep())
	case h == nil:
	case h.plan.GetMaxWorldSize() != r.plan.GetMaxWorldSize():
		j.broken(ruleDivisor, "in quorum %d at step %d, %s divides by %d, %s by %d", id, r.step, h,
			h.plan.GetMaxWorldSize(), r, r.plan.GetMaxWorldSize())
	case !slices.Equal(h.plan.GetMaxSpeeds(), r.plan.GetMaxSpeeds()):
		j.broken(ruleDivisor, "in quorum %d at step %d, %s cuts the batch by %v, %s by %v", id, r.step, h,
			h.plan.GetMaxSpeeds(), r, r.plan.GetMaxSpeeds())
	case h.step != r.step || h.digest != r.digest:
		j.broken(ruleEqual, "in quorum %d, %s trains step %d with state %x, %s step %d with state %x", id, h,
			h.step, h.digest>>48, r, r.step, r.digest>>48)
	}
}

// timedOut reports that the rank's collective ended at its timeout. If a member failed long enough ago, its
// failure must have been reported before the timeout, under two conditions: all members received the quorum
// after the last change of the network, so that the lighthouse can reach them; and there was no later quorum,
// since failures are reported for the latest one only.
func (r *model) timedOut() {
	j := r.j
	notice := j.policy.HeartbeatTimeout + j.policy.SuspectGrace + 2*j.tick + slack
	var failed *life
	for _, id := range r.plan.GetReplicaIds() {
		l := j.byID[id]
		if l.learned <= j.moved || j.upstream.has(l.slot) {
			return
		}
		if l.killed && j.now-l.ended > notice {
			failed = l
		}
	}
	if failed != nil && j.rough == 0 && r.plan.GetQuorumId() == j.result.lastID {
		j.broken(ruleReported, "%s waits in quorum %d, whose member %s has failed for %s", r, r.plan.GetQuorumId(),
			failed.id, j.now-failed.ended)
	}
}

// reduced ends the collective, and returns the rank's vote.
func (r *model) reduced(sum uint64, ok bool) bool {
	if r.plane.head == r {
		r.plane.head = nil
	}
	r.sum = sum
	r.errored = r.errored || !ok
	if h := r.heal; h != nil && h.done {
		if r.j.mistake != "a healed group keeps its weights" {
			r.digest = h.digest
		}
		r.committed = r.plan.GetCommittedQuorumId()
		r.j.result.heals++
		r.j.logf("%s has healed to step %d", r, r.step)
		h.before.step, h.before.committed = r.step, r.committed
	}
	r.phase = voting
	r.votesYes = !r.errored && r.plan.GetMaxWorldSize() >= int64(r.j.policy.MinReplicas)
	r.cast = vote{yes: r.votesYes, step: r.step, attempt: r.attempt}
	if !r.votesYes {
		r.l.erred = r.j.now // the decision may be lost
	}
	return r.votesYes
}

// decided handles the decision of the vote. It reports whether the ranks have to agree on a replay.
func (r *model) decided(commit bool) (agree bool) {
	j, l := r.j, r.l
	r.phase = idle
	if !commit {
		j.disturbed("%s loses step %d", r, r.step)
		j.logf("%s loses step %d", r, r.step)
		if !j.over {
			j.result.lost++
			r.lost++
		}
		if j.countLosses && r.lost > j.mayLose {
			j.broken(ruleLoses, "%s has lost %d steps, %d at most are what the faults may cost", r, r.lost,
				j.mayLose)
		}
		r.failures++
		l.erred = j.now
		r.undoHeal()
		r.again = false
		if j.replays(l.slot) {
			r.phase, r.votesYes = agreeing, r.kept && r.replays < mostReplays
			return true
		}
		return false
	}
	for _, o := range l.ranks {
		if v := o.cast; !v.yes || v.step != r.step || v.attempt != r.attempt {
			j.broken(ruleVote,
				"%s commits step %d, %s voted %t on step %d in attempt %d, and this is attempt %d", r, r.step,
				o, v.yes, v.step, v.attempt, r.attempt)
		}
	}
	if r.index == 0 { // rank 0 receives the decision at once
		if l.in != r.plan.GetQuorumId() {
			l.in, l.steps = r.plan.GetQuorumId(), 0
		}
		l.steps++
	}
	r.digest = mix(mix(r.digest, r.sum), uint64(r.plan.GetMaxWorldSize()))
	j.commits(r)
	j.logf("%s commits step %d", r, r.step)
	r.step++
	r.committed, r.failures, r.errors, r.again = r.plan.GetQuorumId(), 0, 0, false
	l.lastCommit = j.now
	j.result.commits++
	return false
}

// commits compares the states after a step. It keeps the last few steps of each process group.
func (j *judge) commits(r *model) {
	if j.onlyFailures && r.again {
		j.once(r)
	}
	p := r.plane
	for _, o := range p.commits {
		if o.by == "" || o.step != r.step {
			continue
		}
		if o.digest != r.digest {
			j.broken(ruleEqual, "%s and %s commit step %d in quorum %d and hold the states %x and %x", o.by,
				r, r.step, r.plan.GetQuorumId(), o.digest>>48, r.digest>>48)
		}
		return
	}
	p.commits[p.recent%len(p.commits)] = commit{r.step, r.digest, r.l.id}
	p.recent++
}

// once checks that a step that is now committed by a replay was not committed by a live group in another
// quorum.
func (j *judge) once(r *model) {
	for i := range j.places {
		l := j.places[i].l
		if l == nil || l == r.l {
			continue
		}
		o := l.ranks[r.index]
		if o.heal == nil && (o.step > r.step+1 || o.step == r.step+1 && o.committed != r.plan.GetQuorumId()) {
			j.broken(ruleOnce, "%s commits step %d in quorum %d, %s is at step %d of quorum %d", r, r.step,
				r.plan.GetQuorumId(), l.id, o.step, o.committed)
		}
	}
}

// agreed handles the result of the vote on whether all ranks of the group can reduce the step again.
func (r *model) agreed(all bool) {
	r.phase = idle
	if !all {
		r.redone()
		return
	}
	r.replays++
	r.again = true
	r.j.result.replays++
}

// redone counts a step that a rank computes again although it had kept the gradients, as all ranks of its
// group. A rank that learns of a failure before it begins a step asks for a quorum instead, and the others,
// which have begun it, cannot reduce it again without this rank. If all faults are failures of groups, that
// is allowed only after mostReplays replays of the step.
func (r *model) redone() {
	if slices.ContainsFunc(r.l.ranks, func(o *model) bool { return !o.kept }) {
		return
	}
	r.j.result.notReplayed++
	if r.j.onlyFailures && r.replays < mostReplays {
		r.j.broken(ruleKept, "%s computes step %d again, and had its gradients", r, r.step)
	}
}

// failedCall ends a call with an error, the given time before its deadline. It reports whether the error
// reaches the training loop, and counts such errors in a row.
func (r *model) failedCall(err error, early time.Duration) (raised bool, errors int) {
	j := r.j
	if early > time.Second && len(r.l.ranks) == 1 && !j.upstream.has(r.l.slot) {
		j.broken(ruleEarly, "%s, %s before its deadline: %v", r, early, err)
	}
	if j.onlyClaims && !r.l.claimed && r.phase == awaiting {
		j.broken(ruleUnshown, "%s has no quorum: %v", r, err)
	}
	if !j.standsBy(r.l, len(j.last)) { // its request may take longer than its deadline
		j.disturbed("%s: %v", r, err)
	}
	j.logf("%s: %v", r, err)
	phase := r.phase
	r.l.erred = j.now
	r.undoHeal()
	r.phase = idle
	if phase == agreeing || phase == awaiting && r.again { // should_commit returns False, and does not raise
		r.redone()
		r.again = false
		return false, r.errors
	}
	r.again = false
	r.errors++
	return true, r.errors
}

// undoHeal returns to the step of the rank's weights after a heal that failed.
func (r *model) undoHeal() {
	if h := r.heal; h != nil {
		r.step, r.committed = h.before.step, h.before.committed
		r.heal = nil
	}
}
