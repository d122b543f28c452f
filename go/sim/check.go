package sim

import (
	"slices"
	"strings"
	"time"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/recovery"
)

// The rules, in the words of docs/correctness.md.
const (
	ruleOneSet    = "one member set for each quorum_id"
	ruleIDs       = "ids never fall"
	ruleMajority  = "off the fast path no quorum without a majority of the healthy"
	ruleMembers   = "a quorum has exactly those who wait, each once"
	ruleBroadcast = "a quorum reaches everybody who waits for it"
	ruleHeal      = "a group that is behind heals to max_step, from a member of its quorum that is there"
	ruleEqual     = "groups that commit a step in one quorum hold equal states"
	ruleOwn       = "who contributes to an average gives its own gradients, of the weights it has"
	ruleKept      = "a death costs no step that a live group has computed"
	ruleOnce      = "no step is committed again by a replay"
	ruleDivisor   = "all who contribute to an average divide by the same number"
	ruleVote      = "a group commits only what all its ranks voted for in the same attempt"
	ruleForms     = "enough connected members form a quorum within a bounded time"
	ruleProgress  = "a connected group commits within a bounded time"
	ruleNewcomer  = "a healthy newcomer that keeps asking is in within two rounds"
	ruleStale     = "a request that newer ones of its member overtook is refused"
	ruleWaiters   = "every waiter is answered once, by its deadline"
	ruleBehind    = "a quorum behind the job waits for those who were ahead"
	ruleMemory    = "memory is bounded by live members"
)

// seen is what the checker knows of a group: what the lighthouse was told of it, counted in the obvious way.
type seen struct {
	number   uint64 // of its newest request
	listed   bool
	lastBeat time.Duration
	beaten   bool
	waits    int           // requests that wait at the lighthouse
	joined   time.Duration // since when it is a candidate
	previous bool          // member of the latest quorum
	missed   int           // quorums that should have had it and had not
	shrinks  bool          // its newest request asks shrink_only
	asksStep int64         // the step of its newest request
	expected bool

	lastID  int64 // of the quorums that it heard of
	maxStep int64 // of the latest of those
	behind  bool  // whether it has to heal in it
}

// checker looks at what goes into the machines and at what comes out, and knows nothing else of them.
type checker struct {
	w     *world
	clock time.Duration // of the lighthouse's machine: never goes back
	known []*group      // that the lighthouse may remember, ordered by replica_id

	lastID   int64
	members  []string // of lastID
	lastTime time.Duration

	reached int64         // largest step of the latest quorum of this lighthouse
	behind  time.Duration // since when a quorum is due that would go on below it, 0 if none is
}

func (c *checker) lighthouseStarts() {
	for _, g := range c.known {
		g.listed, g.beaten, g.waits, g.previous, g.missed = false, false, 0, false, 0
	}
	c.known = c.known[:0]
	c.clock, c.reached, c.behind = c.w.lh.clock(), 0, 0
}

func (c *checker) healthy(g *group) bool {
	return g.beaten && c.clock-g.lastBeat < c.w.Policy.HeartbeatTimeout
}

func (c *checker) candidate(g *group) bool { return g.waits > 0 && c.healthy(g) }

func (c *checker) move() { c.clock = max(c.clock, c.w.lh.clock()) }

func (c *checker) beat(g *group) {
	c.move()
	was := c.candidate(g)
	g.beaten, g.lastBeat = true, c.clock
	if !g.listed {
		g.listed = true
		at, _ := slices.BinarySearchFunc(c.known, g, func(a, b *group) int { return strings.Compare(a.id, b.id) })
		c.known = slices.Insert(c.known, at, g)
	}
	if !was && g.waits > 0 {
		g.joined = c.clock
	}
}

func (c *checker) asked(g *group) {
	c.beat(g)
	if g.waits++; g.waits == 1 {
		g.joined = c.clock
	}
}

// newest reports whether a request is newer than all that the lighthouse has of this group, and notes it.
func (c *checker) newest(g *group, number uint64) bool {
	c.move()
	if g.listed && (c.healthy(g) || g.waits > 0 || g.previous) && number <= g.number {
		return false
	}
	g.number = number
	return true
}

func (c *checker) gaveUp(g *group) {
	c.move()
	g.waits--
}

// tally is who is healthy, who is a candidate, and whether there has to be a quorum.
type tally struct {
	healthy, candidates, eligible int
	shrink, fast                  bool
	waited                        time.Duration
}

func (c *checker) tally() tally {
	t := tally{fast: true}
	previous := 0
	for i := range c.w.lh.waiting {
		q := &c.w.lh.waiting[i]
		q.g.shrinks, q.g.asksStep = q.shrink, q.step // the newest is the last
	}
	for _, g := range c.known {
		candidate := false
		if c.healthy(g) {
			t.healthy++
			if candidate = g.waits > 0; candidate {
				t.candidates++
				t.waited = max(t.waited, c.clock-g.joined)
				t.shrink = t.shrink || g.shrinks
			}
		}
		if g.previous {
			previous++
			t.fast = t.fast && candidate
		}
		g.expected = candidate
	}
	t.fast = t.fast && previous > 0
	t.shrink = t.shrink && previous > 0
	for _, g := range c.known {
		g.expected = g.expected && (g.previous || !t.shrink)
		if g.expected {
			t.eligible++
		}
	}
	return t
}

