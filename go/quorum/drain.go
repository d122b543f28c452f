package quorum

import (
	"fmt"
	"slices"
)

// drains are the members that left the latest quorum, and are still there.
//
// A member that is drained leaves at the end of a step, and nobody loses one for it: it is notified (Drain), takes part in one step
// more, and says that it leaves (Leaving). From then on nobody waits for it, and its end is no failure. But what it sent in the
// last collective may still be on its way to its peers, so it stays until they have ended that step as well, or the next quorum
// is there (Release).
//
// Invariants:
//
//  1. Nobody in it counts as alive: it is in no quorum, and nobody waits for it. One that asks after all is in it no more.
//  2. Each is released once: when no member of the latest quorum may be in the step that it left after, or with the next
//     quorum. Before that its peers may need what it sent last.
//  3. While there is one, all stay at this lighthouse (failback.go), and no answer is redelivered (redeliver.go): the step that it
//     was in is not over.
type drains struct {
	*core
	past *memory
	left []string // in order
}

func (d *drains) any() bool { return len(d.left) > 0 }

// drained passes the wish on. A member whose stream breaks before it hears of it is notified again when it has another (Welcome).
func (d *drains) drained(e Drained) {
	r := d.roster.replicas[e.ReplicaID]
	if r == nil || !r.alive() { // it takes part in no step, after which it could leave
		return
	}
	r.draining = e.Reason
	d.do(Drain(e))
}

// leaving takes a member out of the next quorum, and reports whether it is known here. The others do not wait for it from here on:
// it counts as failed.
func (d *drains) leaving(id string) (known bool) {
	r := d.roster.replicas[id]
	if r == nil { // nobody is in a step with it
		d.do(Release{id})
		return false
	}
	d.refuseAll(r, Left, "replica "+id+" said that it leaves") // else it would be in a quorum that it does not wait for
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

// shuttingDown notes that a member's manager server ends. The member counts as alive until its connection has ended and the grace is
// over: its peers may still receive what it sent in the step that it has ended, and a failure would abort that.
func (d *drains) shuttingDown(e ShuttingDown) {
	if r := d.roster.replicas[e.ReplicaID]; r != nil {
		r.ending, r.finished = true, e.Finished
	}
	d.do(Release{e.ReplicaID})
}

// stayed takes one out that asks all the same, and reports whether it was in it.
func (d *drains) stayed(id string) bool {
	at, left := slices.BinarySearch(d.left, id)
	if left {
		d.left = slices.Delete(d.left, at, at+1)
	}
	return left
}

// disconnected ends a member that left, and whose connection ended after that: nothing more is expected of it.
func (d *drains) disconnected(id string) {
	if r := d.roster.replicas[id]; r != nil && r.pulse != nil && r.draining != "" && r.out != "" {
		why := r.out
		d.roster.drop(r, d.now)
		r.out = why // for people
	}
}

// tick releases those that left once no member may be in the step that they were in: all that are alive ask for the next one.
func (d *drains) tick() {
	if d.any() && !slices.ContainsFunc(d.past.members, func(r *replica) bool { return r.alive() && !r.waiting() }) {
		d.release()
	}
}

// release lets all go.
func (d *drains) release() {
	for _, id := range d.left {
		d.do(Release{id})
	}
	d.left = nil
}

// whoLeft is what to say of a quorum without those that left; empty if nobody did.
func (d *drains) whoLeft() string {
	if !d.any() {
		return ""
	}
	return fmt.Sprintf("; %s left as asked (drain)", names(d.left))
}
