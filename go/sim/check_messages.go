package sim

import (
	"slices"
	"time"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
)

// expire drops the view of a group whose signs of life are too old. If the group is a member of the latest quorum or has a pending
// request, expire keeps the view and only resets out.
func (c *watch) expire(g *group) {
	switch v := c.of(g); {
	case c.beating(g):
	case v.waits == 0 && !v.previous:
		*v = view{number: v.number, listed: v.listed, messages: v.messages}
	case !v.buried:
		v.out = false
	}
}

// slept reduces the age of all signs of life by the time for which the lighthouse was stopped, except for those that were too old
// before, and extends the waits for members by that time.
func (c *watch) slept(span time.Duration) {
	for _, g := range c.known {
		if v := c.of(g); c.beating(g) {
			v.lastBeat += span
			v.brokeAt += span
			v.joined += span
		}
	}
	for _, since := range []*time.Duration{&c.behind, &c.looking} {
		if *since > 0 {
			*since += span
		}
	}
	c.began += span
}

// newQuorum drops the reports of members about the previous quorum.
func (c *watch) newQuorum() {
	for _, g := range c.known {
		v := c.of(g)
		v.reported, v.silent, v.progress = false, false, nil
	}
}

// asksAll drops the members' earlier answers: they are asked for their progress again.
func (c *watch) asksAll() {
	for _, g := range c.known {
		c.of(g).progress = nil
	}
}

// message records an event about a group before the lighthouse handles it.
func (c *watch) message(g *group, message quorum.Event) {
	c.move()
	v := c.of(g)
	switch e := message.(type) {
	case quorum.Incomplete:
		if c.healthy(g) && v.waits == 0 {
			v.out, v.missing, v.suspect = true, true, false
		}
	case quorum.Suspected:
		if v.previous && e.QuorumID == c.latest && !v.reported && e.Suspect != g.id {
			v.reported, v.suspects = true, e.Suspect
		}
	case quorum.Progressed:
		v.progress = &e.Progress
	case quorum.Drained:
		v.draining = v.draining || c.healthy(g)
	case quorum.Leaving:
		if c.healthy(g) {
			v.out, v.suspect = true, false
		}
	case quorum.ShuttingDown:
		v.ending, v.finished = true, e.Finished
		c.finish()
	}
}

// finish drops the past if all members of the latest quorum have reported that their training is complete.
func (c *watch) finish() {
	if c.latest == 0 {
		return
	}
	for _, g := range c.known {
		if v := c.of(g); v.previous && !v.finished {
			return
		}
	}
	for _, g := range c.known {
		c.of(g).previous = false
	}
	c.latest, c.reached, c.behind = 0, 0, 0
	c.newQuorum()
}

// regressed checks a warning of the lighthouse that the job regresses.
func (c *watch) regressed(a *quorum.Regressed) {
	if c.stepWas == 0 {
		c.l.w.broken(ruleFinished, "quorum %d is reported to regress behind a job of which nothing is left: %s", a.Quorum.ID, a.Reason)
	}
}

// checked records the result of a check.
func (c *watch) checked(g *group, e quorum.Checked) {
	c.move()
	c.of(g).silent = e.QuorumID == c.latest && !e.Reached
}

// reportsAgainst returns the number of members of the latest quorum, and how many of them report a failed collective that makes a group
// a suspect.
func (c *watch) reportsAgainst(g *group) (members, reports int) {
	for _, x := range c.known {
		v := c.of(x)
		if v.previous {
			members++
		}
		if v.previous && x != g && v.reported && (v.suspects == "" || v.suspects == g.id) {
			reports++
		}
	}
	return members, reports
}

// looks checks that more than half of the other members suspect a group when the lighthouse checks on it.
func (c *watch) looks(a *quorum.Check) {
	g := c.l.w.byID[a.ReplicaID]
	if members, reports := c.reportsAgainst(g); 2*reports <= members-1 {
		c.l.w.broken(ruleCause, "the lighthouse checks on %s, against which only %d of %d other members of quorum %d report", g.id, reports, members-1, a.QuorumID)
	}
}

