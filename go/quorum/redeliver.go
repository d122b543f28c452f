package quorum

// The connection of a member may break while a quorum is on its way to it. Its peers have the quorum, and wait for the member in a
// collective. The member asks again, and would wait for the others to ask for the next quorum: both sides would wait until the
// timeout of the collective, a minute. So the quorum is redelivered, as if its first delivery had only been slow.
//
// Invariants:
//
//  1. A quorum is redelivered only to one of its members, and only while no later quorum can exist: no later id was used, no member
//     claims a later quorum. Otherwise the member would train in a quorum that its peers have left.
//  2. No reason for a new id has come up since (reconnect.go), and no other member asks for the next quorum: the peers are in the
//     step of this quorum, or about to begin it.
//  3. The request is the same as the one that the quorum answered. So the member has not trained in that step: otherwise its request
//     would have another step, or a commit failure.

// lostAnswer reports whether the member that asks is in the latest quorum and cannot have received it (see above). In all other
// cases the request is for the next quorum.
func (m *Machine) lostAnswer(e Asked) bool {
	latest, r := m.past.latest, m.roster.members[e.Member.ReplicaID]
	// There is no latest quorum, or it was formed before this lighthouse started: then its members are known, but not the rest of
	// the answer.
	if latest == nil || latest.Adopted {
		return false
	}
	// Only a member on a new stream can have lost the answer: on the old stream, it received it. If the member counts as failed,
	// the others were notified and have aborted the step. If another request of it is pending, that one was for the next quorum. A
	// member that is drained needs a new quorum, whose answer contains the request to leave.
	if r == nil || !r.previous || !r.returned || !r.alive() || r.waiting() || r.draining != "" {
		return false
	}
	// Invariant 2: the step is over for a peer that reconnects, has left, or asks for the next quorum.
	if m.reconnect.needed() || m.drains.any() || m.roster.counts.previousCandidates > 0 {
		return false
	}
	// Invariant 1: its peers may be in a later quorum.
	if latest.ID != m.past.highest || m.search.id > latest.ID {
		return false
	}
	i, in := latest.Place(r.id)
	if !in {
		return false
	}
	then := latest.Members[i] // invariant 3
	if r.behind {
		then.Step++
	}
	return then.State() == e.Member.State() && then.SameButState(&e.Member)
}
