package quorum

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// search looks for a quorum that this lighthouse does not know and whose id a member claims to know. The lighthouse asks the member
// for the list of that quorum's members (Recall), and the member shows the quorum (Recalled) or does not.
//
// Invariants:
//
//  1. No quorum is formed while a member may still show a later one: while a member that knows it has a pending request, or, at a
//     lighthouse of a list, the member that was asked is alive and has had less than heartbeat_timeout_ms to show it. A lighthouse
//     without a list continues after that time even if such a request is pending: no other one can have served the job meanwhile.
//  2. A lighthouse of a list continues without the members that do not show the quorum (disbelieve): they are in no quorum here,
//     and give no vote. The same holds for a member that was silent during the search and asks again (ahead). Once no member that
//     knows the later quorum is left here, the votes alone keep two lighthouses from serving the job at once (succession.go).
//  3. A quorum is accepted from the disk, or from a member that was in it, if its id is within the bounds that recalled checks.
type search struct {
	*core
	past  *memory
	list  *succession
	terms *terms
	recall
}

// recall describes the quorum that the search looks for.
type recall struct {
	id    int64     // of the latest claimed quorum, 0 if there is no search
	since time.Time // when it was first claimed
	asked time.Time // when a member was last asked
	by    string    // the member that was asked last
}

const (
	// recallPause is how long a member that was asked for a quorum may take before it is asked again, or another member is.
	recallPause = time.Second
	// mostRecalls is how often a member is asked for a quorum that it claims to know, before the claim is ignored.
	mostRecalls = 3
)

// recallPause returns the constant of that name, or less: mostRecalls recalls must fit into the heartbeat timeout.
func (p Policy) recallPause() time.Duration {
	return min(recallPause, p.HeartbeatTimeout/(mostRecalls+2))
}

// claim is a member's claim to know a later quorum, which it has not shown yet.
type claim struct {
	latest  int64     // id of the latest quorum that the member was asked for
	recalls int       // how often it was asked for a quorum
	second  time.Time // time of the second recall, or of the only one if the member gets just one (over)
	last    time.Time // time of the last recall
	unshown bool      // asked mostRecalls times, the member did not show the quorum although it is alive: the claim is ignored
	doubted bool      // an earlier claim of the member was ignored
	broke   bool      // its stream broke after a recall: it is asked once more
}

// over ends a claim: by now the lighthouse knows a quorum that is at least as late. A member that did not show the claimed quorum
// is asked only once for the next one: otherwise a member that claims a new number after each quorum would delay every quorum of
// the others by three recalls.
func (c *claim) over() {
	if *c = (claim{doubted: c.doubted || c.unshown}); c.doubted {
		c.recalls = mostRecalls - 1
	}
}

// disconnected allows one more recall on the member's next stream: recalls on the broken stream, or the answers to them, may have
// been lost. A claim gets this only once: a member that keeps reconnecting must not delay the others for good.
func (c *claim) disconnected() {
	if c.recalls > 0 && !c.broke && !c.unshown {
		c.broke, c.recalls = true, min(c.recalls, mostRecalls-1)
	}
}

// asked counts a recall, unless the previous one was less than a pause ago.
func (c *claim) asked(now time.Time, pause time.Duration) {
	if now.Sub(c.last) < pause {
		return
	}
	c.last = now
	if c.recalls++; c.recalls >= 2 && c.second.IsZero() {
		c.second = now
	}
}

// unanswered reports whether the member was asked often enough, and was alive meanwhile: it has sent something since the second
// recall. A member that sends nothing may be stopped (SIGSTOP), and show the quorum when it continues.
func (c *claim) unanswered(spoke, now time.Time, pause time.Duration) bool {
	return c.recalls >= mostRecalls && now.Sub(c.last) >= pause && spoke.After(c.second)
}

// doubt returns the reason to refuse a request whose quorum id is not plausible and whose sender cannot be asked to show that quorum; empty
// if the request is accepted. Quorum ids never decrease: if a wrong number were accepted, it would raise the ids of the job for good.
func (s *search) doubt(e Asked) string {
	if id := e.KnownQuorumID; e.Recallable && id <= maxKnownID || s.past.plausible(id, s.list.term) {
		return ""
	}
	return fmt.Sprintf("known_quorum_id of member %s is %d: it is far ahead of this lighthouse's clock (%d), and the request does not show that quorum",
		e.Member.ReplicaID, e.KnownQuorumID, s.now.UnixMilli())
}

