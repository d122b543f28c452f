package quorum

import "fmt"

// terms is what a lighthouse learns from greetings: where in the list it is, and which terms other lighthouses had.
//
// Invariants:
//
//  1. All members that have a stream have received the term. A new one ends all other streams and all requests (begin): a request counts
//     only in the term in which it was made. Else it could be answered after its member went to another lighthouse.
//  2. A term is above all that a member has heard of, but for those that are far ahead of all that were seen (overreaches): so one wrong
//     number spoils no terms.
type terms struct {
	*core
	past *memory
	list *succession
}

const (
	// termReach is how far a member may be ahead of all terms that this lighthouse has seen: a term for each time that somebody
	// went from one lighthouse to another since. A member further ahead has to show the quorum that it was in.
	termReach = 1 << 12
	// maxClaimedTerm is the highest term that a member may claim: after it there is room for others.
	maxClaimedTerm = maxTerm - termReach
)

// knownTerm is the highest term that a member knows of. One that got its quorum by a call has heard of none.
func (e Greeted) knownTerm() int64 { return max(e.Term, termOf(e.KnownQuorumID)) }

// admit lets a member's stream begin, or refuses it. At a lighthouse of a list it returns the replica, whose term is still to be taken in
// (greeted).
func (t *terms) admit(e Greeted) *replica {
	t.list.back(e.ReplicaID) // it has not ended: its vote comes with its next request
	// Refused before it takes the seat, or counts as a sign of life: with a seat that none of the members has, this lighthouse could
	// begin a job that lives elsewhere, and the others would wait for a member that can ask nothing without a stream.
	if listed := e.Seat.Of > 1 || e.Seat.Of == 0 && t.list.listed(); listed {
		if refusal := t.overreaches(e); refusal != "" {
			t.do(RefuseStream{e.ReplicaID, refusal})
			return nil
		}
	}
	others := t.roster.counts.healthy
	if r := t.roster.replicas[e.ReplicaID]; r != nil && r.alive() {
		others--
	}
	if refusal := t.list.sit(e.ReplicaID, e.Seat, others > 0); refusal != "" {
		t.do(RefuseStream{e.ReplicaID, refusal})
		return nil
	}
	r := t.roster.beat(e.ReplicaID, t.now)
	r.returned, r.ending, r.finished = true, false, false
	if !t.list.listed() {
		t.welcome(r)
		return nil
	}
	return r
}

// greeted takes in the term that a member knows.
func (t *terms) greeted(r *replica, e Greeted) {
	t.list.greets(e.ReplicaID, e.KnownQuorumID, e.knownTerm() > t.list.term, t.now)
	if r.farTerm = 0; t.far(e) {
		r.farTerm = e.knownTerm() // it begins when the member has shown the quorum (search.recalled)
	} else {
		t.begin("replica "+e.ReplicaID, e.knownTerm())
	}
	t.welcome(r)
}

func (t *terms) welcome(r *replica) {
	w := Welcome{ReplicaID: r.id, Term: t.list.term, Draining: r.draining}
	if t.list.listed() {
		w.Bond = BondTime
	}
	t.do(w)
}

// begin sees to it that all members hear of a new term: also those that count as failed, since they may speak again on the
// streams that they have.
func (t *terms) begin(with string, known int64) {
	if !t.list.begin(known, t.past.highest, t.now) {
		return
	}
	t.past.highest = max(t.past.highest, t.list.firstID(t.now))
	reason := fmt.Sprintf("term %d begins with %s", t.list.term, with)
	t.do(Renew{reason})
	t.roster.reachNothing() // they begin other streams, and say it again
	t.outdate(func(q request) bool { return q.recallable }, reason)
}

// overreaches says why a greeting is refused that claims a term far ahead of all that were seen; empty if it is not. If
// the member can show a quorum of about that term, it shall (far).
func (t *terms) overreaches(e Greeted) (refusal string) {
	switch known := e.knownTerm(); {
	case known > maxClaimedTerm:
		return fmt.Sprintf("replica %s claims term %d: the largest is %d", e.ReplicaID, known, int64(maxClaimedTerm))
	case t.far(e) && termOf(e.KnownQuorumID)+termReach < known:
		return fmt.Sprintf("replica %s claims term %d, and knows of no quorum of about that term; the highest that was seen here is %d",
			e.ReplicaID, known, t.seen())
	}
	return ""
}

// far reports whether a member claims a term that is believed only with a quorum of about that term.
func (t *terms) far(e Greeted) bool { return e.knownTerm() > t.seen()+termReach }

// seen is the highest term that was seen here.
func (t *terms) seen() int64 { return max(t.list.term, termOf(t.past.highest)) }
