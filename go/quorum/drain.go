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

// drain passes the wish on. A member whose stream breaks before it hears of it is told again when it has another.
func (m *Machine) drain(e Drained) []Action {
	r := m.roster.replicas[e.ReplicaID]
	if r == nil || !r.alive() {
		return nil
	}
	r.draining = e.Reason
	return []Action{Drain(e)}
}

// Draining is who wants a member to leave, empty if nobody does.
func (m *Machine) Draining(id string) string {
	if r := m.roster.replicas[id]; r != nil {
		return r.draining
	}
	return ""
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
	if m.votes(id) { // it votes for nobody any more
		if m.ended == nil {
			m.ended = map[string]struct{}{}
		}
		m.ended[id] = struct{}{}
	}
	if r.alive() {
		m.roster.putOut(r, "", "it left, as it was asked to", m.now)
	}
	if !r.previous {
		return append(actions, Release{id})
	}
	if at, again := slices.BinarySearch(m.leavers, id); !again {
		m.leavers = slices.Insert(m.leavers, at, id)
	}
	return actions
}

// stayed notes that a member that left asks all the same. It has ended what it shared with the others.
func (m *Machine) stayed(id string) {
	if at, left := slices.BinarySearch(m.leavers, id); left {
		m.leavers = slices.Delete(m.leavers, at, at+1)
		m.rejoined = id
	}
}

// stay reports whether a member that left is still needed: somebody may be in the step that it was in.
func (m *Machine) stay() bool {
	return slices.ContainsFunc(m.members, func(r *replica) bool { return r.alive() && !r.waiting() })
}

// release lets go all who left.
func (m *Machine) release() (actions []Action) {
	for _, id := range m.leavers {
		actions = append(actions, Release{id})
	}
	m.leavers = nil
	return actions
}

// farewell is what to say of a quorum without those who left; empty if nobody did.
func (m *Machine) farewell() string {
	if len(m.leavers) == 0 {
		return ""
	}
	return fmt.Sprintf("; %s left as asked (drain)", names(m.leavers))
}

// lostLeaver ends a member that left, and whose connection ended after that: nothing more is expected of it.
func (m *Machine) lostLeaver(id string) {
	if r := m.roster.replicas[id]; r != nil && r.pulse != nil && r.draining != "" && r.out != "" {
		why := r.out
		m.roster.die(r, m.now)
		r.out = why // for people
	}
}
