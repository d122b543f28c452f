package sim

import (
	"fmt"
	"time"

	"github.com/torchft/torchft/go/recovery"
)

// Model is the model of one rank with its Manager, for a Judge: its messages, and the changes of its weights. The runner of the
// servers makes the calls and does the waiting.
type Model struct {
	j *Judge
	l *life
	r *rank
}

// Model returns the model of a rank of a group.
func (j *Judge) Model(id string, index int) *Model {
	l := j.life(id)
	return &Model{j, l, &l.ranks[index]}
}

func (m *Model) String() string { return fmt.Sprintf("%s rank %d", m.l.id, m.r.index) }

// Ask returns the rank's request for a quorum.
func (m *Model) Ask() (step, failures, committedQuorumID int64) {
	r := m.r
	r.errored, r.heal, r.phase = false, nil, awaiting
	return r.step, r.failures, r.committed
}

// Follow handles the answer. It returns the replica_id of the source if the rank has to heal, and "" otherwise.
func (m *Model) Follow(a *recovery.Result) (source string) {
	w, r := m.j.w, m.r
	if m.l.quorum == nil {
		w.broken(ruleHeal, "%s receives quorum %d, and its group of none", m, a.QuorumID)
		return ""
	}
	w.check.answered(r, a)
	r.plan, r.attempt, r.phase, r.sum = *a, m.l.attempt, working, 0
	r.quorumID = a.QuorumID
	key := commKey{a.QuorumID, r.index}
	if w.comms[key] == nil {
		w.comms[key] = &comm{key: key}
	}
	r.comm = w.comms[key]
	if !a.Heal || len(a.Sources) == 0 {
		return ""
	}
	h := &heal{r: r, quorumID: a.QuorumID}
	h.before.step, h.before.committed = r.step, r.committed
	r.heal = h
	r.step = a.MaxStep
	return a.ReplicaIDs[a.Sources[0].ReplicaRank]
}

// Serves returns the state that the rank sends to a healing rank in a quorum, if it can do so now.
func (m *Model) Serves(quorumID int64) (digest uint64, ok bool) {
	r := m.r
	ok = !m.l.killed && r.quorumID == quorumID && r.heal == nil && (r.phase == working || r.phase == reducing) && r.step == r.plan.MaxStep
	return r.digest, ok
}

// Healed ends a heal. If it failed, the group does not commit the step.
func (m *Model) Healed(digest uint64, ok bool) {
	m.r.heal.arrived, m.r.heal.digest = ok, digest
	if !ok {
		m.j.Logf("%s: its heal failed", m)
		m.r.errored = true
	}
}

// Contribute returns the rank's contribution to the average: zero if it heals.
func (m *Model) Contribute() uint64 {
	r, c := m.r, m.r.comm
	r.compute()
	r.phase = reducing
	if !r.participates() {
		return 0
	}
	m.j.w.check.contributes(c, r)
	if c.head == nil {
		c.head = r
	}
	return r.gradient
}

// Heals reports whether the rank takes over another group's state in this step.
func (m *Model) Heals() bool { return m.r.heal != nil }

// Step returns the step that the rank is in.
func (m *Model) Step() int64 { return m.r.step }

// Errored reports whether the attempt at the step has failed already.
func (m *Model) Errored() bool { return m.r.errored }

// TimedOut reports that the rank's collective ended at its timeout. If a member failed long enough ago, its failure must have been
// reported before the timeout, under two conditions: all members received the quorum after the last change of the network, so that
// the lighthouse can reach them; and there was no later quorum, since failures are reported for the latest one only.
func (m *Model) TimedOut() {
	w, j := m.j.w, m.j
	notice := w.Policy.HeartbeatTimeout + w.Policy.SuspectGrace + 2*w.QuorumTick + failureSlack
	var killed *life
	for _, id := range m.r.plan.ReplicaIDs {
		l := j.life(id)
		if l.learned <= j.moved {
			return
		}
		if l.killed && w.now-l.ended > notice {
			killed = l
		}
	}
	if killed != nil && w.rough == 0 && m.r.plan.QuorumID == w.result.LastID {
		w.broken(ruleReported, "%s waits in quorum %d, whose member %s has failed for %s", m, m.r.plan.QuorumID, killed.id, w.now-killed.ended)
	}
}

// Reduced ends the collective, and returns the rank's vote.
func (m *Model) Reduced(sum uint64, ok bool) bool {
	r, w := m.r, m.j.w
	if r.comm.head == r {
		r.comm.head = nil
	}
	r.sum = sum
	if !ok {
		r.errored = true
	}
	if h := r.heal; h != nil && h.arrived {
		r.digest, r.committed = h.digest, r.plan.CommittedQuorumID
		w.result.Heals++
		w.logf("%s has healed to step %d", m, r.step)
		h.before.step, h.before.committed = r.step, r.committed
	}
	r.phase = voting
	r.votesYes = !r.errored && r.plan.MaxWorldSize >= int64(w.Policy.MinReplicas)
	r.cast = vote{yes: r.votesYes, step: r.step, attempt: r.attempt}
	return r.votesYes
}

// Decided handles the decision of the vote.
func (m *Model) Decided(commit bool) {
	r, w := m.r, m.j.w
	w.check.decided(r, commit)
	r.phase = idle
	if !commit {
		m.j.disturbed("%s loses step %d", m, r.step)
		w.logf("%s loses step %d", m, r.step)
		w.result.Lost++
		r.failures++
		r.undoHeal()
		return
	}
	if r.index == 0 { // rank 0 receives the decision at once
		if m.l.evicted == r.plan.QuorumID && w.now > m.l.evictedAt {
			w.broken(ruleEvicted, "%s commits step %d of quorum %d, after it was notified that it counts as failed in it", m, r.step, m.l.evicted)
		}
		if m.l.in != r.plan.QuorumID {
			m.l.in, m.l.steps = r.plan.QuorumID, 0
		}
		m.l.steps++
	}
	r.digest = mix(mix(r.digest, r.sum), uint64(r.plan.MaxWorldSize))
	w.check.committed(r)
	w.logf("%s commits step %d", m, r.step)
	r.step++
	r.committed, r.failures, r.errors = r.plan.QuorumID, 0, 0
	m.l.lastCommit = w.now
	w.result.Commits++
}

// Failed ends a call with an error, the given time before its deadline, and counts such calls in a row.
func (m *Model) Failed(err error, early time.Duration) (errors int) {
	r := m.r
	if early > time.Second && len(m.l.ranks) == 1 {
		m.j.w.broken(ruleEarly, "%s, %s before its deadline: %v", m, early, err)
	}
	m.j.disturbed("%s: %v", m, err)
	m.j.Logf("%s: %v", m, err)
	r.undoHeal()
	r.phase = idle
	r.errors++
	return r.errors
}
