package quorum

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// search looks for a round that this lighthouse does not know and that a member claims to have received:
// after a restart, its members know the last quorum. The lighthouse asks the member for that quorum (Recall),
// and the member shows it (Recalled) or does not. (A leader of a cluster knows the latest quorum from the
// log, so no member can show it a quorum with a later id; but the log does not have the rounds of the quorum,
// since nothing is written while the members stay the same.)
//
// Invariants:
//
//  1. For heartbeat_timeout_ms after the first claim, no quorum is formed while a member with a pending
//     request, or of the adopted quorum, may still show the claimed round. Otherwise the job would continue
//     from an older quorum, or call again a round that the member is in and in which it waits for its peers
//     (redeliver.go). After that time it continues without the claimed one: no other lighthouse can have
//     served the job meanwhile.
//  2. Decisions wait only once for a member that does not show the round that it claims (unshown), whatever
//     number it claims next. It is in the next quorum all the same, and may still show the one that it
//     claims.
//  3. A quorum is accepted from the disk, or from a member that was in it, if its term is not above this
//     lighthouse's. A later round of the latest quorum is accepted from a member of it, if the quorum was
//     adopted and the members are the same.
type search struct {
	*core
	past *memory
	wanted
}

// wanted describes the round that the search looks for.
type wanted struct {
	round Claim     // the latest one that is claimed, zero if there is no search
	since time.Time // when a round was first claimed
	asked time.Time // when a member was last asked
	by    string    // the member that was asked last
}

// recallPause is how long a member that was asked for a quorum may take before it is asked again, or another
// member is.
const recallPause = time.Second

// recallPause returns the constant of that name, or less: several recalls must fit into the heartbeat
// timeout.
func (p Policy) recallPause() time.Duration { return min(recallPause, p.HeartbeatTimeout/5) }

// doubt returns the reason to refuse a request whose quorum id is not plausible and whose sender cannot be
// asked to show that quorum; empty if the request is accepted. Quorum ids never decrease: if a wrong number
// were accepted, it would raise the ids of the job for good.
func (s *search) doubt(e Asked) string {
	if id := e.KnownQuorumID; e.Recallable && id <= maxKnownID || s.past.plausible(id) {
		return ""
	}
	return fmt.Sprintf("known_quorum_id of member %s is %d: it is far ahead of this lighthouse's clock "+
		"(%d), and the request does not show that quorum",
		e.Member.ReplicaID, e.KnownQuorumID, s.clock(s.now).UnixMilli())
}

// claimed handles the round that a member claims to know: if it is later than the latest here, the member is
// asked for its quorum, unless a member is already being asked for that round or for a later one.
func (s *search) claimed(r *record, known Claim) {
	if known.QuorumID != r.claim.QuorumID || known.Step != math.MinInt64 {
		r.claim = known
	}
	switch {
	case !s.claims(r):
	case r.unshown:
		// decisions do not wait for this member any more, but it may still show the quorum that it claims
		s.do(Recall{r.id, r.claim.QuorumID})
	case r.claim.Newer(s.round):
		s.ask(r)
	}
}

// claims reports whether a member claims a later round than the latest here. Only its members can know a
// round of the latest quorum.
func (s *search) claims(r *record) bool {
	c := r.claim
	return c.QuorumID <= maxKnownID && c.Newer(s.past.round()) &&
		(r.previous || c.QuorumID > s.past.latestID())
}

// ask asks a member for the quorum that it knows.
func (s *search) ask(r *record) {
	if !s.searching() {
		s.since = s.now
	}
	s.round, s.asked, s.by = r.claim, s.now, r.id
	s.do(Recall{r.id, r.claim.QuorumID})
}

// searching reports whether there is a search.
func (s *search) searching() bool { return s.round != Claim{} }

