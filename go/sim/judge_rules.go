package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/torchft/torchft/go/quorum"
)

// The rules that only a Judge checks.
const (
	ruleReported = "a failure reaches all members of its quorum"
	ruleSoon     = "after a failure the others have a quorum as soon as it can be known"
	ruleTogether = "groups that reach each other and a lighthouse train in one quorum within a bounded time"
	ruleEarly    = "a call ends before its deadline with an error only if something of its own group failed"
	ruleOperator = "processes that end while nothing else happens need no operator"
	ruleCalm     = "while nothing fails, no step is lost and no call ends with an error"
)

// failureSlack is how long messages and timers may delay the report of a failure.
const failureSlack = time.Second

// formed checks a quorum when the first of its members receives it: at that time, the field asked of each member is still the
// request that this quorum answers.
func (j *Judge) formed(q *quorum.Quorum) {
	w := j.w
	bound := w.Policy.HeartbeatTimeout + w.Timeout
	after := &quorum.Quorum{}
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
			after.ID = max(after.ID, l.lastID)
		}
	}
	d := quorum.Deliver{Quorum: q}
	if after.ID != 0 {
		d.Before = after
	}
	w.check.lastID = after.ID // not the largest id of all groups: others may already have received later quorums
	w.check.ids(&watch{latest: after.ID}, d)
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

// failoverTime bounds the time from the failure of a job's lighthouse until the first quorum at the next one: the members have to
// notice that their connections have broken, and the next lighthouse has to learn the latest quorum.
const failoverTime = 35 * time.Second

// failedOver checks that a job whose lighthouse has failed is served by another one in time, if all groups can reach that one.
func (j *Judge) failedOver() {
	if lighthouse, all := j.home(); j.failover > 0 && j.w.now > j.failover && all && j.w.lhs[lighthouse].up {
		j.w.broken(ruleSoon, "there is no quorum %s after the lighthouse failed, and all can reach lighthouse %d", j.w.now-j.moved, lighthouse)
	}
}

// home returns the first lighthouse that any live group can reach. all is true if each slot has a live group, if all of them can
// reach this lighthouse and each other, and if no current fault suspends the rules with a time limit (Fault.rough).
func (j *Judge) home() (lighthouse int, all bool) {
	w := j.w
	for lighthouse < w.Lighthouses-1 && !slices.ContainsFunc(j.lives, func(l *life) bool { return !l.killed && j.reached(l, lighthouse) }) {
		lighthouse++
	}
	for i := range w.slots {
		if w.slots[i].g == nil || !j.reached(j.life(w.slots[i].g.id), lighthouse) {
			return lighthouse, false
		}
		for k := range i {
			if !w.connected(i, k) {
				return lighthouse, false
			}
		}
	}
	return lighthouse, w.rough == 0
}

func (j *Judge) reached(l *life, lighthouse int) bool {
	return j.w.lhs[lighthouse].up && j.w.reached(l.slot, lighthouse)
}

// termBits is the number of bits of an id below its term. The lighthouses of a list use different terms (go/quorum/succession.go).
const termBits = 42

// Settled reports whether all groups have trained for some steps in one quorum, at the first lighthouse that they can reach. It
// must become true within a bounded time after the last fault, if there is a lighthouse that all groups can reach.
func (j *Judge) Settled() bool {
	w := j.w
	why, _ := j.apart()
	j.calmed = j.calmed || why == "" && w.rough == 0
	j.failedOver()
	if _, all := j.home(); !all {
		return false
	}
	why = j.together()
	if late := w.now - w.changed; why != "" && late > w.bound() {
		w.broken(ruleTogether, "%s after the last fault %s", late, why)
	}
	return why == ""
}

// Apart describes the state of the groups: why they are not in one quorum (empty if they are), the quorum, and the lighthouse that
// all can reach.
func (j *Judge) Apart() string {
	why, id := j.apart()
	lighthouse, all := j.home()
	return fmt.Sprintf("%q, quorum %d, lighthouse %d reached by all: %t, changed at %s", why, id, lighthouse, all, j.w.changed)
}

// together returns the reason why the groups do not train in one quorum at the first lighthouse that any of them can reach; empty
// if they do.
func (j *Judge) together() (why string) {
	why, id := j.apart()
	if lighthouse, _ := j.home(); why == "" && j.place(id) != lighthouse {
		why = fmt.Sprintf("they are at lighthouse %d and not at %d", j.place(id), lighthouse)
	}
	return why
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
	if n := len(w.check.quorums[id].members); n != w.Slots {
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
