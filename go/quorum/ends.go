package quorum

import (
	"slices"
	"time"
)

// ends is what a lighthouse learns of members that have ended: each may be a vote (bond.go).
//
// Invariants:
//
//  1. When the stream of a bound member breaks, its host is asked at once, and again until it is known whether the member has ended, or
//     the bond has run out: an end that is learned too late is no vote.
//  2. Nobody votes twice: a member that waits, or may still send something, has no vote as one that ended.
//  3. A member that waits, or has a stream, has not ended, whatever its host says (replica.here): the answer of the host may be about an
//     earlier process.
type ends struct {
	*core
	past   *memory
	list   *succession
	broken map[string]time.Time // voters that are bound, and whose stream broke: when their hosts were asked last
	asked  time.Time            // when the hosts of missing members were
}

const (
	// probePause is how long a host may take to answer a probe before it gets another one.
	probePause = time.Second
	// endPause is how often the host of a member whose stream broke is asked whether it has ended, while it is bound.
	endPause = 200 * time.Millisecond
)

// ended takes in that a member's process has ended, as its host says.
func (s *ends) ended(id string) {
	r := s.roster.replicas[id]
	if r != nil && r.here() {
		return
	}
	s.over(id, s.list.holds(id, s.past.latestID(), s.now))
	if r != nil && r.alive() {
		s.roster.drop(r, s.now)
		s.failed = append(s.failed, failure{r, ProcessEnded, "its process has ended"})
	}
}

// left notes that a member said that it leaves, or ends for good: it asks nobody any more, so that its bond need not hold now.
func (s *ends) left(id string) { s.over(id, s.list.promised(id, s.past.latestID())) }

// over notes that a member has ended. Where it is bound, its vote is given here. A member that waits votes by its request: with both,
// its vote would count for a quorum, and its request for one that does not come after that.
func (s *ends) over(id string, bound bool) {
	if r := s.roster.replicas[id]; r != nil && r.waiting() {
		return
	}
	if bound && s.past.votes(id) {
		s.list.end(id)
	}
}

// tookAddress notes that another process has the address of a member, whose process has ended then. Earlier messages of the member may
// be on their way until its stream breaks: its end counts after that, when the other process asks again.
func (s *ends) tookAddress(by *Member) {
	if !s.list.listed() || s.past.latest == nil || by.Address == "" || s.past.votes(by.ReplicaID) {
		return
	}
	p := s.past.latest.Past()
	for _, v := range slices.Concat(p.sets()...) {
		if r := s.roster.replicas[v.ReplicaID]; v.Address == by.Address && (r == nil || !r.here()) {
			s.over(v.ReplicaID, s.list.holds(v.ReplicaID, p.ID, s.now))
		}
	}
}

// givenUp takes the word of an operator that members have ended, and that nobody trains in a quorum that they were in later. It
// reports whether that changes anything.
func (s *ends) givenUp(e GivenUp) (changed bool) {
	for _, id := range e.ReplicaIDs {
		if id == s.past.rumor.ReplicaID { // the job starts over
			s.past.rumor = Voter{}
			s.do(Waived{id, e.By})
			changed = true
		}
		if r := s.roster.replicas[id]; r != nil && r.waiting() || !s.past.votes(id) {
			continue // it votes, or need not
		}
		s.list.waive(id)
		s.do(Waived{id, e.By})
		changed = true
	}
	return changed
}

// disconnected asks a member's host at once whether it has ended: the bond that makes its end a vote soon runs out.
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
		r := s.roster.replicas[id]
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

// probeMissing asks the hosts of those that are missing, and of which nothing else is known, whether they have ended.
func (s *ends) probeMissing(missing []Voter) {
	if len(missing) == 0 || s.now.Sub(s.asked) < probePause {
		return
	}
	s.asked = s.now
	for _, v := range missing {
		if r := s.roster.replicas[v.ReplicaID]; v.Address != "" && r != nil && r.alive() && (r.presumed || r.suspect != nil) {
			s.do(Probe{v.ReplicaID, v.Address})
		}
	}
}