// mayWait reports that a quorum that is due would go on below the step that the job had reached, while somebody lives who
// was there, and has not waited for heartbeat_timeout_ms.
func (c *checker) mayWait(t tally) bool {
	step, lives := int64(-1), false
	for _, g := range c.known {
		if g.expected {
			step = max(step, g.asksStep)
		}
		lives = lives || g.previous && c.healthy(g) && !c.candidate(g)
	}
	if t.fast || step >= c.reached || !lives {
		c.behind = 0
		return false
	}
	if c.behind == 0 {
		c.behind = c.clock
	}
	return c.clock-c.behind <= c.w.Policy.HeartbeatTimeout
}

// due reports that there has to be a quorum: docs/design.md, the lighthouse's machine.
func (c *checker) due(t tally) bool {
	p := c.w.Policy
	return t.candidates > 0 && (t.fast || t.eligible >= p.MinReplicas && 2*t.candidates > t.healthy &&
		(t.candidates == t.healthy || t.waited >= p.JoinTimeout))
}

// delivered checks a quorum before anybody hears of it.
func (c *checker) delivered(d quorum.Deliver) {
	w, q := c.w, d.Quorum
	c.move()
	t := c.tally()
	switch p := w.Policy; {
	case t.fast:
	case 2*t.candidates <= t.healthy:
		w.broken(ruleMajority, "quorum %d has %d members, of %d healthy", q.ID, len(q.Members), t.healthy)
	case t.eligible < p.MinReplicas:
		w.broken(ruleMajority, "quorum %d has %d members, min_replicas is %d", q.ID, len(q.Members), p.MinReplicas)
	case t.candidates < t.healthy && t.waited < p.JoinTimeout:
		w.broken(ruleMajority, "quorum %d does not wait for the healthy that have not asked", q.ID)
	}
	if !t.fast {
		c.notBehind(q, t)
	}
	c.reached, c.behind = 0, 0
	for i := range q.Members {
		c.reached = max(c.reached, q.Members[i].Step)
	}
	c.sameMembers(q)
	c.sameWaiters(d)
	c.ids(q)

	for _, g := range c.known {
		if g.previous = g.expected; g.expected {
			g.waits, g.missed = 0, 0
		} else if c.candidate(g) {
			g.joined = c.clock // it waits on, for the next
		}
	}
	c.lastTime = w.now
}

// notBehind: a quorum below the step that the job had reached has waited for those who were there.
func (c *checker) notBehind(q *quorum.Quorum, t tally) {
	step, lives := int64(-1), ""
	for i := range q.Members {
		step = max(step, q.Members[i].Step)
	}
	for _, g := range c.known {
		if g.previous && c.healthy(g) && !c.candidate(g) {
			lives = g.id
		}
	}
	if step < c.reached && lives != "" && t.waited < c.w.Policy.HeartbeatTimeout {
		c.w.broken(ruleBehind, "quorum %d goes on at step %d, %s of the one before, which was at step %d, is alive", q.ID, step, lives, c.reached)
	}
}

func (c *checker) sameMembers(q *quorum.Quorum) {
	i := 0
	for _, g := range c.known {
		switch in := i < len(q.Members) && q.Members[i].ReplicaID == g.id; {
		case in && g.expected:
			i++
		case in:
			i++
			c.w.broken(ruleMembers, "%s is in quorum %d and does not wait (a ghost)", g.id, q.ID)
		case g.expected:
			if g.missed++; g.missed >= 2 {
				c.w.broken(ruleNewcomer, "%s waits, and quorum %d is the second without it", g.id, q.ID)
			}
			g.expected = false
		}
	}
	if i < len(q.Members) {
		c.w.broken(ruleMembers, "quorum %d has %s, which nobody knows, or is not in order", q.ID, q.Members[i].ReplicaID)
	}
}

func (c *checker) sameWaiters(d quorum.Deliver) {
	n := 0
	for i := range c.w.lh.waiting {
		q := &c.w.lh.waiting[i]
		if !q.g.expected {
			continue
		}
		n++
		if !slices.Contains(d.Waiters, q.id) {
			c.w.broken(ruleBroadcast, "%s is in quorum %d and is not told", q.g.id, d.Quorum.ID)
		}
	}
	if len(d.Waiters) != n {
		c.w.broken(ruleBroadcast, "quorum %d goes to %d waiters, %d wait", d.Quorum.ID, len(d.Waiters), n)
	}
}

func (c *checker) ids(q *quorum.Quorum) {
	w := c.w
	switch {
	case q.ID < c.lastID:
		w.broken(ruleIDs, "quorum %d comes after quorum %d", q.ID, c.lastID)
	case q.ID > c.lastID:
		c.lastID = q.ID
		c.members = c.members[:0]
		for i := range q.Members {
			c.members = append(c.members, q.Members[i].ReplicaID)
		}
		return
	}
	same := len(q.Members) == len(c.members)
	for i := range q.Members {
		same = same && q.Members[i].ReplicaID == c.members[i]
	}
	if !same {
		w.broken(ruleOneSet, "quorum %d had %v, and now has %s", q.ID, c.members, describe(q))
	}
}

