package quorum

import (
	"fmt"
	"slices"
)

// drains keeps the members that left the latest quorum, and whose processes must not end yet.
//
// A drained member leaves at the end of a step, so that no group loses a step: it is notified (Drain), takes part in one more step,
// and reports that it leaves (Leaving). From then on the others do not wait for it, and its end is no failure. But its data of the
// last collective may still be on the way to its peers. So its process stays until they have completed that step, too, or the next
// quorum is formed (Release).
//
// Invariants:
//
//  1. No member in drains counts as alive: it is in no quorum, and the others do not wait for it. A member that asks again is removed.
//  2. Each is released once: when no member of the latest quorum can still be in the step after which it left, or when the next
//     quorum is formed. Before that, its peers may still need the data that it sent last.
//  3. While there is one, no member fails back (failback.go), and no answer is redelivered (redeliver.go): its last step is not over.
type drains struct {
	*core
	past *memory
	left []string // their replica ids, in order
}

func (d *drains) any() bool { return len(d.left) > 0 }

// drained asks a member to leave. If its stream breaks before the message arrives, the welcome of the next one repeats it.
func (d *drains) drained(e Drained) {
	r := d.roster.members[e.ReplicaID]
	if r == nil || !r.alive() { // it is in no step, so there is none at whose end it could leave
		return
	}
	r.draining = e.Reason
	d.do(Drain(e))
}

// leaving keeps a member out of the next quorum: it counts as failed, so that the others do not wait for it. It reports whether the
// member is known here.
func (d *drains) leaving(id string) (known bool) {
	r := d.roster.members[id]
	if r == nil { // no member shares a step with it
		d.do(Release{id})
		return false
	}
	d.refuseAll(r, Left, "member "+id+" has announced that it leaves") // with a pending request it would be in a quorum that it does not train in
	if r.alive() {
		d.roster.markFailed(r, "", "it left, as it was asked to", d.now) // no failure is reported: its peers are not to abort the step
	}
	if !r.previous {
		d.do(Release{id})
		return true
	}
	if at, again := slices.BinarySearch(d.left, id); !again {
		d.left = slices.Insert(d.left, at, id)
	}
	return true
}

// shuttingDown records that a member's manager server ends. The member counts as alive until its connection has ended and the grace is
// over: its peers may still be receiving its data of the step that it has completed, and its failure would abort that.
func (d *drains) shuttingDown(e ShuttingDown) {
	if r := d.roster.members[e.ReplicaID]; r != nil {
		r.ending, r.finished = true, e.Finished
	}
	d.do(Release{e.ReplicaID})
}

// stayed removes a member that asks for a quorum after it has left, and reports whether it had.
func (d *drains) stayed(id string) bool {
	at, left := slices.BinarySearch(d.left, id)
	if left {
		d.left = slices.Delete(d.left, at, at+1)
	}
	return left
}

// disconnected drops a drained member whose connection ended after it had left: it is not a suspect.
func (d *drains) disconnected(id string) {
	if r := d.roster.members[id]; r != nil && r.pulse != nil && r.draining != "" && r.out != "" {
		why := r.out
		d.roster.drop(r, d.now)
		r.out = why // shown in the status
	}
}

// tick releases the members that left once all live members ask for the next quorum: none is in the last step of a released member
// any more.
func (d *drains) tick() {
	if d.any() && !slices.ContainsFunc(d.past.members, func(r *record) bool { return r.alive() && !r.waiting() }) {
		d.release()
	}
}

// release lets all members that left end.
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
