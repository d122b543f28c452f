package quorum

// suspicion counts the reports of broken collectives in the latest quorum: which members report, and which
// peers they suspect. A process group often does not know which peer broke. But a member that reports is
// alive, so that the suspects are the members that do not report.
//
// Invariants:
//
//  1. The report of one member, in error or by malice, evicts no member: more than half of the others must
//     report, and the suspect must then fail to give a sign of life.
//  2. In one quorum each member counts once as a reporter, and is checked at most once.
//  3. Reports count for one quorum only. A report about an older one is no evidence about the members of the
//     latest.
type suspicion struct {
	*core
	past *memory
	reports
}

// reports has the reports about one quorum.
type reports struct {
	accused map[string]string // by reporter: the suspect, empty if the reporter does not know it
	named   map[string]int    // how many reports name each member
	unnamed int               // how many reports name none
	checked map[string]bool
}

// mostChecks bounds how many silent members are checked at once. If more are silent, a part of the network is
// down: checking all of them would take too much of the lighthouse's time, and they count as failed soon
// anyway, when their grace ends.
const mostChecks = 8

// forget drops all reports, when another quorum begins.
func (s *suspicion) forget() { s.reports = reports{} }

// suspected records a report, and starts the checks that are due after it.
func (s *suspicion) suspected(e Suspected) {
	// Invariant 3: the members of an older quorum may have failed since, or may be training in the latest
	// one.
	if s.past.latest == nil || e.QuorumID != s.past.latest.ID {
		return
	}
	// Only a member of this quorum can have lost one of its collectives. If others counted, they could
	// outvote the members.
	reporter := s.roster.members[e.Reporter]
	if reporter == nil || !reporter.previous {
		return
	}
	s.roster.beat(e.Reporter, s.now)
	if s.report(e.Reporter, e.Suspect) {
		s.look(e.Suspect)
	}
}

// report records a report, and returns whether it counts. A member's second report does not (invariant 2).
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

// look starts the checks that have become due by a report.
func (s *suspicion) look(suspect string) {
	q, members := s.past.latest, s.past.members
	from, to := 0, len(members)
	// While many members are silent, only the suspect of this report is looked at. Each of the members may
	// report soon: if each report looked at all members, the cost would grow with the square of their number.
	if len(members)-len(s.accused) > mostChecks {
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

// due reports whether to check on a member: enough of the others suspect it, and it is not known to be alive
// or to have failed.
func (s *suspicion) due(r *record, others int) bool {
	return !s.spoke(r) && !s.checked[r.id] && 2*(s.unnamed+s.named[r.id]) > others
}

// spoke reports whether a check of a member is needless: the member has sent a report or has a pending
// request, so it is alive; or it counts as failed already.
func (s *suspicion) spoke(r *record) bool {
	_, reported := s.accused[r.id]
	return reported || r.waiting() || !r.alive()
}

// lookedAt handles the result of a check: a member that could not be reached counts as failed. A late result
// is ignored if the member has asked or reported since the check began, or if there is another quorum: the
// member may be alive.
func (s *suspicion) lookedAt(e Checked) {
	r := s.roster.members[e.ReplicaID]
	if e.Reached || s.past.latest == nil || e.QuorumID != s.past.latest.ID || r == nil || !r.previous ||
		s.spoke(r) {
		return
	}
	s.fail(r, Unreachable, "its peers lost the connection with it, and it gives no sign of life: "+e.Reason)
}
