package quorum

// The answers of a round may be lost: the connection of a member breaks while a quorum is on its way to it,
// or the lighthouse ends, or is cut off, when it has answered only some of the members. Those members begin
// the collectives of the step, and wait in them for the others. The others ask again, at this lighthouse or
// at the next one, and would wait there for the first ones to ask for the next quorum: both sides would wait
// until the timeout of the collective. So the quorum is redelivered, as if its first delivery had only been
// slow. A lighthouse that did not form it learns it from a member that received it (recall.go).
//
// Invariants:
//
//  1. A quorum is redelivered only to one of its members, and only while no later round can exist: no later
//     id was used, the latest quorum is known as it was delivered last, and no live member of it claims a
//     later round. Otherwise the member would train in a round that its peers have left.
//  2. No reason for a new id has come up since (reconnect.go), and no other member asks for the next quorum:
//     the peers are in the step of this quorum, or about to begin it. A request that invariant 3 allows to
//     answer is not for the next quorum.
//  3. The request is the same as the one that the quorum answered, and came on a stream on which the member
//     has received no answer and at whose beginning it had not received that round either. So the member has
//     not trained in that step: otherwise it would know the round. Its request alone does not tell, since a
//     vote that fails counts as no commit failure.
//  4. A pending request is answered so only if the quorum was adopted: it may have come before the quorum was
//     shown. A quorum that was formed here was known before.

// lostAnswer reports whether the member that asks is in the latest quorum and cannot have received it (see
// above). In all other cases the request is for the next quorum.
func (m *Machine) lostAnswer(e Asked) bool {
	r := m.roster.members[e.Member.ReplicaID]
	// If another request of it is pending, that one was for the next quorum, or redeliverPending answers it.
	return m.inForce() && r != nil && !r.waiting() && m.roster.counts.previousCandidates == 0 &&
		m.missed(r, &e.Member)
}

// redeliverPending answers the members of an adopted quorum whose requests came before the quorum was shown.
func (m *Machine) redeliverPending() {
	if !m.past.adopted || m.roster.counts.previousCandidates == 0 || !m.inForce() {
		return
	}
	var missed []*record
	for e := m.roster.previousQueue.Front(); e != nil; e = e.Next() {
		r := e.Value.(*record)
		if !m.missed(r, r.member()) { // invariant 2
			return
		}
		missed = append(missed, r)
	}
	for _, r := range missed {
		m.do(Redeliver{m.roster.answer(r, m.now), m.past.latest})
		m.standing.redelivered(r)
	}
}

// inForce reports whether the latest quorum may be redelivered to members that ask for it: invariant 1, and
// the first part of 2.
func (m *Machine) inForce() bool {
	latest := m.past.latest
	return latest != nil && !m.past.bare && latest.ID == m.past.highest && !m.search.open() &&
		!m.reconnect.needed() && !m.drains.any()
}

// missed reports whether a request of a member asks for the latest quorum (invariant 3). If the member counts
// as failed, the others were notified and have aborted the step. If it had received the round, it has left
// the step, and the others may have committed it.
func (m *Machine) missed(r *record, member *Member) bool {
	if !r.previous || !r.returned || !r.alive() || r.claim == m.past.latest.Round() {
		return false
	}
	i, in := m.past.latest.Place(r.id)
	if !in {
		return false
	}
	then := m.past.latest.Members[i]
	if r.behind {
		then.Step++
	}
	return then.State() == member.State() && then.SameButState(member)
}
