package quorum

// suspicion gathers, for the latest quorum, which members lost a collective and which peers they suspect. A process group often does not
// know which peer broke; but a member that reports is alive, so that the suspects are those that do not.
//
// Invariants:
//
//  1. One member that reports, in error or by malice, evicts nobody: more than half of the others must report, and the suspect must
//     then fail to give a sign of life.
//  2. Each member counts once, and is checked once: what came of a check is not asked again in this quorum.
//  3. It is of one quorum. A report of an older one says nothing of the members of the next.
type suspicion struct {
	*core
	past *memory
	reports
}

// reports are those of one quorum.
type reports struct {
	accused map[string]string // by reporter: the suspect, empty if it does not know
	named   map[string]int    // how many name a member
	unnamed int               // how many do not know
	checked map[string]bool
}

// mostChecks is how many silent members are looked at. Where more are silent a part of the network is down, and to try to
// reach them all would take what the lighthouse needs for its work; their grace ends soon.
const mostChecks = 8

// forget begins with another quorum.
func (s *suspicion) forget() { s.reports = reports{} }

// suspected notes a report, and checks on those that it makes suspects.
func (s *suspicion) suspected(e Suspected) {
	// Invariant 3. Its members may have failed since, or be in a step of the latest quorum that works.
	if s.past.latest == nil || e.QuorumID != s.past.latest.ID {
		return
	}
	// A stranger lost no collective of this quorum. Strangers that count could outnumber the members.
	reporter := s.roster.replicas[e.Reporter]
	if reporter == nil || !reporter.previous {
		return
	}
	s.roster.beat(e.Reporter, s.now)
	if s.report(e.Reporter, e.Suspect) {
		s.look(e.Suspect)
	}
}

// report takes a report in, and reports whether it is the first of that member: by a second one a member would count twice.
func (s *suspicion) report(by, suspect string) (first bool) {
	if _, again := s.accused[by]; again || suspect == by {
		return false
	}
	if s.accused == nil {
		s.reports = reports{accused: map[string]string{}, named: map[string]int{}, checked: map[string]bool{}}
	}
	s.accused[by] = suspect
	if suspect == "" {
		s.unnamed++
	} else {
		s.named[suspect]++
	}
	return true
}

// look checks on members of the quorum now that one of them has reported a suspect.
func (s *suspicion) look(suspect string) {
	q, members := s.past.latest, s.past.members
	from, to := 0, len(members)
	if len(members)-len(s.accused) > mostChecks { // only the one that was named: all report, and none may look at all
		at, in := q.Place(suspect)
		if !in {
			return
		}
		from, to = at, at+1
	}
	for i := from; i < to; i++ {
		if r := members[i]; s.due(r, len(members)-1) {
			s.checked[r.id] = true
			s.do(Check{ReplicaID: r.id, Address: q.Members[i].Address, QuorumID: q.ID})
		}
	}
}

// due reports whether to check on a member: enough of the others have reported, and it did not say anything itself.
func (s *suspicion) due(r *replica, others int) bool {
	return !s.spoke(r) && !s.checked[r.id] && 2*(s.unnamed+s.named[r.id]) > others
}

// spoke reports whether nobody needs to look whether a member is alive: it asked or reported itself, or is known to have failed.
func (s *suspicion) spoke(r *replica) bool {
	_, reported := s.accused[r.id]
	return reported || r.waiting() || !r.alive()
}

// lookedAt evicts a member that its peers suspect and that gave no sign of life. A check that is answered late counts no more: the
// member may have spoken, or be in another quorum.
func (s *suspicion) lookedAt(e Checked) {
	r := s.roster.replicas[e.ReplicaID]
	if e.Reached || s.past.latest == nil || e.QuorumID != s.past.latest.ID || r == nil || !r.previous || s.spoke(r) {
		return
	}
	s.fail(r, Unreachable, "its peers lost the connection with it, and it gives no sign of life: "+e.Reason)
}
