package sim

import (
	"slices"
	"time"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/recovery"
)

// The rules, with the texts of docs/correctness.md.
const (
	ruleOneSet    = "one member set for each quorum_id"
	ruleIDs       = "ids never fall"
	ruleMajority  = "off the fast path no quorum without a majority of the healthy"
	ruleMembers   = "a quorum has exactly the members that wait, each once"
	ruleBroadcast = "a quorum reaches all members that wait for it"
	ruleHeal      = "a group that is behind heals to max_step, from a member of its quorum at that step"
	ruleEqual     = "groups that commit a step in one quorum hold equal states"
	ruleOwn       = "each contribution to an average has gradients of the contributor's own weights"
	ruleKept      = "a failure costs no step that a live group has computed"
	ruleOnce      = "no step is committed again by a replay"
	ruleDivisor   = "all contributors to an average divide by the same number"
	ruleVote      = "a group commits only what all its ranks voted for in the same attempt"
	ruleForms     = "enough connected members form a quorum within a bounded time"
	ruleEvicted   = "a group that was evicted commits nothing of that quorum"
	ruleCause     = "a group counts as failed for a true cause, never by the report of one other"
	ruleRelease   = "a group that left is kept until no other is in its last step"
	ruleLoses     = "a fault costs at most the documented number of steps"
	ruleProgress  = "a connected group commits within a bounded time"
	ruleNewcomer  = "a healthy newcomer that keeps asking is in a quorum within two rounds"
	ruleStale     = "a request that arrives after a newer one of its member is refused"
	ruleWaiters   = "every waiter is answered once, by its deadline"
	ruleBehind    = "a quorum behind the job waits for the members that were ahead"
	ruleUnshown   = "a group that claims a quorum and does not show it does not stop the others"
	ruleMemory    = "memory is bounded by live members"
	ruleDrained   = "a group that was asked to leave learns it with its next quorum, all ranks with the same one"
	ruleFinished  = "a training that begins after a completed one is no regression"
)

// seen is the checker's record of a group.
type seen struct {
	lastID   int64         // id of the latest quorum that it received
	maxStep  int64         // largest step in that quorum
	behind   bool          // it has to heal in that quorum
	commitID int64         // quorum in which it committed last, 0 if none
	evicted  int64         // the latest quorum in which it was notified that it counts as failed
	eviction eviction      // the latest eviction
	quiet    time.Duration // the longest time without a message since its last quorum
	wanted   bool          // it has received the request to leave
}

// eviction records when a lighthouse reported to the members that a group counts as failed (at), and by when a peer has notified
// the group if the network does not change (receivedBy; 0: the group may never be notified).
type eviction struct {
	quorumID       int64
	at, receivedBy time.Duration
}

// checker checks the rules that are about the whole job.
type checker struct {
	w       *world
	lastID  int64
	quorums map[int64][]string // the members of each
}

// ids checks that ids never decrease, and that each has one set of members.
func (c *checker) ids(q *quorum.Quorum) {
	if q.ID < c.lastID {
		c.w.broken(ruleIDs, "quorum %d comes after quorum %d", q.ID, c.lastID)
	}
	c.lastID = max(c.lastID, q.ID)
	members := make([]string, len(q.Members))
	for i := range q.Members {
		members[i] = q.Members[i].ReplicaID
	}
	if before, known := c.quorums[q.ID]; known && !slices.Equal(before, members) {
		c.w.broken(ruleOneSet, "quorum %d had %v, and now has %s", q.ID, before, describe(q))
	}
	c.quorums[q.ID] = members
}

// progress checks that groups keep committing while the network and the groups do not change. The conditions are that the groups
// are connected to each other and to the lighthouse, and that they are at least min_replicas and more than half of the healthy
// ones.
func (c *checker) progress(by *watch) {
	w := c.w
	bound := w.bound()
	if w.rough > 0 || w.now-w.changed <= bound {
		return
	}
	connected := 0
	for i := range w.slots {
		if !w.reached(i) {
			continue
		}
		connected++
		for j := range i {
			if w.reached(j) && !w.connected(i, j) {
				return
			}
		}
	}
	healthy := 0
	for _, g := range by.known {
		if by.healthy(g) {
			healthy++
		}
	}
	if connected < w.Policy.MinReplicas || 2*connected <= healthy {
		return
	}
	if w.now-by.lastTime > bound {
		w.broken(ruleForms, "%d groups are connected, and there has been no quorum for %s", connected, w.now-by.lastTime)
	}
	for i := range w.slots {
		if g := w.slots[i].g; w.reached(i) && w.now-max(g.began, g.lastCommit) > bound {
			w.broken(ruleProgress, "%s has not committed for %s", g.id, w.now-g.lastCommit)
		}
	}
}