// each calls do for the members whose claims count, as long as they may show what they claim: those with a
// pending request, and those of the adopted quorum, which may be training. A greeting of any other member is
// not enough: it may never show its quorum.
func (s *search) each(do func(r *record)) {
	visit := func(r *record) {
		if !r.unshown && s.claims(r) {
			do(r)
		}
	}
	for e := s.roster.queue.Front(); e != nil; e = e.Next() {
		visit(e.Value.(*record))
	}
	if s.past.adopted {
		for _, r := range s.past.members {
			if r.alive() && !r.waiting() {
				visit(r)
			}
		}
	}
}

// tick asks another member for the quorum if the one that was asked did not answer.
func (s *search) tick() {
	if s.searching() {
		s.look()
	}
}

// look asks one of the members that claim the latest round, if that has not been done. The search ends if
// none claims a later round.
func (s *search) look() {
	var best *record
	s.each(func(r *record) {
		if best == nil || r.claim.Newer(best.claim) || r.claim == best.claim && best.id == s.by {
			// the members that know it are asked in turn
			best = r
		}
	})
	switch {
	case best == nil:
		s.wanted = wanted{}
	case best.claim != s.round || s.now.Sub(s.asked) >= s.policy.recallPause():
		s.ask(best)
	}
}

// open reports whether a member has claimed a later round and has not shown it.
func (s *search) open() bool { return s.round.Newer(s.past.round()) }

// pending reports whether a decision has to wait until a member has shown its quorum (invariant 1).
func (s *search) pending(now time.Time) bool {
	return s.open() && now.Sub(s.since) < s.policy.HeartbeatTimeout
}

// delivers ends the search before a quorum is delivered: what members claim now was not shown in time.
func (s *search) delivers() {
	if !s.searching() {
		return
	}
	s.each(func(r *record) {
		r.unshown = true
		s.doubts(r.id, "it claims to know of quorum %d, and did not show it", r.claim.QuorumID)
	})
	s.wanted = wanted{}
}

func (s *search) doubts(id, why string, about ...any) {
	s.do(Report{What: ClaimDoubted, ReplicaID: id, Reason: fmt.Sprintf(why, about...)})
}

// recalled handles a quorum that a member shows (From), or that was read from disk or from the log at the
// start (From is empty). It reports whether the latest quorum has another id now.
func (s *search) recalled(e Recalled) (adopted bool) {
	p, q := e.Past, e.Quorum
	if e.From == "" {
		q, s.past.end = p.remembered(s.clock(s.now)), e.End
	} else {
		p = q.Past()
	}
	if p.Validate() != nil {
		if e.From == "" && p.ID == 0 && len(p.Members) == 0 {
			// the training was complete: only the highest id is known
			s.past.floor = max(s.past.floor, min(e.Highest, maxKnownID))
		}
		return false
	}
	if e.From != "" {
		// Only a member of a quorum may show it: otherwise any process could make up a quorum of itself
		// alone.
		if _, in := q.Place(e.From); !in {
			s.doubts(e.From, "it shows quorum %d, and was not in it", p.ID)
			return false
		}
		// No lighthouse of this job has had a higher term. Without the bound, a forged quorum could use up
		// all ids.
		if TermOf(p.ID) > s.term {
			s.doubts(e.From, "it shows quorum %d of term %d: the term here is %d", p.ID, TermOf(p.ID), s.term)
			return false
		}
		if r := s.roster.members[e.From]; r != nil {
			r.unshown, r.claim = false, q.Round()
		}
	}
	s.past.highest, s.past.floor = max(s.past.highest, p.ID), max(s.past.floor, min(e.Highest, maxKnownID))
	switch latest := s.past.latest; {
	case p.ID > s.past.latestID():
		s.past.adopt(q)
		s.past.bare = e.From == ""
		adopted = true
	case e.From == "" || !q.Round().Newer(s.past.round()):
		return false
	case !slices.EqualFunc(q.Members, latest.Members,
		func(a, b Member) bool { return a.ReplicaID == b.ReplicaID }):
		s.doubts(e.From, "it shows quorum %d with other members than those of that quorum", p.ID)
		return false
	default:
		s.past.shown(q)
	}
	if !s.open() {
		s.wanted = wanted{}
	}
	s.look() // members of this quorum, which may be training, may claim a later round
	return adopted
}