// claimed handles the quorum id that a member claims to know: if it is later than the latest here, the member is asked for that
// quorum, unless a member is already being asked for it or for a later one.
func (s *search) claimed(r *record, known int64) {
	if known <= s.past.latestID() {
		// A claim that is still open stays. Otherwise a member that repeats it in every other message would have its count of recalls
		// reset each time, and delay each quorum of the others.
		if r.latest <= s.past.latestID() {
			r.over()
		}
		return
	}
	switch {
	case known > maxKnownID:
		return
	case r.unshown: // decisions do not wait for this member any more, but it may still show the quorum that it claims
		s.do(Recall{r.id, known})
		return
	case r.unanswered(s.now, s.now, s.policy.recallPause()): // it sends greetings only: tick looks at members with a request
		r.unshown = true
		s.do(Doubted{r.id, notShown(known)})
		return
	case known <= s.id: // a member is being asked for it, or for a later one
		return
	}
	if s.past.latest == nil && s.list.listed() {
		s.past.rumor = Voter{ReplicaID: r.id} // the job has had a quorum: new members must not start it a second time (votes.lacking)
	}
	if s.id == 0 {
		s.since = s.now
	}
	s.ask(r, known)
}

// ask asks a member for the quorum that it knows.
func (s *search) ask(r *record, known int64) {
	r.asked(s.now, s.policy.recallPause())
	r.latest = max(r.latest, known)
	s.id, s.asked, s.by = known, s.now, r.id
	s.do(Recall{r.id, known})
}

// tick asks another member for the quorum if the one that was asked did not answer, and stops asking members that never answer. The
// search ends when no member is left that knows it.
func (s *search) tick() {
	if s.id == 0 && !s.list.listed() {
		return
	}
	pause := s.policy.recallPause()
	var newest int64
	var best *record
	for e := s.roster.queue.Front(); e != nil; {
		r := e.Value.(*record)
		e = e.Next() // a refusal takes r out of the queue
		switch q := r.newest(); {
		case !q.recallable || q.known <= s.past.latestID() || r.unshown && !s.list.listed():
		case r.unshown || r.unanswered(r.lastBeat, s.now, pause):
			s.disbelieve(r, q.known)
		case q.known > newest || q.known == newest && r.recalls < best.recalls:
			newest, best = q.known, r
		}
	}
	since := s.now.Sub(s.asked)
	switch r := s.roster.members[s.by]; {
	case newest == 0 && s.list.listed() && r != nil && r.alive() && !r.unshown && since < s.policy.HeartbeatTimeout:
		return // the member was asked because of its greeting, and has no request: it may be in the middle of a step
	case newest == 0:
		s.recall = recall{}
		return
	case newest == s.id && since < pause:
		return
	}
	s.ask(best, newest)
}

// pending reports whether a decision has to wait until a member has shown its quorum (invariant 1).
func (s *search) pending(now time.Time) bool {
	return s.id > s.past.latestID() && (s.list.listed() || now.Sub(s.since) < s.policy.HeartbeatTimeout)
}

// forgive extends the search by a time in which the lighthouse itself was stopped: the answer may have arrived meanwhile.
func (s *search) forgive(span time.Duration) {
	s.since, s.asked = later(s.since, span), later(s.asked, span)
}

// ahead returns the latest quorum id that one of these members knows and this lighthouse of a list does not; 0 if there is none.
// Such a member gives no vote, even after the search for its quorum has ended: the search ends when the member falls silent, but
// its request counts again as soon as it sends something.
func (s *search) ahead(in []*record) (id int64) {
	if !s.list.listed() {
		return 0
	}
	for _, r := range in {
		if q := r.newest(); q.recallable && q.known > s.past.latestID() {
			id = max(id, q.known)
		}
	}
	return id
}

// disbelieve ignores a member's claim of a quorum that it does not show, although it is alive. At a lighthouse of a list, the
// member must not vote without showing the quorum (succession.go, invariant 3): it is refused with a reason that names it, and sent
// to the next lighthouse, which may know that quorum. So a member with a wrong number does not stop the others. A lighthouse
// without a list accepts the member all the same.
func (s *search) disbelieve(r *record, known int64) {
	r.unshown = true
	s.do(Doubted{r.id, notShown(known)})
	if !s.list.listed() {
		return
	}
	s.list.release(r.id, s.now) // before the refusal, after which the member may ask another lighthouse (bond.go, invariant 2)
	reason := "member " + r.id + " is not believed: " + notShown(known)
	s.refuseAll(r, Unshown, reason)
	s.failRefused(r.id, Unshown, reason)
}

