package sim

import (
	"fmt"
	"time"

	"github.com/torchft/torchft/go/quorum"
)

// The rules that only a Judge checks.
const (
	ruleReported = "a failure reaches all members of its quorum"
	ruleSoon     = "after a failure the others have a quorum as soon as it can be known"
	ruleTogether = "groups that reach each other and the lighthouse train in one quorum within a bounded time"
	ruleEarly    = "a call ends before its deadline with an error only if something of its own group failed"
	ruleCalm     = "while nothing fails, no step is lost and no call ends with an error"
)

// failureSlack is how long messages and timers may delay the report of a failure.
const failureSlack = time.Second

// formed checks a quorum when the first of its members receives it: at that time, the field asked of each member is still the
// request that this quorum answers.
func (j *Judge) formed(q *quorum.Quorum) {
	w := j.w
	bound := w.Policy.HeartbeatTimeout + w.Timeout
	after := int64(0)
	for i := range q.Members {
		m := &q.Members[i]
		l := j.life(m.ReplicaID)
		switch {
		case l == nil:
			w.broken(ruleMembers, "quorum %d has %s, which never started", q.ID, m.ReplicaID)
			return
		case l.killed && w.now-l.ended > bound && (j.paused > l.ended+bound || w.now-j.held > bound):
			w.broken(ruleMembers, "%s is in quorum %d and failed %s before", l.id, q.ID, w.now-l.ended)
		case m.Step != l.asked.Step || m.CommitFailures != l.asked.CommitFailures:
			w.broken(ruleStale, "%s is in quorum %d with step %d and %d failures, and asks with step %d and %d failures",
				l.id, q.ID, m.Step, m.CommitFailures, l.asked.Step, l.asked.CommitFailures)
		}
		if l.lastID != q.ID {
			after = max(after, l.lastID)
		}
	}
	w.check.lastID = after // not the largest id of all groups: others may already have received later quorums
	w.check.ids(q)
}

// soon checks that the first quorum after a failure is not late: the other members only have to complete or abort their step.
func (j *Judge) soon(l *life, q *quorum.Quorum) {
	f, w := j.failed, j.w
	if f == nil || l.learned > f.ended {
		return
	}
	due := j.known + 3*w.Compute/2 + 3*w.QuorumTick + failureSlack
	if w.now > due && len(q.Members) >= w.Slots-1 && w.Slots-1 >= w.Policy.MinReplicas {
		w.broken(ruleSoon, "%s has quorum %d %s after %s has failed, which can be known after %s", l.id, q.ID, w.now-f.ended, f.id, j.known-f.ended)
	}
	j.failed = nil
}

// home reports whether each slot has a live group, all of them can reach the lighthouse and each other, and no current fault suspends
// the rules with a time limit (Fault.rough).
func (j *Judge) home() bool {
	w := j.w
	for i := range w.slots {
		if !w.lh.up || !w.reached(i) {
			return false
		}
		for k := range i {
			if !w.connected(i, k) {
				return false
			}
		}
	}
	return w.rough == 0
}

// Settled reports whether all groups have trained for some steps in one quorum. It must become true within a bounded time after the last
// fault, if all groups can reach the lighthouse.
func (j *Judge) Settled() bool {
	w := j.w
	why, _ := j.apart()
	j.calmed = j.calmed || why == "" && w.rough == 0
	if !j.home() {
		return false
	}
	if late := w.now - w.changed; why != "" && late > w.bound() {
		w.broken(ruleTogether, "%s after the last fault %s", late, why)
	}
	return why == ""
}

// Apart describes the state of the groups: why they are not in one quorum (empty if they are), the quorum, and whether all can reach the
// lighthouse.
func (j *Judge) Apart() string {
	why, id := j.apart()
	return fmt.Sprintf("%q, quorum %d, the lighthouse is reached by all: %t, changed at %s", why, id, j.home(), j.w.changed)
}

// apart returns the id of the quorum that has exactly the groups of all slots as its members, and in which each of them has
// committed at least three steps. If there is no such quorum, why is the reason, and otherwise it is empty.
func (j *Judge) apart() (why string, id int64) {
	w := j.w
	for i := range w.slots {
		g := w.slots[i].g
		switch {
		case g == nil:
			return fmt.Sprintf("no group is in slot %d", i), id
		case g.commitID == 0:
			return fmt.Sprintf("%s has committed nothing", g.id), id
		case i > 0 && g.commitID != id:
			return fmt.Sprintf("%s is in quorum %d and %s in quorum %d", w.slots[0].g.id, id, g.id, g.commitID), id
		case j.life(g.id).steps < 3:
			return fmt.Sprintf("%s has committed %d steps", g.id, j.life(g.id).steps), id
		}
		id = g.commitID
	}
	if n := len(w.check.quorums[id]); n != w.Slots {
		return fmt.Sprintf("quorum %d has %d members, %d live", id, n, w.Slots), id
	}
	return "", id
}

// disturbed handles an error of a call. While the job is calm, an error breaks a rule, since no fault can have caused it.
func (j *Judge) disturbed(format string, args ...any) {
	if j.calmed {
		j.w.broken(ruleCalm, format, args...)
	}
}
