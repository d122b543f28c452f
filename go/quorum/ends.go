package quorum

import (
	"slices"
	"time"
)

// ends handles what a lighthouse learns of members that have ended. The end of a member may count as its vote (bond.go).
//
// Invariants:
//
//  1. When the stream of a bound member breaks, its host is asked at once whether the member's process has ended, and again until that
//     is known or the bond has run out. An end that is learned after the bond has run out is no vote.
//  2. No member votes twice. The end of a member is no vote while a request of it is pending, which is its vote, or while messages of it
//     may still arrive.
//  3. A member with a pending request or a stream has not ended, whatever its host answers (record.here): the answer may be about an
//     earlier process.
type ends struct {
	*core
	past   *memory
	list   *succession
	broken map[string]time.Time // bound voters whose stream broke: when the host of each was probed last
	asked  time.Time            // when the hosts of missing members were probed last
}

const (
	// probePause is how long a host may take to answer a probe before it gets another one.
	probePause = time.Second
	// endPause is how often the host of a member whose stream broke is asked whether it has ended, while it is bound.
	endPause = 200 * time.Millisecond
)

// ended handles the answer of a host that a member's process has ended.
func (s *ends) ended(id string) {
	r := s.roster.members[id]
	if r != nil && r.here() {
		return
	}
	s.over(id, s.list.holds(id, s.past.latestID(), s.now))
	if r != nil && r.alive() {
		s.roster.drop(r, s.now)
		s.failed = append(s.failed, failure{r, ProcessEnded, "its process has ended"})
	}
}

// left handles a member's message that it leaves, or ends for good. The member asks no lighthouse after that, so the message counts
// as its vote even if its bond has run out.
func (s *ends) left(id string) { s.over(id, s.list.promised(id, s.past.latestID())) }

// over counts the end of a bound member as its vote. A pending request of the member is its vote already: with both, the end could
// count for one quorum, and the request for another one that does not come after it.
func (s *ends) over(id string, bound bool) {
	if r := s.roster.members[id]; r != nil && r.waiting() {
		return
	}
	if bound && s.past.votes(id) {
		s.list.end(id)
	}
}

// tookAddress handles the request of a process that has the address of another member: that member's process must have ended. While
// the stream of the ended member is open, messages of it may still arrive, and its end does not count. It counts at the first
// request of the new process after the stream broke.
func (s *ends) tookAddress(by *Member) {
	if !s.list.listed() || s.past.latest == nil || by.Address == "" || s.past.votes(by.ReplicaID) {
		return
	}
	p := s.past.latest.Past()
	for _, v := range slices.Concat(p.sets()...) {
		if r := s.roster.members[v.ReplicaID]; v.Address == by.Address && (r == nil || !r.here()) {
			s.over(v.ReplicaID, s.list.holds(v.ReplicaID, p.ID, s.now))
		}
	}
}

// votesWaived waives the votes of members as an operator wants, and reports whether that changes anything. It relies on the operator:
// the members have ended, and no group trains in a quorum that they joined after the latest one here.
func (s *ends) votesWaived(e VotesWaived) (changed bool) {
	for _, id := range e.ReplicaIDs {
		if id == s.past.rumor.ReplicaID { // without the rumor, the job may start over
			s.past.rumor = Voter{}
			s.do(Waived{id, e.By})
			changed = true
		}
		if r := s.roster.members[id]; r != nil && r.waiting() || !s.past.votes(id) {
			continue // its pending request is its vote, or its vote is not needed
		}
		s.list.waive(id)
		s.do(Waived{id, e.By})
		changed = true
	}
	return changed
}

// disconnected asks a member's host at once whether the member has ended: the bond that makes the end a vote soon runs out.
func (s *ends) disconnected(id string) {
	if !s.list.listed() || !s.list.holds(id, s.past.latestID(), s.now) || !s.past.votes(id) {
		return // its end would be no vote
	}
	if s.broken == nil {
		s.broken = map[string]time.Time{}
	}
	s.broken[id] = s.now
	s.probe(id)
}

// tick asks the hosts again (invariant 1).
func (s *ends) tick() {
	for _, id := range sorted(s.broken) {
		r := s.roster.members[id]
		_, ended := s.list.ended[id]
		switch {
		case ended, r != nil && r.alive() && r.suspect == nil, !s.list.holds(id, s.past.latestID(), s.now):
			delete(s.broken, id)
		case s.now.Sub(s.broken[id]) >= endPause:
			s.broken[id] = s.now
			s.probe(id)
		}
	}
}

func (s *ends) probe(id string) {
	if v, votes := s.past.voter(id); votes && v.Address != "" {
		s.do(Probe{v.ReplicaID, v.Address})
	}
}

// probeMissing asks the hosts of members whose votes are missing whether these members have ended. It asks about members that count
// as alive without evidence: presumed (as after a restart of the lighthouse), or suspect. The others have a stream, or are known to
// have failed.
func (s *ends) probeMissing(missing []Voter) {
	if len(missing) == 0 || s.now.Sub(s.asked) < probePause {
		return
	}
	s.asked = s.now
	for _, v := range missing {
		if r := s.roster.members[v.ReplicaID]; v.Address != "" && r != nil && r.alive() && (r.presumed || r.suspect != nil) {
			s.do(Probe{v.ReplicaID, v.Address})
		}
	}
}
