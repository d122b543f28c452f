package quorum

import (
	"fmt"
	"time"
)

// core has the state that the parts of the machine share: the policy, the members, the time, and the actions
// that result from an event. A part (drains, suspicion, watch, …) holds a pointer to it, handles the events
// of its subject, and appends its actions. So each part can be read, and tested, without the machine.
//
// Invariants:
//
//  1. now is the machine's own time. It stands still while the lighthouse is stopped, and while it hears no
//     member of a quorum that stands (pause): messages of that time have not been handled, so no wait may end
//     by it.
//  2. Each event begins with an empty list of actions. They are in the order in which they are to be done.
//  3. A failure is collected when it is found, and reported after the other actions of the event
//     (Machine.reportFailures). So an event that makes another quorum the latest one can drop failures of
//     members of the previous one.
type core struct {
	policy  Policy
	term    int64 // of this lighthouse as a leader; 0 without a cluster
	roster  *roster
	now     time.Time     // of the event, in the machine's own time
	paused  time.Duration // by how much that is behind the clock
	actions []Action
	failed  []failure // found by the event, and not reported yet
}

func newCore(policy Policy, start time.Time, term int64) core {
	return core{policy: policy, term: term, roster: newRoster(policy), now: start}
}

// open starts an event.
func (c *core) open(now time.Time) {
	c.now = c.own(now)
	c.actions, c.failed = nil, c.failed[:0]
}

// own returns a time of the clock as the machine's own; it is not before that of the last event.
func (c *core) own(clock time.Time) time.Time {
	if own := clock.Add(-c.paused); own.After(c.now) {
		return own
	}
	return c.now
}

// clock returns a time of the machine as one of the clock.
func (c *core) clock(own time.Time) time.Time { return own.Add(c.paused) }

// pause takes a span that has just passed out of the machine's own time.
func (c *core) pause(span time.Duration) {
	c.now, c.paused = c.now.Add(-span), c.paused+span
}

// do appends an action.
func (c *core) do(a Action) { c.actions = append(c.actions, a) }

// fail makes a member count as failed until it asks again.
func (c *core) fail(r *record, cause Cause, reason string) {
	c.failed = append(c.failed, c.roster.markFailed(r, cause, reason, c.now))
}

// refuse answers a request that is not accepted, or not pending any more.
func (c *core) refuse(w WaiterID, why Refusal, reason string) { c.do(Refuse{w, why, reason}) }

// refusePending ends the request of a member, if it has one.
func (c *core) refusePending(r *record, why Refusal, reason string) {
	if r.waiting() {
		c.refuse(c.roster.withdraw(r, c.now), why, reason)
	}
}

// misfits refuses a member that no quorum may include, and lets it count as failed until it asks again, so
// that no decision waits for it. A member of the latest quorum is excepted: peers may still be in a step with
// it.
func (c *core) misfits(id string, w WaiterID, reason string) {
	c.refuse(w, Misfit, reason)
	c.do(Report{What: MemberRefused, ReplicaID: id, Reason: reason})
	if r := c.roster.members[id]; r != nil && r.alive() && !r.waiting() && !r.previous {
		c.fail(r, "", reason) // it is in no step, so its failure is not reported
	}
}

// newest accepts a request that is newer than all earlier ones of its member. A delayed request has an old
// step: if it were accepted, it could complete a quorum at a step that its member has left, and the groups
// would divide their gradients by different numbers. If two processes number their requests and use one
// replica id, the one that started later is accepted, since its numbers are larger (replaces).
func (c *core) newest(e Asked) (newest, replaces bool) {
	r := c.roster.members[e.Member.ReplicaID]
	another := r != nil && r.address != "" && r.address != e.Member.Address
	switch inOrder := c.roster.inOrder(e.Member.ReplicaID, e.Number); {
	case !inOrder && another:
		c.replaced(e.Waiter, r.id, r.address)
		return false, false
	case !inOrder:
		c.refuse(e.Waiter, Overtaken, "a newer request of "+e.Member.ReplicaID+" came before this one")
		return false, false
	}
	return true, another
}

// accept makes a request the pending one of its member. An earlier one is refused: a retry came before it was
// withdrawn, or another process asks.
func (c *core) accept(e Asked) {
	earlier := c.roster.ask(e, c.now)
	switch id := e.Member.ReplicaID; {
	case earlier == nil:
	case earlier.member.Address != e.Member.Address:
		c.replaced(earlier.waiter, id, e.Member.Address)
	default:
		c.refuse(earlier.waiter, Overtaken, "a newer request of "+id+" came after this one")
	}
}

// replaced refuses a request because a process that started later uses the same replica id.
func (c *core) replaced(w WaiterID, id, by string) {
	c.refuse(w, Replaced, fmt.Sprintf("another process, with its manager at %q, asks as member %s: replica "+
		"ids must be unique", by, id))
}
