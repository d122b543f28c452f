package quorum

import "fmt"

// terms handles greetings: from them a lighthouse learns its place in the list, and the terms of other lighthouses.
//
// Invariants:
//
//  1. All members that have a stream have received the term. A new term ends all other streams, and all requests of members that
//     use streams (begin): such a request counts only in the term in which it was made. Otherwise it could be answered after its
//     member went to another lighthouse.
//  2. The term is above all terms that members know. Terms far ahead of all that were seen here are refused (overreaches), so that
//     one wrong number does not use up the terms.
type terms struct {
	*core
	past *memory
	list *succession
}

const (
	// termReach is how far a member's term may be ahead of all terms that this lighthouse has seen. A term begins each time that a
	// member goes from one lighthouse to another. A member further ahead has to show a quorum of about that term.
	termReach = 1 << 12
	// maxClaimedTerm is the highest term that a member may claim. It leaves room for later terms.
	maxClaimedTerm = maxTerm - termReach
)

// knownTerm returns the highest term that a member knows. A member that received its quorum by a call was sent no term: it knows
// only that of the quorum's id.
func (e Greeted) knownTerm() int64 { return max(e.Term, termOf(e.KnownQuorumID)) }

// admit accepts or refuses a member's stream. If the stream is accepted, and the lighthouse is one of a list, it returns the
// member: greeted then handles the member's term, and welcomes the member.
func (t *terms) admit(e Greeted) *record {
	t.list.back(e.ReplicaID) // the member has not ended: its vote comes with its next request
	// The refusal comes before the seat is accepted and before the greeting counts as a sign of life. With a seat of a member that is
	// refused, this lighthouse could begin a job that is served elsewhere; and the others would wait for a member without a stream.
	if listed := e.Seat.Of > 1 || e.Seat.Of == 0 && t.list.listed(); listed {
		if refusal := t.overreaches(e); refusal != "" {
			t.do(RefuseStream{e.ReplicaID, refusal})
			return nil
		}
	}
	others := t.roster.counts.healthy
	if r := t.roster.members[e.ReplicaID]; r != nil && r.alive() {
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

// greeted handles the term that a member knows.
func (t *terms) greeted(r *record, e Greeted) {
	t.list.greets(e.ReplicaID, e.KnownQuorumID, e.knownTerm() > t.list.term, t.now)
	if r.farTerm = 0; t.far(e) {
		r.farTerm = e.knownTerm() // it begins when the member has shown the quorum (search.recalled)
	} else {
		t.begin("member "+e.ReplicaID, e.knownTerm())
	}
	t.welcome(r)
}

func (t *terms) welcome(r *record) {
	w := Welcome{ReplicaID: r.id, Term: t.list.term, Draining: r.draining}
	if t.list.listed() {
		w.Bond = BondTime
	}
	t.do(w)
}

// begin starts a new term. All streams end, so that all members learn of it when they open new ones: also members that count as failed,
// since they may still send requests on their streams.
func (t *terms) begin(with string, known int64) {
	if !t.list.begin(known, t.past.highest, t.now) {
		return
	}
	t.past.highest = max(t.past.highest, t.list.firstID(t.now))
	reason := fmt.Sprintf("term %d begins with %s", t.list.term, with)
	t.do(Renew{reason})
	t.roster.reachNothing() // the members report again on their new streams which lighthouses they reach
	t.outdate(func(q request) bool { return q.recallable }, reason)
}

// overreaches returns the reason to refuse a greeting whose term is far ahead of all that were seen here; empty if it is accepted.
// Such a greeting is accepted if the member knows a quorum of about that term, which it then has to show (far).
func (t *terms) overreaches(e Greeted) (refusal string) {
	switch known := e.knownTerm(); {
	case known > maxClaimedTerm:
		return fmt.Sprintf("member %s claims term %d: the largest is %d", e.ReplicaID, known, int64(maxClaimedTerm))
	case t.far(e) && termOf(e.KnownQuorumID)+termReach < known:
		return fmt.Sprintf("member %s claims term %d, and knows of no quorum of about that term; the highest that was seen here is %d",
			e.ReplicaID, known, t.seen())
	}
	return ""
}

// far reports whether a member's term begins here only once the member has shown a quorum of about that term.
func (t *terms) far(e Greeted) bool { return e.knownTerm() > t.seen()+termReach }

// seen returns the highest term that was seen here.
func (t *terms) seen() int64 { return max(t.list.term, termOf(t.past.highest)) }