// reported records that the lighthouse has reported to its members that a group counts as failed.
func (c *checker) reported(a *quorum.Failed) {
	c.w.byID[a.ReplicaID].eviction = eviction{quorumID: a.QuorumID, at: c.w.now}
}

// forwards handles a report, received by one group, that another group counts as failed. The first group has to notify the failed one
// if the first group still knows the quorum, and is one of the first three notifiers there: the members that follow the failed one at
// distances of round.Stride. Then forwards records the time by which the failed group is notified.
func (c *checker) forwards(by *group, f *round.MemberFailed) {
	w, g := c.w, c.w.byID[f.ReplicaID]
	e, q := &g.eviction, c.quorums[f.QuorumID]
	knows := by.quorum != nil && by.quorum.ID == f.QuorumID || by.before == f.QuorumID
	if !knows || q == nil || e.quorumID != f.QuorumID || e.receivedBy > 0 || w.Upstream.has(g.slot) {
		return
	}
	if !w.sends(by.slot, g.slot) || g.pausedUntil > w.now || w.Loss > 0 || w.noise > 0 {
		return
	}
	first, size := slices.Index(q, f.ReplicaID), len(q)
	if !slices.ContainsFunc([]int{1, 2, 3}, func(nth int) bool { return q[(first+nth*round.Stride(size))%size] == by.id }) {
		return
	}
	hop := 3 * w.Delay / 2
	if w.Straggle > 0 {
		hop *= 20
	}
	if slices.ContainsFunc(w.slots, func(s slot) bool { return s.slow > 0 }) {
		hop *= 15
	}
	e.receivedBy = w.now + hop
}

// failed checks that the reason why a group counts as failed is true.
func (c *watch) failed(a *quorum.Failed) {
	c.move()
	w, g := c.l.w, c.l.w.byID[a.ReplicaID]
	v, p := c.of(g), w.Policy
	so := false
	switch a.Cause {
	case quorum.ShutDown:
		so = v.ending
	case quorum.Silent:
		so = v.tooOld == c.clock || v.beaten && c.clock-v.lastBeat >= p.HeartbeatTimeout
	case quorum.Connection:
		so = v.tooOld == c.clock || v.suspect && c.clock-v.brokeAt >= p.SuspectGrace
	case quorum.RankFailed:
		so = v.out && v.missing
	case quorum.Unreachable:
		members, reports := c.reportsAgainst(g)
		so = v.silent && 2*reports > members-1 && !v.reported && v.waits == 0
	case quorum.NoProgress:
		so = p.EjectStalledAfter > 0 && c.clock-c.began >= p.EjectStalledAfter && v.waits == 0 && (v.progress == nil || !v.progress.Waits) && c.anyWaits()
	case quorum.Parted:
		so = v.waits > 0 && c.peersWait(v.asksStep)
	}
	if !so {
		w.broken(ruleCause, "%s of quorum %d counts as failed: %s, which is not so", g.id, a.QuorumID, a.Reason)
	}
	if a.Cause == quorum.Unreachable || a.Cause == quorum.NoProgress || a.Cause == quorum.ShutDown && c.healthy(g) {
		v.out, v.suspect = true, false
	}
}

func (c *watch) anyWaits() bool {
	for _, g := range c.known {
		if v := c.of(g); v.previous && c.healthy(g) && (v.waits > 0 || v.progress != nil && v.progress.Waits) {
			return true
		}
	}
	return false
}

// peersWait reports whether members of the latest quorum wait in this step or in a later one.
func (c *watch) peersWait(step int64) bool {
	for _, g := range c.known {
		if v := c.of(g); v.previous && v.waits == 0 && v.progress != nil && v.progress.Waits && v.progress.Step >= step {
			return true
		}
	}
	return false
}

// released checks that no live group is in the last step of a group that has left.
func (c *watch) released(g *group) {
	c.move()
	if !c.of(g).previous {
		return
	}
	for _, x := range c.known {
		if v := c.of(x); v.previous && c.healthy(x) && v.waits == 0 {
			c.l.w.broken(ruleRelease, "%s left and may go, and %s is still in the step that it was in", g.id, x.id)
			return
		}
	}
}
