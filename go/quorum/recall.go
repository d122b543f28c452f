package quorum

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// search looks for a quorum that a member knows and this lighthouse does not: the member is asked for it (Recall), and shows it
// (Recalled) or not.
//
// Invariants:
//
//  1. Nothing is decided while a member is about to show a later quorum: while one that waits knows of it, or, at a
//     lighthouse of a list, the one that was asked is alive and had less than heartbeat_timeout_ms to show it. Alone, a lighthouse
//     goes on in the end, although one that knows waits: nobody else can have served the job meanwhile.
//  2. One of a list goes on without those that do not show it (disbelieve): they are in no quorum here, and give no vote. So it is with
//     a member that was silent meanwhile, and speaks again (ahead). Once nobody that knows is left here, the votes alone keep two
//     histories apart (succession.go).
//  3. A quorum is believed that a member shows that was in it, or the disk, within the bounds of what was seen before (recalled).
type search struct {
	*core
	past  *memory
	list  *succession
	terms *terms
	recall
}

// recall is the quorum that is looked for.
type recall struct {
	id    int64     // the newest such quorum, 0 if there is none
	since time.Time // when it was first heard of
	asked time.Time // when a member was last asked
	by    string    // which one
}

const (
	// recallPause is how long a member that was asked for a quorum may take before another one is, or it once more.
	recallPause = time.Second
	// mostRecalls is how often a member is asked for a quorum that it knows, before what it says of it counts no more.
	mostRecalls = 3
)

// recallPause is shorter where a heartbeat timeout has no room for all the questions.
func (p Policy) recallPause() time.Duration {
	return min(recallPause, p.HeartbeatTimeout/(mostRecalls+2))
}

// claim is what a member knows of a later quorum, as it says, and did not show.
type claim struct {
	latest  int64     // the latest that it was asked for
	recalls int       // how often it was asked for it
	second  time.Time // when it was for the second time, or for the only one
	last    time.Time // and for the last time
	unshown bool      // it has spoken since, and it was asked often enough: it is not believed until it shows it
	doubted bool      // it did not show what it claimed before
}

// over ends a claim because the lighthouse knows as late a quorum by now. A member that was asked for it in vain is asked only once for
// what it claims next: with a new number for each quorum, it would hold up the others for three questions each time.
func (c *claim) over() {
	if *c = (claim{doubted: c.doubted || c.unshown}); c.doubted {
		c.recalls = mostRecalls - 1
	}
}

// asked counts a question to the member, unless the one before was a moment ago.
func (c *claim) asked(now time.Time, pause time.Duration) {
	if now.Sub(c.last) < pause {
		return
	}
	c.last = now
	if c.recalls++; c.recalls >= 2 && c.second.IsZero() {
		c.second = now
	}
}

// unanswered reports that it was asked often enough. A member that is stopped says nothing at all, and may show the quorum when it goes on.
func (c *claim) unanswered(spoke, now time.Time, pause time.Duration) bool {
	return c.recalls >= mostRecalls && now.Sub(c.last) >= pause && spoke.After(c.second)
}

// doubt says why a request is refused that claims to know a quorum, and cannot show it; empty if it is taken. Believed, one wrong
// number would raise the ids of the job for good.
func (s *search) doubt(e Asked) string {
	if id := e.KnownQuorumID; e.Recallable && id <= maxKnownID || s.past.plausible(id, s.list.term) {
		return ""
	}
	return fmt.Sprintf("known_quorum_id of replica %s is %d: it is far ahead of this lighthouse's clock (%d), and the request does not show that quorum",
		e.Member.ReplicaID, e.KnownQuorumID, s.now.UnixMilli())
}

// heard notes which quorum a member knows, and asks for it if it is a newer one, unless another member was asked a moment ago.
func (s *search) heard(r *replica, known int64) {
	if known <= s.past.latestID() {
		if r.latest <= s.past.latestID() { // else one that claims it in every other message would hold up each quorum of the others
			r.over()
		}
		return
	}
	switch {
	case known > maxKnownID:
		return
	case r.unshown: // nobody waits for it; but if it shows that quorum now, it counts
		s.do(Recall{r.id, known})
		return
	case r.unanswered(s.now, s.now, s.policy.recallPause()): // it greets again and again, and does not ask
		r.unshown = true
		s.do(Doubted{r.id, notShown(known)})
		return
	case known <= s.id: // somebody is being asked for it, or for a later one
		return
	}
	if s.past.latest == nil && s.list.listed() {
		s.past.rumor = Voter{ReplicaID: r.id} // the job had a quorum: newcomers do not begin it again (votes.lacking)
	}
	if s.id == 0 {
		s.since = s.now
	}
	s.ask(r, known)
}