// unshown returns the reason to refuse a request of a member whose claim is ignored; empty if the request is accepted. If a member
// was asked mostRecalls times, its claim is ignored from its next request on. That request is refused: otherwise it would be a vote
// of a member that does not show the quorum that it knows.
func (s *search) unshown(e Asked) string {
	r := s.roster.members[e.Member.ReplicaID]
	if r == nil || !s.list.listed() || !e.Recallable || e.KnownQuorumID <= s.past.latestID() {
		return ""
	}
	if r.unshown = r.unshown || r.unanswered(s.now, s.now, s.policy.recallPause()); !r.unshown {
		return ""
	}
	s.list.release(r.id, s.now)
	return "member " + r.id + " is not believed: " + notShown(e.KnownQuorumID)
}

func notShown(known int64) string {
	return fmt.Sprintf("it claims to know of quorum %d, and did not show it", known)
}

// delivered ends the search: a quorum was formed although the search for a later one had not succeeded.
func (s *search) delivered(id int64) {
	if s.id <= id {
		return
	}
	s.do(Doubted{s.by, notShown(s.id)})
	if r := s.roster.members[s.by]; r != nil {
		r.unshown = true // the next quorum does not wait for it again
	}
	s.recall = recall{}
}

// recalled handles a quorum that a member shows (From), or that was read from disk at the start (From is empty). It reports whether
// that is the latest quorum now.
func (s *search) recalled(e Recalled) (adopted bool) {
	p := e.Past
	s.list.remember(e.Seat)
	if p.Validate() != nil {
		if e.From == "" && p.ID == 0 && len(p.Members) == 0 { // the training was complete: the disk has only the highest id
			s.past.highest = max(s.past.highest, min(e.Highest, maxKnownID))
		}
		return false
	}
	// Only a member of a quorum may show it: otherwise any process could make up a quorum of itself alone, and outvote all others.
	if _, in := slices.BinarySearchFunc(p.Members, e.From, func(v Voter, id string) int { return strings.Compare(v.ReplicaID, id) }); e.From != "" && !in {
		s.do(Doubted{e.From, fmt.Sprintf("it shows quorum %d, and was not in it", p.ID)})
		return false
	}
	// A lighthouse without a list has no terms to check against. All quorums of the job were formed here, so that none can be far
	// beyond the highest id that it has seen. Without the bound, a forged quorum could use up all ids.
	if seen := termOf(s.past.highest); !s.list.listed() && e.From != "" && termOf(p.ID) > seen+termReach {
		s.do(Doubted{e.From, fmt.Sprintf("it shows quorum %d of term %d: the highest that was seen here is %d", p.ID, termOf(p.ID), seen)})
		return false
	}
	switch beyond := s.list.listed() && termOf(p.ID) > s.list.term; {
	case beyond && e.From == "":
		// The quorum is from the disk, and another lighthouse may have formed it. So a term of this lighthouse begins above the
		// quorum's. If the disk was slow, members may have asked already: their requests end, as at the beginning of every term.
		s.terms.begin("what is on disk", termOf(p.ID))
	case beyond:
		r := s.roster.members[e.From]
		if r == nil || r.farTerm < termOf(p.ID) {
			s.do(Doubted{e.From, fmt.Sprintf("it shows quorum %d of term %d: the term here is %d", p.ID, termOf(p.ID), s.list.term)})
			return false
		}
		s.terms.begin("member "+r.id, r.farTerm)
	}
	s.past.highest = max(s.past.highest, p.ID, min(e.Highest, maxKnownID))
	if p.ID <= s.past.latestID() {
		if r := s.roster.members[e.From]; p.ID == s.past.latestID() && r != nil && r.previous {
			s.past.shown(p)
		}
		return false
	}
	s.past.adopt(p)
	s.past.least = e.From == ""
	if r := s.roster.members[e.From]; r != nil {
		r.claim = claim{}
	}
	if s.id <= p.ID {
		s.recall = recall{}
	}
	return true
}