// learned records that a group receives a quorum.
func (c *checker) learned(g *group, q *quorum.Quorum) {
	if q.ID < g.lastID {
		c.w.broken(ruleIDs, "%s receives quorum %d after quorum %d", g.id, q.ID, g.lastID)
	}
	g.lastID = q.ID
	g.maxStep = 0
	known, newest, own := true, int64(-1), -1
	for i := range q.Members {
		m := &q.Members[i]
		g.maxStep = max(g.maxStep, m.Step)
		known = known && m.CommittedQuorumID != 0
		if m.ReplicaID == g.id {
			own = i
		}
	}
	for i := range q.Members {
		if m := &q.Members[i]; m.Step == g.maxStep {
			newest = max(newest, m.CommittedQuorumID)
		}
	}
	m := &q.Members[own]
	g.behind = m.Step < g.maxStep || known && m.CommittedQuorumID != newest
}

// answered checks a rank's result of a quorum.
func (c *checker) answered(r *rank, a *recovery.Result) {
	g, w := r.g, c.w
	q := g.quorum
	switch {
	case a.QuorumID != q.ID:
		w.broken(ruleHeal, "%s rank %d receives quorum %d, the latest it asked for is %d", g.id, r.index, a.QuorumID, q.ID)
	case a.MaxStep != g.maxStep:
		w.broken(ruleHeal, "%s rank %d takes %d for max_step of quorum %d, it is %d", g.id, r.index, a.MaxStep, q.ID, g.maxStep)
	case g.behind && !a.Heal:
		w.broken(ruleHeal, "%s rank %d is behind in quorum %d and is not to heal", g.id, r.index, q.ID)
	case a.Heal && len(a.Sources) == 0:
		w.broken(ruleHeal, "%s rank %d shall heal in quorum %d, and has no source", g.id, r.index, q.ID)
	}
	c.drained(r, a)
	for _, s := range a.Sources {
		if s.ReplicaRank < 0 || s.ReplicaRank >= int64(len(q.Members)) {
			w.broken(ruleHeal, "%s rank %d shall heal from replica rank %d, quorum %d has %d", g.id, r.index, s.ReplicaRank, q.ID, len(q.Members))
			return
		}
		m := &q.Members[s.ReplicaRank]
		if m.Step != g.maxStep || m.Address != s.ManagerAddress || m.ReplicaID == g.id {
			w.broken(ruleHeal, "%s rank %d shall heal in quorum %d from %s, at step %d, max_step is %d",
				g.id, r.index, q.ID, m.ReplicaID, m.Step, g.maxStep)
		}
	}
}

// wants records a request of a rank, which may contain the request to leave.
func (c *checker) wants(r *rank) { r.g.wanted = r.g.wanted || r.signalled }

// drained checks that after a request to leave, by a rank or the lighthouse, all ranks of the group learn it with the next quorum:
// it is the quorum of their last step.
func (c *checker) drained(r *rank, a *recovery.Result) {
	if g := r.g; a.Draining != g.wanted {
		c.w.broken(ruleDrained, "%s rank %d learns with quorum %d whether it is its last: %t, and it was asked to leave: %t",
			g.id, r.index, a.QuorumID, a.Draining, g.wanted)
	}
}

// decided checks the decision of a vote.
func (c *checker) decided(r *rank, commit bool) {
	if !commit {
		return
	}
	switch g, w := r.g, c.w; {
	case g.evicted == r.plan.QuorumID:
		w.broken(ruleEvicted, "%s commits step %d of quorum %d, after it was notified that it counts as failed in it", g.id, r.step, r.plan.QuorumID)
	case g.eviction.quorumID == r.plan.QuorumID && g.eviction.receivedBy > 0 && w.now > g.eviction.receivedBy && w.changed <= g.eviction.at:
		w.broken(ruleEvicted, "%s commits step %d of quorum %d, in which it counts as failed since %s", g.id, r.step, r.plan.QuorumID, g.eviction.at)
	case g.quiet > w.Policy.HeartbeatTimeout && !w.calls(g.slot):
		w.broken(ruleEvicted, "%s commits step %d of quorum %d, and had sent no message for %s", g.id, r.step, r.plan.QuorumID, g.quiet)
	}
	for i := range r.g.ranks {
		if v := r.g.ranks[i].cast; !v.yes || v.step != r.step || v.attempt != r.attempt {
			c.w.broken(ruleVote, "%s commits step %d, rank %d voted %t on step %d in attempt %d, rank %d is in attempt %d",
				r.g.id, r.step, i, v.yes, v.step, v.attempt, r.index, r.attempt)
		}
	}
}

