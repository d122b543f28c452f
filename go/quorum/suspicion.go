package quorum

import "time"

// suspicion gathers, for the latest quorum, who lost a collective and whom it suspects. A process group often cannot tell
// which peer broke; but whoever reports is alive, so that those who do not are the suspects.
//
// One member that reports, in error or by malice, puts out nobody: more than half of the others must, and the suspect must
// then fail to give a sign of life.
type suspicion struct {
	accused map[string]string // by reporter: whom it suspects, empty if it cannot tell
	named   map[string]int    // how many name a member
	unnamed int               // how many cannot tell
	checked map[string]bool
}

// mostChecks is how many silent members are looked at. Where more are silent a part of the network is gone, and to try to
// reach them all would take what the lighthouse needs for its work; their grace ends soon.
const mostChecks = 8

// suspect notes a report, and returns on whom to check now.
func (m *Machine) suspect(e Suspected, now time.Time) []Action {
	if m.latest == nil || e.QuorumID != m.latest.ID {
		return nil
	}
	reporter := m.roster.replicas[e.Reporter]
	if reporter == nil || !reporter.previous {
		return nil
	}
	m.roster.beat(e.Reporter, now)
	s := &m.suspicion
	if _, again := s.accused[e.Reporter]; again || e.Suspect == e.Reporter {
		return nil
	}
	if s.accused == nil {
		*s = suspicion{accused: map[string]string{}, named: map[string]int{}, checked: map[string]bool{}}
	}
	s.accused[e.Reporter] = e.Suspect
	if e.Suspect == "" {
		s.unnamed++
	} else {
		s.named[e.Suspect]++
	}

	var actions []Action
	if silent := len(m.members) - len(s.accused); silent <= mostChecks {
		for i, r := range m.members {
			actions = m.check(actions, r, m.latest.Members[i].Address)
		}
	} else if r := m.roster.replicas[e.Suspect]; r != nil && r.previous {
		for i, member := range m.latest.Members {
			if member.ReplicaID == e.Suspect {
				actions = m.check(actions, m.members[i], member.Address)
			}
		}
	}
	return actions
}

// check asks once for a sign of life of a member of which enough others have reported.
func (m *Machine) check(actions []Action, r *replica, address string) []Action {
	s := &m.suspicion
	others := len(m.members) - 1
	if m.spoke(r) || s.checked[r.id] || 2*(s.unnamed+s.named[r.id]) <= others {
		return actions
	}
	s.checked[r.id] = true
	return append(actions, Check{ReplicaID: r.id, Address: address, QuorumID: m.latest.ID})
}

// spoke reports whether nobody needs to look whether a member is alive: it asked or reported itself, or is known dead.
func (m *Machine) spoke(r *replica) bool {
	_, reported := m.suspicion.accused[r.id]
	return reported || r.waiting() || !r.alive()
}

// checkedOn ends a member that its peers suspect and that gave no sign of life.
func (m *Machine) checkedOn(e Checked, now time.Time) []death {
	r := m.roster.replicas[e.ReplicaID]
	if e.Reached || m.latest == nil || e.QuorumID != m.latest.ID || r == nil || !r.previous || m.spoke(r) {
		return nil
	}
	return []death{m.roster.putOut(r, Unreachable, "its peers lost it, and it gives no sign of life: "+e.Reason, now)}
}
