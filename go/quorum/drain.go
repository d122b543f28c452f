package quorum

import (
	"fmt"
	"slices"
)

// drains holds the members that left the latest quorum, and whose processes must not end yet.
//
// A drained member leaves at the end of a step, so that no group loses a step: it is notified (Drain), takes
// part in one more step, and reports that it leaves (Leaving). From then on the others do not wait for it,
// and its end is no failure. But its peers may still be receiving its data of the last collective. So its
// process must not end until they have completed that step, too, or the next quorum is formed: then the
// member is released (Release).
//
// Invariants:
//
//  1. No member in drains counts as alive: it is in no quorum, and the others do not wait for it. A member
//     that asks for a quorum again is removed from drains.
//  2. A member is released, and removed from drains, when no member of the latest quorum can still be in the
//     step after which it left, or when the next quorum is formed. Before that, its peers may still need the
//     data that it sent last.
//  3. While drains holds a member, no answer is redelivered (redeliver.go): peers may still be in the last
//     step of the member that left.
type drains struct {
	*core
	past *memory
	left []string // their replica ids, in order
}

func (d *drains) any() bool { return len(d.left) > 0 }

// drained asks a member to leave. If its stream breaks before the message arrives, the welcome on its next
// stream repeats the request.
func (d *drains) drained(e Drained) {
	r := d.roster.members[e.ReplicaID]
	if r == nil || !r.alive() { // it takes part in no step, so it need not leave after one
		return
	}
	r.draining = e.Reason
	d.do(Drain(e))
	if r.held { // it may wait for a step for ever
		d.refusePending(r, Unneeded, "this standby is not needed: it is asked to leave")
	}
}

// leaving keeps a member out of the next quorum: it counts as failed, so that the others do not wait for it.
func (d *drains) leaving(id string) {
	r := d.roster.members[id]
	if r == nil { // no member shares a step with it, so no peer needs its data
		d.do(Release{id})
		return
	}
	// A pending request would put it into the next quorum, in which it does not train.
	d.refusePending(r, Left, "member "+id+" has announced that it leaves")
	if r.alive() {
		// Its failure is not reported: its peers must not abort the step, which they may still be completing.
		d.roster.markFailed(r, "", "it left, as it was asked to", d.now)
	}
	if !r.previous { // it is not in the latest quorum, so no peer needs its data
		d.do(Release{id})
		return
	}
	if at, again := slices.BinarySearch(d.left, id); !again {
		d.left = slices.Insert(d.left, at, id)
	}
}

// shuttingDown records that a member's manager server ends. The member counts as alive until its connection
// has ended and the grace is over: its peers may still be receiving its data of the step that it has
// completed, and the report of its end would make them abort that step. Release is the answer: the lighthouse
// has recorded that the end of the stream is no failure.
func (d *drains) shuttingDown(e ShuttingDown) {
	if r := d.roster.members[e.ReplicaID]; r != nil {
		r.ending, r.finished = true, e.Finished
	}
	d.do(Release{e.ReplicaID})
}

// stayed handles a request from a member: if the member had left, it continues to train, and is removed from
// drains. The result is whether it had left.
func (d *drains) stayed(id string) bool {
	at, left := slices.BinarySearch(d.left, id)
	if left {
		d.left = slices.Delete(d.left, at, at+1)
	}
	return left
}

// disconnected drops a drained member whose connection ended after it had left: it must not become a suspect,
// since its end is no failure.
func (d *drains) disconnected(id string) {
	if r := d.roster.members[id]; r != nil && r.pulse != nil && r.draining != "" && r.out != "" {
		why := r.out
		d.roster.drop(r, d.now)
		r.out = why // shown in the status
	}
}

// tick releases the members that left once all live members of the latest quorum have a pending request for
// the next one: a member that asks has completed or aborted the step after which the others left.
func (d *drains) tick() {
	if d.any() && !slices.ContainsFunc(d.past.members,
		func(r *record) bool { return r.alive() && !r.waiting() }) {
		d.release()
	}
}

// release notifies all members that left that their processes may end.
func (d *drains) release() {
	for _, id := range d.left {
		d.do(Release{id})
	}
	d.left = nil
}

// whoLeft returns the part of a quorum's reason that names the members that left; empty if there are none.
func (d *drains) whoLeft() string {
	if !d.any() {
		return ""
	}
	return fmt.Sprintf("; %s left as asked (drain)", names(d.left))
}