// ticked checks that no quorum is overdue, that the lighthouse forgets, and that the job goes on.
func (c *checker) ticked() {
	w := c.w
	c.move()
	if t := c.tally(); !c.due(t) {
		c.behind = 0
	} else if !c.mayWait(t) {
		w.broken(ruleForms, "%d of %d healthy wait, for %s, and there is no quorum", t.candidates, t.healthy, t.waited)
	}
	c.known = slices.DeleteFunc(c.known, func(g *group) bool {
		gone := !c.healthy(g) && g.waits == 0 && !g.previous
		g.listed = g.listed && !gone
		return gone
	})
	if replicas, _ := w.lh.machine.Size(); replicas != len(c.known) && !w.mistake.anySize {
		w.broken(ruleMemory, "the lighthouse remembers %d replicas, %d are alive, wait or are in the latest quorum", replicas, len(c.known))
	}
	c.progress()
}

func (c *checker) lighthouseSize() {
	w := c.w
	if _, waiters := w.lh.machine.Size(); waiters != len(w.lh.waiting) && !w.mistake.anySize {
		w.broken(ruleWaiters, "the lighthouse remembers %d waiters, %d wait", waiters, len(w.lh.waiting))
	}
}

// progress: while nothing changes for the worse, and some groups are connected with each other and with the
// lighthouse, are enough, and more than half of the healthy, each of them commits again and again.
func (c *checker) progress() {
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
	for _, g := range c.known {
		if c.healthy(g) {
			healthy++
		}
	}
	if connected < w.Policy.MinReplicas || 2*connected <= healthy {
		return
	}
	if w.now-c.lastTime > bound {
		w.broken(ruleForms, "%d groups are connected, and there has been no quorum for %s", connected, w.now-c.lastTime)
	}
	for i := range w.slots {
		if g := w.slots[i].g; w.reached(i) && w.now-max(g.began, g.lastCommit) > bound {
			w.broken(ruleProgress, "%s has not committed for %s", g.id, w.now-g.lastCommit)
		}
	}
}

// learned is what a group hears of a quorum.
func (c *checker) learned(g *group, q *quorum.Quorum) {
	if q.ID < g.lastID {
		c.w.broken(ruleIDs, "%s is told of quorum %d after quorum %d", g.id, q.ID, g.lastID)
	}
	g.lastID = q.ID
	g.maxStep = 0
	tells, newest, own := true, int64(-1), -1
	for i := range q.Members {
		m := &q.Members[i]
		g.maxStep = max(g.maxStep, m.Step)
		tells = tells && m.CommittedQuorumID != 0
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
	g.behind = m.Step < g.maxStep || tells && m.CommittedQuorumID != newest
}

// answered is what a rank is told to do about its quorum.
func (c *checker) answered(r *rank, a *recovery.Result) {
	g, w := r.g, c.w
	q := g.quorum
	switch {
	case a.QuorumID != q.ID:
		w.broken(ruleHeal, "%s rank %d is told of quorum %d, the latest it asked for is %d", g.id, r.index, a.QuorumID, q.ID)
	case a.MaxStep != g.maxStep:
		w.broken(ruleHeal, "%s rank %d takes %d for max_step of quorum %d, it is %d", g.id, r.index, a.MaxStep, q.ID, g.maxStep)
	case g.behind && !a.Heal:
		w.broken(ruleHeal, "%s rank %d is behind in quorum %d and is not told to heal", g.id, r.index, q.ID)
	case a.Heal && len(a.Sources) == 0:
		w.broken(ruleHeal, "%s rank %d shall heal in quorum %d, from nobody", g.id, r.index, q.ID)
	}
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

// decided is the answer to a vote.
func (c *checker) decided(r *rank, commit bool) {
	if !commit {
		return
	}
	for i := range r.g.ranks {
		if v := r.g.ranks[i].cast; !v.yes || v.step != r.step || v.attempt != r.attempt {
			c.w.broken(ruleVote, "%s commits step %d, rank %d voted %t on step %d in attempt %d, rank %d is in attempt %d",
				r.g.id, r.step, i, v.yes, v.step, v.attempt, r.index, r.attempt)
		}
	}
}

// contributes compares the states of those whose gradients are averaged, before they are.
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

// gaveUpStep looks at a step that is computed anew, although nobody has committed it.
func (c *checker) gaveUpStep(r *rank) {
	if !r.kept {
		return
	}
	c.w.result.GaveUp++
	if c.w.OnlyDeaths && r.replays < mostReplays {
		c.w.broken(ruleKept, "%s rank %d computes step %d anew, and had its gradients", r.g.id, r.index, r.step)
	}
}

// once: nobody who lives has committed in another quorum what is committed by a replay.
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

// committed compares the states after a step, and knows the last few steps of each quorum.
func (c *checker) committed(r *rank) {
	if c.w.OnlyDeaths && r.again {
		c.once(r)
	}
	m := r.comm
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
