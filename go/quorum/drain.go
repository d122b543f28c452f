package quorum

import (
	"fmt"
	"slices"
)

// A member that is drained leaves at the end of a step, and nobody loses one for it:
//
// It is told (Drain), takes part in one step more, and says that it leaves (Leaving). From then on nobody waits for it, and
// its end is no failure. But what it sent in the last collective may still be on its way to its peers, so it stays until
// they have ended that step as well, or the next quorum is there (Release).

// drains are the members that left the latest quorum, and are still there.
//
// Invariants:
//
//  1. Nobody in it counts as alive: it is in no quorum, and nobody waits for it. One that asks after all is in it no more.
//  2. Each is released once: when no member of the latest quorum may be in the step that it left after, or with the next
//     quorum. Before that its peers may need what it sent last.
//  3. While there is one, all stay at this lighthouse (failback.go), and no answer is redelivered (again.go): the step that it
//     was in is not over.
type drains struct {
	left []string // in order
}

func (d *drains) any() bool { return len(d.left) > 0 }

// leave adds a member.
func (d *drains) leave(id string) {
	if at, again := slices.BinarySearch(d.left, id); !again {
		d.left = slices.Insert(d.left, at, id)
	}
}

// stayed takes one out that asks all the same, and reports whether it was in it.
func (d *drains) stayed(id string) bool {
	at, left := slices.BinarySearch(d.left, id)
	if left {
		d.left = slices.Delete(d.left, at, at+1)
	}
	return left
}

// release lets all go.
func (d *drains) release() (actions []Action) {
	for _, id := range d.left {
		actions = append(actions, Release{id})
	}
	d.left = nil
	return actions
}

// farewell is what to say of a quorum without those that left; empty if nobody did.
func (d *drains) farewell() string {
	if !d.any() {
		return ""
	}
	return fmt.Sprintf("; %s left as asked (drain)", names(d.left))
}

// drain passes the wish on. A member whose stream breaks before it hears of it is told again when it has another.
func (m *Machine) drain(e Drained) []Action {
	r := m.roster.replicas[e.ReplicaID]
	if r == nil || !r.alive() {
		return nil
	}
	r.draining = e.Reason
	return []Action{Drain(e)}
}

// leaves takes a member out of the next quorum.
func (m *Machine) leaves(id string) (actions []Action) {
	r := m.roster.replicas[id]
	if r == nil {
		return []Action{Release{id}}
	}
	for _, w := range r.waiters(func(request) bool { return true }) {
		m.roster.giveUp(w, m.now)
		actions = append(actions, Refuse{w, Left, "replica " + id + " said that it leaves"})
	}
	m.over(id, m.list.promised(id, m.latestID())) // it asks nobody any more
	if r.alive() {
		m.roster.markFailed(r, "", "it left, as it was asked to", m.now)
	}
	if !r.previous {
		return append(actions, Release{id})
	}
	m.drains.leave(id)
	return actions
}

// stay reports whether a member that left is still needed: somebody may be in the step that it was in.
func (m *Machine) stay() bool {
	return slices.ContainsFunc(m.members, func(r *replica) bool { return r.alive() && !r.waiting() })
}

// lostLeaver ends a member that left, and whose connection ended after that: nothing more is expected of it.
func (m *Machine) lostLeaver(id string) {
	if r := m.roster.replicas[id]; r != nil && r.pulse != nil && r.draining != "" && r.out != "" {
		why := r.out
		m.roster.die(r, m.now)
		r.out = why // for people
	}
}