// ask asks a member for the quorum that it knows.
func (s *search) ask(r *replica, known int64) {
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
	var best *replica
	for e := s.roster.queue.Front(); e != nil; {
		r := e.Value.(*replica)
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
	switch r := s.roster.replicas[s.by]; {
	case newest == 0 && s.list.listed() && r != nil && r.alive() && !r.unshown && since < s.policy.HeartbeatTimeout:
		return // it greeted, and is in the middle of a step
	case newest == 0:
		s.recall = recall{}
		return
	case newest == s.id && since < pause:
		return
	}
	s.ask(best, newest)
}

// pending reports whether a decision has to wait until a member has shown its quorum. Alone, a lighthouse goes on in the
// end: nobody else can have done so in the meantime.
func (s *search) pending(now time.Time) bool {
	return s.id > s.past.latestID() && (s.list.listed() || now.Sub(s.since) < s.policy.HeartbeatTimeout)
}

// ahead is a quorum that one of some members knows of and this lighthouse of a list does not, 0 if there is none. Such a member gives no
// vote, even when nobody looks for that quorum any more: the search ends with a member that is silent, and its request waits when it
// speaks again.
func (s *search) ahead(in []*replica) (id int64) {
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

// disbelieve ignores a quorum that a member claims to know and does not show, although it speaks. At a lighthouse of a list, the member
// must not vote without showing it (succession.go, invariant 3): it is refused by name, and sent on, since another lighthouse may know
// that quorum. So one member with a wrong number stops nobody else. A lighthouse alone lets the member in.
func (s *search) disbelieve(r *replica, known int64) {
	r.unshown = true
	s.do(Doubted{r.id, notShown(known)})
	if !s.list.listed() {
		return
	}
	s.list.release(r.id, s.now) // before it is sent on
	reason := "replica " + r.id + " is not believed: " + notShown(known)
	s.refuseAll(r, Unshown, reason)
	s.turnDown(r.id, Unshown, reason)
}

// unshown says why a request is refused of a member that is not believed; empty if it is taken. A member that was asked often
// enough, and asks again after its request had ended, is one from here on: taken in, it would give a vote without what it knows.
func (s *search) unshown(e Asked) string {
	r := s.roster.replicas[e.Member.ReplicaID]
	if r == nil || !s.list.listed() || !e.Recallable || e.KnownQuorumID <= s.past.latestID() {
		return ""
	}
	if r.unshown = r.unshown || r.unanswered(s.now, s.now, s.policy.recallPause()); !r.unshown {
		return ""
	}
	s.list.release(r.id, s.now)
	return "replica " + r.id + " is not believed: " + notShown(e.KnownQuorumID)
}

func notShown(known int64) string {
	return fmt.Sprintf("it knows of quorum %d, as it says, and did not show it", known)
}

// delivered ends the search: a quorum was formed although a later one was looked for.
func (s *search) delivered(id int64) {
	if s.id <= id {
		return
	}
	s.do(Doubted{s.by, notShown(s.id)})
	if r := s.roster.replicas[s.by]; r != nil {
		r.unshown = true // the next quorum does not wait for it again
	}
	s.recall = recall{}
}

// recalled takes in a quorum that was formed elsewhere, or before the start, and reports whether it is the latest one now.
func (s *search) recalled(e Recalled) (adopted bool) {
	p := e.Past
	s.list.remember(e.Seat)
	if p.Validate() != nil {
		if e.From == "" && p.ID == 0 && len(p.Members) == 0 { // of a training that has ended
			s.past.highest = max(s.past.highest, min(e.Highest, maxKnownID))
		}
		return false
	}
	// Only a member of a quorum can show it. Believed, a stranger could make up a past in which it alone votes.
	if _, in := slices.BinarySearchFunc(p.Members, e.From, func(v Voter, id string) int { return strings.Compare(v.ReplicaID, id) }); e.From != "" && !in {
		s.do(Doubted{e.From, fmt.Sprintf("it shows quorum %d, and was not in it", p.ID)})
		return false
	}
	// Alone, there is no term to go by, and nobody can have got further than this: so no forged past takes all ids.
	if seen := termOf(s.past.highest); !s.list.listed() && e.From != "" && termOf(p.ID) > seen+termReach {
		s.do(Doubted{e.From, fmt.Sprintf("it shows quorum %d of term %d: the highest that was seen here is %d", p.ID, termOf(p.ID), seen)})
		return false
	}
	switch beyond := s.list.listed() && termOf(p.ID) > s.list.term; {
	case beyond && e.From == "":
		// A quorum from the own disk needs no member that shows it. It begins a term of its own, since that of the quorum may belong
		// to another lighthouse. Where the disk answered late, members have asked already: that counts no more, as with every new term.
		s.terms.begin("what is on disk", termOf(p.ID))
	case beyond:
		r := s.roster.replicas[e.From]
		if r == nil || r.farTerm < termOf(p.ID) {
			s.do(Doubted{e.From, fmt.Sprintf("it shows quorum %d of term %d: the term here is %d", p.ID, termOf(p.ID), s.list.term)})
			return false
		}
		s.terms.begin("replica "+r.id, r.farTerm)
	}
	s.past.highest = max(s.past.highest, p.ID, min(e.Highest, maxKnownID))
	if p.ID <= s.past.latestID() {
		return false
	}
	s.past.adopt(p)
	if r := s.roster.replicas[e.From]; r != nil {
		r.claim = claim{}
	}
	if s.id <= p.ID {
		s.recall = recall{}
	}
	return true
}
