package quorum

import (
	"fmt"
	"slices"
	"time"
)

// A job may have a list of lighthouses. They do not communicate with each other, and each member asks one at a time. One rule keeps
// two of them from serving the job at once, and all of it is in this file and in bond.go:
//
//	A lighthouse continues after the last quorum that it knows only with the votes of more than half of that quorum's
//	members, or of half of them with the first by replica_id; and likewise for each quorum in its base. A member votes by
//	asking here, or by having ended while it was bound to this lighthouse.
//
// Invariants:
//
//  1. Two sets of members that have the votes share a member: of two halves, only one includes the first member.
//  2. A member votes at one lighthouse at a time. By asking another lighthouse it withdraws its earlier request: a quorum that is still
//     formed with the withdrawn request has a lower term, and the member never receives it. A member that ended while it was bound
//     asks no lighthouse any more (bond.go). The vote of an ended member counts for one branch only: the first quorum that is
//     formed with it records it in its base (spend).
//  3. A quorum commits a step only after all of its members have received it: they meet in one process group, and a missing member
//     fails the step of the others. So each member of a quorum that committed shows that quorum when it votes later.
//  4. The members that have received a quorum cannot alone outvote the members of the quorums before it, its base: joint consensus,
//     as when Raft changes its members. A quorum stays in the base of all later ones until members that know a later one outvote
//     it, together with votes that were given before that later one was formed. No quorum may be left out in between: if branch A
//     dropped a quorum and kept the quorum before it, and branch B the other way round, A and B could have no member in common. So
//     the base may hold several quorums, up to a size (tooLong); beyond it the members stay the same until more of them know the
//     latest quorum.
//
// So of two quorums that both commit, the second is a successor of the first. The end of a member is no vote by itself: the member may
// have been in a later quorum elsewhere. proof.go has the proof, and modelcheck_test.go checks all short histories.
type succession struct {
	seat Seat
	disk bool  // the seat was read from disk, and no member has reported one yet
	term int64 // see begin
	bonds
	waived map[string]struct{} // voters that an operator waived, by replica_id
}

// Seat is a lighthouse's place in the list that the members of a job have.
type Seat struct {
	Place int // from 0
	Of    int // length of the list; 0: not reported, 1: the member knows one lighthouse
}

// String describes the seat in words.
func (s Seat) String() string {
	if s.Of <= 1 {
		return "the only one"
	}
	return fmt.Sprintf("number %d of %d", s.Place+1, s.Of)
}

// termBits are the bits of a quorum_id below its term: milliseconds since 1970 until the year 2109.
const termBits = 42

func termOf(id int64) int64 { return id >> termBits }

// TermOf returns the term in which a quorum was formed: the high bits of its id.
func TermOf(id int64) int64 { return termOf(id) }

// maxTerm is the largest term: ids in it do not exceed maxKnownID.
const maxTerm = maxKnownID >> termBits

// listed reports whether the job has a list of lighthouses: then others may serve it.
func (s *succession) listed() bool { return s.seat.Of > 1 }

// sit accepts the seat that this lighthouse has in a member's list, or returns the reason for a refusal: the other members have another
// list.
//
// A new list is accepted if no other member is alive here: so an operator who ends all groups of a job can give them another
// list, without a restart of the lighthouses. This relies on an assumption of docs/correctness.md: no group begins with another
// list while groups with the old one train, here or at another lighthouse. Otherwise both lists could serve the job.
func (s *succession) sit(id string, seat Seat, others bool) (refusal string) {
	switch {
	case seat.Of == 0:
		// The member reports no seat (upstream members do not): the seat that others have reported stays. If such a member counted
		// as reporting an only lighthouse, a quorum could be formed with it here while another lighthouse serves the rest.
	case s.seat.Of != 0 && others && !s.disk && seat != s.seat:
		return fmt.Sprintf("for member %s this lighthouse is %s, for the others %s: TORCHFT_LIGHTHOUSE must be the same for all groups of a job",
			id, seat, s.seat)
	default:
		s.seat, s.disk = seat, false
	}
	return ""
}

// remember takes the seat from the disk, until a member reports one. Without it, a restarted lighthouse would take itself for the only
// one if an upstream group, which reports no seat, asks first: it could continue with that group while the others are elsewhere.
func (s *succession) remember(seat Seat) {
	if s.seat.Of == 0 && seat.Of != 0 {
		s.seat, s.disk = seat, true
	}
}

// begin sets a term above the highest term that a member has received from other lighthouses (known), and not below the term of the
// highest id here. It reports whether the term is new. Lighthouses use different terms, depending on their places in the list, and
// an id begins with its term. So after a member has come from another lighthouse, the quorums here have higher ids than any that
// the other one still forms with the member's earlier request.
func (s *succession) begin(known, highest int64, now time.Time) (begun bool) {
	least := max(s.term, termOf(highest))
	if known > s.term {
		least = max(least, known+1)
	}
	of, place := int64(s.seat.Of), int64(s.seat.Place)
	term := least + (place-least%of+of)%of
	if term == s.term {
		return false
	}
	s.term = term
	s.releaseAll(now) // all streams end, and their members may go elsewhere
	return true
}

// firstID returns the id after which the ids of the term begin.
func (s *succession) firstID(now time.Time) int64 {
	return s.term<<termBits + min(max(now.UnixMilli(), 0), 1<<termBits-1<<32) // the bound leaves room for later ids if the clock is wrong
}

