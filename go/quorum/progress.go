package quorum

import (
	"fmt"
	"slices"
	"time"
)

// Progress is what a group says it does, when it is asked.
type Progress struct {
	Step  int64
	Rank  int64         // that holds the group up
	Phase string        // for people
	For   time.Duration // it has been in that phase
	Waits bool          // for other groups: it is not the one that holds them up
}

const (
	// Liveness is not progress: a process can be alive and hang. A step that takes this many times the median, and at least
	// leastStall, is looked into. Until then nobody is asked anything.
	stallMultiple = 10
	leastStall    = 5 * time.Second
	// A step of many members takes at least this long for each: all have to be told first who the others are.
	leastStallOfMember = time.Millisecond
	// answerTime is how long a member may take to say what it does, and how often it is asked.
	answerTime = time.Second
)

// watch looks after the progress of the latest quorum.
type watch struct {
	steps [64]time.Duration // what the last steps took, in no order
	count int               // of all steps

	began   time.Time           // when the latest quorum was delivered
	askedAt time.Time           // when its members were asked last, zero if they were not
	said    map[string]Progress // by those who answered since; For is still to grow by the age of heard
	heard   map[string]time.Time
	stalled map[string]string // who was named, and why
}

// next begins a step. The first quorum of a set of members tells nothing of how long a step takes.
func (w *watch) next(now time.Time, sameMembers bool) {
	if sameMembers {
		w.steps[w.count%len(w.steps)] = now.Sub(w.began)
		w.count++
	}
	w.began, w.askedAt, w.said, w.heard, w.stalled = now, time.Time{}, nil, nil, nil
}

// median is of the last steps, 0 if there is none.
func (w *watch) median() time.Duration {
	n := min(w.count, len(w.steps))
	if n == 0 {
		return 0
	}
	steps := slices.Sorted(slices.Values(w.steps[:n]))
	return steps[n/2]
}

// patience is how long a step may take before somebody is named.
func (m *Machine) patience() time.Duration {
	if after := m.policy.StalledAfter; after > 0 {
		return after
	}
	return max(leastStall, stallMultiple*m.watch.median(), time.Duration(len(m.members))*leastStallOfMember)
}

// progressed notes an answer.
func (m *Machine) progressed(e Progressed) {
	if m.watch.said != nil {
		m.watch.said[e.ReplicaID], m.watch.heard[e.ReplicaID] = e.Progress, m.now
	}
}

// overdue looks at a step that takes too long: it asks what the members do, and names those that hold up the others. It
// returns those that have to go.
func (m *Machine) overdue(now time.Time) (actions []Action, out []death) {
	w := &m.watch
	if m.latest == nil {
		return nil, nil
	}
	age := now.Sub(w.began)
	if m.policy.StalledAfter == 0 && age < leastStall-answerTime {
		return nil, nil // as nearly always: there is no need to look for the median
	}
	patience := m.patience()
	answers := min(answerTime, patience/2)
	if age < patience-answers {
		return nil, nil
	}
	if age >= patience && !w.askedAt.IsZero() && (now.Sub(w.askedAt) >= answers || m.allSaid()) {
		actions, out = m.name(now, age, patience)
		out = append(out, m.parted()...)
	}
	if w.askedAt.IsZero() || age >= patience && now.Sub(w.askedAt) >= answers {
		var ask []string
		for _, r := range m.members {
			if r.alive() && !r.waiting() {
				ask = append(ask, r.id)
			}
		}
		if len(ask) > 0 {
			w.askedAt, w.said, w.heard = now, map[string]Progress{}, map[string]time.Time{}
			actions = append(actions, AskProgress{ask})
		}
	}
	return actions, out
}

// parted finds a member that asks for the quorum of a step in which its peers wait for it: the answer to it was lost, with
// the lighthouse that gave it. Nobody is stalled, and none of them would go on before the timeout of a collective. The
// peers are told that they wait in vain, and all meet in the next quorum.
func (m *Machine) parted() []death {
	if m.broken != "" {
		return nil // they were told
	}
	for _, r := range m.members {
		if !r.waiting() {
			continue
		}
		for _, peer := range m.members {
			if p, said := m.watch.said[peer.id]; said && p.Waits && p.Step >= r.member().Step && peer.alive() && !peer.waiting() {
				return []death{{r, Parted, fmt.Sprintf("it asks for the quorum of step %d, in which its peers wait for it", r.member().Step)}}
			}
		}
	}
	return nil
}

func (m *Machine) allSaid() bool {
	for _, r := range m.members {
		if _, said := m.watch.said[r.id]; !said && r.alive() && !r.waiting() {
			return false
		}
	}
	return true
}

// name finds the members that make no progress while others wait.
func (m *Machine) name(now time.Time, age, patience time.Duration) (actions []Action, out []death) {
	w := &m.watch
	waiting := 0
	for _, r := range m.members {
		if r.alive() && (r.waiting() || w.said[r.id].Waits) {
			waiting++
		}
	}
	if waiting == 0 {
		return nil, nil // nobody is held up
	}
	for _, r := range m.members {
		p, said := w.said[r.id]
		if !r.alive() || r.waiting() || p.Waits {
			continue
		}
		still := age
		reason := "none of its ranks says what it does"
		if said {
			still = min(age, p.For+now.Sub(w.heard[r.id]))
			reason = fmt.Sprintf("rank %d, step %d: %s", p.Rank, p.Step, p.Phase)
		}
		if still < patience {
			continue
		}
		reason = fmt.Sprintf("no progress for %s while %s of its quorum wait: %s", still.Round(100*time.Millisecond), replicas(waiting), reason)
		if _, named := w.stalled[r.id]; !named {
			if w.stalled == nil {
				w.stalled = map[string]string{}
			}
			actions = append(actions, Stalled{QuorumID: m.latest.ID, ReplicaID: r.id, Reason: reason})
		}
		w.stalled[r.id] = reason
		if limit := m.policy.EjectStalledAfter; limit > 0 && still >= limit {
			out = append(out, m.roster.putOut(r, NoProgress, reason+" (eject_stalled_after_ms)", now))
		}
	}
	return actions, out
}
