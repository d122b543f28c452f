package quorum

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// search looks for a quorum that this lighthouse does not know and whose id a member claims to know: after a restart, its members know the
// quorum. The lighthouse asks the member for the list of that quorum's members (Recall), and the member shows the quorum (Recalled) or
// does not. (A leader of a cluster knows the latest quorum from the log, so no member can show it a later one.)
//
// Invariants:
//
//  1. For heartbeat_timeout_ms after the first claim, no quorum is formed while a member with a pending request may still show the claimed
//     one. Otherwise the job would continue from an older quorum. After that time it continues without the claimed one: no other
//     lighthouse can have served the job meanwhile.
//  2. Decisions wait only once for a member that does not show the quorum that it claims (unshown), whatever number it claims next. It
//     is in the next quorum all the same, and may still show the one that it claims.
//  3. A quorum is accepted from the disk, or from a member that was in it, if its term is not above this lighthouse's.
type search struct {
	*core
	past *memory
	wanted
}

// wanted describes the quorum that the search looks for.
type wanted struct {
	id    int64     // of the latest claimed quorum, 0 if there is no search
	since time.Time // when a quorum was first claimed
	asked time.Time // when a member was last asked
	by    string    // the member that was asked last
}

// recallPause is how long a member that was asked for a quorum may take before it is asked again, or another member is.
const recallPause = time.Second

// recallPause returns the constant of that name, or less: several recalls must fit into the heartbeat timeout.
func (p Policy) recallPause() time.Duration { return min(recallPause, p.HeartbeatTimeout/5) }

// doubt returns the reason to refuse a request whose quorum id is not plausible and whose sender cannot be asked to show that quorum; empty
// if the request is accepted. Quorum ids never decrease: if a wrong number were accepted, it would raise the ids of the job for good.
func (s *search) doubt(e Asked) string {
	if id := e.KnownQuorumID; e.Recallable && id <= maxKnownID || s.past.plausible(id) {
		return ""
	}
	return fmt.Sprintf("known_quorum_id of member %s is %d: it is far ahead of this lighthouse's clock (%d), and the request does not show that quorum",
		e.Member.ReplicaID, e.KnownQuorumID, s.now.UnixMilli())
}

// claimed handles the quorum id that a member claims to know: if it is later than the latest here, the member is asked for that
// quorum, unless a member is already being asked for it or for a later one.
func (s *search) claimed(r *record, known int64) {
	switch {
	case known <= s.past.latestID(), known > maxKnownID:
	case r.unshown: // decisions do not wait for this member any more, but it may still show the quorum that it claims
		s.do(Recall{r.id, known})
	case known > s.id:
		if s.id == 0 {
			s.since = s.now
		}
		s.ask(r, known)
	}
}

// ask asks a member for the quorum that it knows.
func (s *search) ask(r *record, known int64) {
	s.id, s.asked, s.by = known, s.now, r.id
	s.do(Recall{r.id, known})
}

// tick asks another member for the quorum if the one that was asked did not answer. The search ends when no member with a pending
// request knows a later quorum.
func (s *search) tick() {
	if s.id == 0 {
		return
	}
	var newest int64
	var best *record
	for e := s.roster.queue.Front(); e != nil; e = e.Next() {
		r := e.Value.(*record)
		q := r.newest()
		if r.unshown || !q.recallable || q.known <= s.past.latestID() {
			continue
		}
		if q.known > newest || q.known == newest && best.id == s.by { // the members that know it are asked in turn
			newest, best = q.known, r
		}
	}
	switch {
	case newest == 0:
		s.wanted = wanted{}
	case newest != s.id || s.now.Sub(s.asked) >= s.policy.recallPause():
		s.ask(best, newest)
	}
}

// pending reports whether a decision has to wait until a member has shown its quorum (invariant 1).
func (s *search) pending(now time.Time) bool {
	return s.id > s.past.latestID() && now.Sub(s.since) < s.policy.HeartbeatTimeout
}

// forgive extends the search by a time in which the lighthouse itself was stopped: the answer may have arrived meanwhile.
func (s *search) forgive(span time.Duration) {
	s.since, s.asked = later(s.since, span), later(s.asked, span)
}

// delivers ends the search before a quorum is delivered: what members claim now was not shown in time.
func (s *search) delivers() {
	if s.id == 0 {
		return
	}
	for e := s.roster.queue.Front(); e != nil; e = e.Next() {
		if r := e.Value.(*record); r.newest().recallable && r.newest().known > s.past.latestID() && !r.unshown {
			r.unshown = true
			s.do(Doubted{r.id, fmt.Sprintf("it claims to know of quorum %d, and did not show it", r.newest().known)})
		}
	}
	s.wanted = wanted{}
}

// recalled handles a quorum that a member shows (From), or that was read from disk or from the log at the start (From is empty). It
// reports whether that is the latest quorum now.
func (s *search) recalled(e Recalled) (adopted bool) {
	p := e.Past
	if p.Validate() != nil {
		if e.From == "" && p.ID == 0 && len(p.Members) == 0 { // the training was complete: only the highest id is known
			s.past.floor = max(s.past.floor, min(e.Highest, maxKnownID))
		}
		return false
	}
	if e.From != "" {
		// Only a member of a quorum may show it: otherwise any process could make up a quorum of itself alone.
		if _, in := slices.BinarySearchFunc(p.Members, e.From, func(v Voter, id string) int { return strings.Compare(v.ReplicaID, id) }); !in {
			s.do(Doubted{e.From, fmt.Sprintf("it shows quorum %d, and was not in it", p.ID)})
			return false
		}
		// No lighthouse of this job has had a higher term. Without the bound, a forged quorum could use up all ids.
		if TermOf(p.ID) > s.term {
			s.do(Doubted{e.From, fmt.Sprintf("it shows quorum %d of term %d: the term here is %d", p.ID, TermOf(p.ID), s.term)})
			return false
		}
		if r := s.roster.members[e.From]; r != nil {
			r.unshown = false
		}
	}
	s.past.highest, s.past.floor = max(s.past.highest, p.ID), max(s.past.floor, min(e.Highest, maxKnownID))
	if p.ID <= s.past.latestID() {
		if r := s.roster.members[e.From]; p.ID == s.past.latestID() && r != nil && r.previous {
			s.past.shown(p)
		}
		return false
	}
	s.past.adopt(p)
	s.past.least = e.From == ""
	if s.id <= p.ID {
		s.wanted = wanted{}
	}
	return true
}