// A base holds more than one quorum only if the members change again before enough of them know the previous quorum. It may hold
// mostBases quorums of any size, or more of them with at most mostVoters members together. So a job of some hundred groups never
// waits because of this bound, and one of thousands does not send megabytes with each quorum.
const (
	mostBases  = 4
	mostVoters = 1 << 14
)

// tooLong reports whether a base exceeds these bounds.
func tooLong(base [][]Voter) bool {
	voters := 0
	for _, set := range base {
		voters += len(set)
	}
	return len(base) > mostBases && voters > mostVoters
}

// outvotes reports whether the members of a set that count are a majority of it: more than half, or half with the first one.
func outvotes(set []Voter, counts func(Voter) bool) bool {
	n, first := 0, false
	for i, v := range set {
		if counts(v) {
			n++
			first = first || i == 0
		}
	}
	return 2*n > len(set) || 2*n == len(set) && first
}

// given reports whether a vote is given for good: the member ended while it was bound, to this lighthouse or (v.Given, from the
// base) to the one that formed the latest quorum; or an operator waived its vote.
func (s *succession) given(v Voter) bool {
	_, ended := s.ended[v.ReplicaID]
	_, waived := s.waived[v.ReplicaID]
	return v.Given || ended || waived
}

// shortfall is a set of members too few of which vote here.
type shortfall struct {
	base    bool // the set is from the base of the quorum
	set     []Voter
	votes   int
	missing []Voter
}

// shortfalls returns the sets that the asking members do not outvote. If there are none, a quorum may be formed after p.
func (s *succession) shortfalls(p Past, asks func(id string) bool) (short []shortfall) {
	for i, set := range p.sets() {
		votes := func(v Voter) bool { return asks(v.ReplicaID) || s.given(v) }
		if outvotes(set, votes) {
			continue
		}
		f := shortfall{base: i > 0, set: set}
		for _, v := range set {
			if votes(v) {
				f.votes++
			} else {
				f.missing = append(f.missing, v)
			}
		}
		short = append(short, f)
	}
	return short
}

func (f shortfall) describe(id int64) string {
	of := fmt.Sprintf("quorum %d", id)
	if f.base {
		of = "a quorum before " + of + ", which few of them know of,"
	}
	missing := make([]string, len(f.missing))
	for i, v := range f.missing {
		missing[i] = v.ReplicaID
	}
	return fmt.Sprintf("%d of %s of %s have a vote here: more than half are needed, or half with %s; another lighthouse might serve %s",
		f.votes, members(len(f.set)), of, f.set[0].ReplicaID, names(missing))
}

// baseAfter returns the base of the next quorum: the sets that the quorum after the next must outvote, besides the members of
// the next one. The next quorum comes after p; changed says whether its members differ from p's. knows reports which of its
// members show that they know p.
//
// A set of the base is dropped when members that know p outvote it, together with votes that went to p or to a quorum before it: a
// quorum that is formed elsewhere with the votes of that set then either has a lower id than p, or comes after p. Until then,
// members that do not know p may continue after that set elsewhere. A vote that is given only now does not count here: before its
// member was bound to this lighthouse it may have asked another one, for a quorum that has a higher id than p and does not come
// after p.
//
// The members of p are added, since p may have committed too: another lighthouse may continue after p with their votes. If the
// quorum after the next did not need their votes as well, the two quorums could have no voter in common.
func (s *succession) baseAfter(p Past, changed bool, knows func(id string) bool) (base [][]Voter) {
	for _, set := range p.Base {
		if outvotes(set, func(v Voter) bool { return knows(v.ReplicaID) || v.Given }) {
			continue
		}
		base = append(base, set)
	}
	if changed {
		base = append(base, p.Members)
	}
	for i, set := range base {
		base[i] = slices.Clone(set)
		for j := range set {
			base[i][j].Given = s.given(set[j])
		}
	}
	return base
}

// waive counts the vote of a missing member as given, because an operator states that the member has ended. The proof does not
// cover it: if the member still trains at another lighthouse, or others that were in a later quorum with it do, two lighthouses
// serve the job at once.
func (s *succession) waive(id string) {
	if s.waived == nil {
		s.waived = map[string]struct{}{}
	}
	s.waived[id] = struct{}{}
}

// back withdraws the vote that a member gave by ending: a member that sends something has not ended.
func (s *succession) back(id string) {
	delete(s.ended, id)
	delete(s.waived, id)
}

// spend drops the votes that were given here, once a quorum was formed with them: its base carries them (Given) to its successors.
// If this lighthouse learns of another quorum that does not come after that one, the votes must not count again: two branches would
// each have the same vote, and share no member that knows both.
func (s *succession) spend() {
	clear(s.ended)
	clear(s.waived)
}

// keep drops the votes of ended and waived members for which votes is false: these members have no vote on the next quorum.
func (s *succession) keep(votes func(id string) bool) {
	for _, set := range []map[string]struct{}{s.ended, s.waived} {
		for id := range set {
			if !votes(id) {
				delete(set, id)
			}
		}
	}
}

func members(n int) string {
	if n == 1 {
		return "1 member"
	}
	return fmt.Sprintf("%d members", n)
}
