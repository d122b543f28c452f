package quorum

// The connection of a member may break while a quorum is on its way to it. The others have theirs, and wait for the member
// in a collective; the member asks again, and would wait for the others to ask: until the collective's timeout, which is a
// minute. So the quorum is redelivered, as if the answer had only been slow.
//
// Invariants:
//
//  1. A quorum is redelivered only to a member of it, and only while it is the newest there can be: no id was given out since, no
//     member is known to know a later one, no new term began. Else the member would meet peers that have continued.
//  2. Nothing has happened since that asks for a new id (reconnect.go), and no other member of it asks for the next one: its peers
//     are in the step, or on the way to it.
//  3. The member says the same as when it was put into the quorum. So it has not taken part in the step: a member that did has
//     another step, or a failure, to report.

// lostAnswer reports whether a member that asks is in the latest quorum and cannot have received it: it says exactly what
// it said then, on a stream that it has begun since. (A member that received it has committed the step, or failed in it.)
// Where anything else has happened since, there is a new quorum anyway.
func (m *Machine) lostAnswer(e Asked) bool {
	latest, r := m.past.latest, m.roster.replicas[e.Member.ReplicaID]
	// None, or one that was formed elsewhere, of which this lighthouse knows the members only: not what the answer said.
	if latest == nil || latest.Revision == 0 {
		return false
	}
	// Only a member of it on a new stream has lost an answer (invariant 1): on the old one, it got it. When a member
	// counts as failed, the others have heard so and have aborted. An earlier request that waits was for the next quorum. A member that is asked to leave must
	// get that with a quorum of its own.
	if r == nil || !r.previous || !r.returned || !r.alive() || r.waiting() || r.draining != "" {
		return false
	}
	// Invariant 2: the step is over for a peer that reconnects, has left, or asks for the next quorum.
	if m.reconnect.needed() || m.drains.any() || m.roster.counts.previousCandidates > 0 {
		return false
	}
	// Invariant 1: its peers may be in a later quorum, here or at another lighthouse.
	if latest.ID != m.past.highest || m.search.id > latest.ID || m.list.listed() && termOf(latest.ID) != m.list.term {
		return false
	}
	i, in := latest.Place(r.id)
	if !in {
		return false
	}
	then := &latest.Members[i] // invariant 3
	return then.State() == e.Member.State() && then.SameButState(&e.Member)
}
