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
	ruleBranch    = "only one branch of a job commits"
	ruleKnown     = "a quorum comes after all quorums that its members know"
	ruleTerm      = "a request counts only in the term in which it was made"
	ruleOneStart  = "a quorum without a predecessor has no member that knows an earlier one"
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
	waived  bool // an operator has waived votes
	quorums map[int64]*formed
}

// formed records a quorum: its predecessor and its members.
type formed struct {
	after     int64 // id of the predecessor, 0 if it has none
	members   []string
	committed string // the group that committed in it first, empty if none has
	last      int64  // if it has no predecessor: the latest quorum of its history in which a group committed
}

// ids checks that ids never decrease, and that each has one set of members.
func (c *checker) ids(by *watch, d quorum.Deliver) {
	w, q := c.w, d.Quorum
	last := c.lastID
	if w.Lighthouses > 1 {
		last = by.latest
	}
	if q.ID < last {
		w.broken(ruleIDs, "quorum %d comes after quorum %d", q.ID, last)
	}
	c.lastID = max(c.lastID, q.ID)
	f := c.quorums[q.ID]
	if f == nil {
		f = &formed{members: make([]string, len(q.Members))}
		for i := range q.Members {
			f.members[i] = q.Members[i].ReplicaID
		}
		if d.Before != nil {
			f.after = d.Before.ID
		} else {
			c.oneStart(q)
		}
		c.quorums[q.ID] = f
		return
	}
	same := len(q.Members) == len(f.members)
	for i := range q.Members {
		same = same && q.Members[i].ReplicaID == f.members[i]
	}
	if !same {
		w.broken(ruleOneSet, "quorum %d had %v, and now has %s", q.ID, f.members, describe(q))
	}
}

// oneBranch checks that of any two quorums in which groups commit, one is a successor of the other. That must hold for any members
// of the two quorums, and for any cuts between members and lighthouses. oneBranch is called when a group commits in a quorum for
// the first time.
//
// After a waiver, the steps of a branch without a live group do not count: the operator has stated that no group of that branch is
// alive, and in the simulation that is true.
//
// New members may begin a job a second time if no member can show them its quorums (docs/correctness.md, "Limits"). A quorum
// without a predecessor starts a separate history, and oneStart checks its members.
func (c *checker) oneBranch(g *group, id int64) {
	g.commitID = id
	f := c.quorums[id]
	if c.w.Lighthouses == 1 || f == nil || f.committed != "" {
		return
	}
	f.committed = g.id
	r := c.quorums[c.first(id)]
	last := r.last // the latest quorum of this history in which a group committed
	early, late := min(id, last), max(id, last)
	for late > early {
		late = c.quorums[late].after
	}
	if early != 0 && late != early && (!c.waived || !c.extinct(id)) {
		c.w.broken(ruleBranch, "%s commits in quorum %d %v, and %s has in quorum %d %v: neither comes after the other",
			g.id, id, f.members, c.quorums[last].committed, last, c.quorums[last].members)
	}
	if late != early {
		r.last = id
	} else {
		r.last = max(id, last)
	}
}

// first returns the first quorum in the history of a quorum: the one without a predecessor.
func (c *checker) first(id int64) int64 {
	for c.quorums[id].after != 0 {
		id = c.quorums[id].after
	}
	return id
}

// comesAfter reports whether a quorum is the same as another one, or its successor. Each quorum comes after "none" (0).
func (c *checker) comesAfter(late, early int64) bool {
	for late > early && c.quorums[late] != nil {
		late = c.quorums[late].after
	}
	return late == early || early == 0
}

// extinct reports whether all other branches of a quorum's history are extinct: each live group of this history that is no member
// of the quorum committed last in a predecessor of the quorum.
func (c *checker) extinct(id int64) bool {
	for i := range c.w.slots {
		g := c.w.slots[i].g
		if g == nil || g.commitID == 0 || g.commitID == id || slices.Contains(c.quorums[id].members, g.id) ||
			c.first(g.commitID) != c.first(id) {
			continue
		}
		after := id
		for after > g.commitID {
			after = c.quorums[after].after
		}
		if after != g.commitID {
			return false
		}
	}
	return true
}

// oneStart checks, with a list of lighthouses, that no member of a quorum without a predecessor knows an earlier quorum that it
// could report.
func (c *checker) oneStart(q *quorum.Quorum) {
	for i := range q.Members {
		if g := c.w.byID[q.Members[i].ReplicaID]; c.w.Lighthouses > 1 && g.lastID != 0 && !c.w.Upstream.has(g.slot) {
			c.w.broken(ruleOneStart, "quorum %d comes after none, and %s has received quorum %d", q.ID, g.id, g.lastID)
		}
	}
}

// progress checks that groups keep committing while the network and the groups do not change. The conditions are that the groups
// are connected to each other and to the lighthouse, and that they are at least min_replicas and more than half of the healthy
// ones. With a list of lighthouses, all groups have to be connected, since a lighthouse cannot know whether groups that cannot reach
// it train elsewhere; the lighthouse is then the first of the list that any group can reach.
func (c *checker) progress(by *watch) {
	w, lh := c.w, by.l.index
	bound := w.bound()
	if w.rough > 0 || w.now-w.changed <= bound || c.earlier(lh) {
		return
	}
	if w.Lighthouses > 1 && w.Upstream != 0 { // upstream groups can vote at the first lighthouse only, and the others may be at another one
		return
	}
	connected := 0
	for i := range w.slots {
		switch {
		case w.kept(i):
			continue
		case !w.reached(i, lh):
			if w.Lighthouses > 1 {
				return
			}
			continue
		}
		connected++
		for j := range i {
			if w.reached(j, lh) && !w.kept(j) && !w.connected(i, j) {
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
		if g := w.slots[i].g; w.reached(i, lh) && !w.kept(i) && w.now-max(g.began, g.lastCommit) > bound {
			w.broken(ruleProgress, "%s has not committed for %s", g.id, w.now-g.lastCommit)
		}
	}
}

// earlier reports whether a group can reach a lighthouse before this one in the list.
func (c *checker) earlier(than int) bool {
	w := c.w
	for lh := range than {
		for i := range w.slots {
			if w.lhs[lh].up && w.reached(i, lh) && !w.kept(i) {
				return true
			}
		}
	}
	return false
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
	if r.g.commitID != r.plan.QuorumID {
		c.oneBranch(r.g, r.plan.QuorumID)
	}
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