// contributes checks, before gradients are averaged, that all contributing ranks have the same weights.
func (c *checker) contributes(m *comm, r *rank) {
	h := m.head
	switch {
	case r.gradient != r.ownGradient():
		c.w.broken(ruleOwn, "%s rank %d contributes at step %d in quorum %d what is not its own gradient", r.g.id, r.index, r.step, m.key.quorumID)
	case r.step != r.plan.MaxStep:
		c.w.broken(ruleHeal, "%s rank %d trains step %d in quorum %d, whose max_step is %d", r.g.id, r.index, r.step, m.key.quorumID, r.plan.MaxStep)
	case h == nil:
	case h.plan.MaxWorldSize != r.plan.MaxWorldSize:
		c.w.broken(ruleDivisor, "in quorum %d at step %d, %s rank %d divides by %d, %s rank %d by %d",
			m.key.quorumID, r.step, h.g.id, h.index, h.plan.MaxWorldSize, r.g.id, r.index, r.plan.MaxWorldSize)
	case h.step != r.step || h.digest != r.digest:
		c.w.broken(ruleEqual, "in quorum %d, %s rank %d trains step %d with state %x, %s rank %d step %d with state %x",
			m.key.quorumID, h.g.id, h.index, h.step, h.digest>>48, r.g.id, r.index, r.step, r.digest>>48)
	}
}

// loses checks that a rank has lost no more steps than the faults so far may cost.
func (c *checker) loses(r *rank) {
	if w := c.w; w.CountLosses && r.lostSteps > w.mayLose {
		w.broken(ruleLoses, "%s rank %d has lost %d steps, %d at most are what the faults may cost", r.g.id, r.index, r.lostSteps, w.mayLose)
	}
}

// stepRedone counts a step that a rank computes again although it had kept the gradients. If all faults are failures of groups, that
// is allowed only after mostReplays replays of the step.
func (c *checker) stepRedone(r *rank) {
	if !r.kept {
		return
	}
	c.w.result.NotReplayed++
	if c.w.OnlyFailures && r.replays < mostReplays {
		c.w.broken(ruleKept, "%s rank %d computes step %d again, and had its gradients", r.g.id, r.index, r.step)
	}
}

// once checks that a step that is now committed by a replay was not committed by a live group in another quorum.
func (c *checker) once(r *rank) {
	for i := range c.w.slots {
		g := c.w.slots[i].g
		if g == nil || g == r.g {
			continue
		}
		o := &g.ranks[r.index]
		if o.heal == nil && (o.step > r.step+1 || o.step == r.step+1 && o.committed != r.plan.QuorumID) {
			c.w.broken(ruleOnce, "%s rank %d commits step %d in quorum %d, %s is at step %d of quorum %d",
				r.g.id, r.index, r.step, r.plan.QuorumID, g.id, o.step, o.committed)
		}
	}
}

// committed compares the states after a step. It keeps the last few steps of each quorum.
func (c *checker) committed(r *rank) {
	if c.w.OnlyFailures && r.again {
		c.once(r)
	}
	m := r.comm
	r.g.commitID = r.plan.QuorumID
	for i := range m.commits {
		o := &m.commits[i]
		if o.by == "" || o.step != r.step {
			continue
		}
		if o.digest != r.digest {
			c.w.broken(ruleEqual, "%s and %s rank %d commit step %d in quorum %d and hold the states %x and %x",
				o.by, r.g.id, r.index, r.step, r.plan.QuorumID, o.digest>>48, r.digest>>48)
		}
		return
	}
	m.commits[m.recent%len(m.commits)] = commit{r.step, r.digest, r.g.id}
	m.recent++
}
