package quorum

import (
	"fmt"
	"math"
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

// watch looks after the progress of the latest quorum: it asks members what they do when a step takes too long, and names
// those that hold up the others.
//
// Invariants:
//
//  1. Nobody is named before a step takes as long as patience, before it was asked, and before it had the time to answer.
//  2. A member is named only while another one waits: where all compute, nobody is held up.
//  3. What was said is of this step: the next one begins with nothing.
type watch struct {
	steps [64]time.Duration // what the last steps took, in no order
	count int               // of all steps

	began   time.Time           // when the latest quorum was delivered
	askedAt time.Time           // when its members were asked last, zero if they were not
	said    map[string]Progress // by those who answered since; For is still to grow by the age of heard
	heard   map[string]time.Time
	stalled map[string]string // who was named, and why
}

// verdict is what a watch found about a member: the others need not wait for it.
type verdict struct {
	failure
	evict bool // it counts as failed until it asks again
}

// evicted are those of whom some verdicts say so.
func evicted(found []verdict) map[*replica]bool {
	out := map[*replica]bool{}
	for _, v := range found {
		if v.evict {
			out[v.replica] = true
		}
	}
	return out
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

// patience is how long a step of some members may take before somebody is named.
func (w *watch) patience(p Policy, members int) time.Duration {
	if after := p.StalledAfter; after > 0 {
		return after
	}
	return max(leastStall, stallMultiple*w.median(), time.Duration(members)*leastStallOfMember)
}

// progressed notes an answer.
func (w *watch) progressed(e Progressed, now time.Time) {
	if w.said != nil {
		w.said[e.ReplicaID], w.heard[e.ReplicaID] = e.Progress, now
	}
}

// answer is what a member said since it was asked.
func (w *watch) answer(r *replica) (p Progress, said bool) {
	r.looks++
	p, said = w.said[r.id]
	return p, said
}

// overdue looks at a step that takes too long. told: its members know already that one of them is gone.
func (w *watch) overdue(p Policy, q *Quorum, members []*replica, told bool, now time.Time) (actions []Action, found []verdict) {
	if q == nil {
		return nil, nil
	}
	age := now.Sub(w.began)
	if p.StalledAfter == 0 && age < leastStall-answerTime {
		return nil, nil // as nearly always: there is no need to look for the median
	}
	patience := w.patience(p, len(members))
	answers := min(answerTime, patience/2)
	if age < patience-answers {
		return nil, nil
	}
	if age >= patience && !w.askedAt.IsZero() && (now.Sub(w.askedAt) >= answers || w.allSaid(members)) {
		actions, found = w.name(p, q.ID, members, age, patience, now)
		if !told {
			found = append(found, w.parted(members, found)...)
		}
	}
	if w.askedAt.IsZero() || age >= patience && now.Sub(w.askedAt) >= answers {
		var ask []string
		out := evicted(found)
		for _, r := range members {
			if r.alive() && !r.waiting() && !out[r] {
				ask = append(ask, r.id)
			}
		}
		if len(ask) > 0 {
			w.askedAt, w.said, w.heard = now, map[string]Progress{}, map[string]time.Time{}
			actions = append(actions, AskProgress{ask})
		}
	}
	return actions, found
}

// parted finds a member that asks for the quorum of a step in which its peers wait for it: the answer to it was lost, with
// the lighthouse that gave it. Nobody is stalled, and none of them would go on before the timeout of a collective. The
// peers are told that they wait in vain, and all meet in the next quorum.
func (w *watch) parted(members []*replica, found []verdict) []verdict {
	reached, out := int64(math.MinInt64), evicted(found) // the latest step in which a peer waits
	for _, peer := range members {
		if p, said := w.answer(peer); said && p.Waits && peer.alive() && !peer.waiting() && !out[peer] {
			reached = max(reached, p.Step)
		}
	}
	for _, r := range members {
		if r.waiting() && r.member().Step <= reached {
			reason := fmt.Sprintf("it asks for the quorum of step %d, in which its peers wait for it", r.member().Step)
			return []verdict{{failure: failure{r, Parted, reason}}}
		}
	}
	return nil
}

func (w *watch) allSaid(members []*replica) bool {
	for _, r := range members {
		if _, said := w.answer(r); !said && r.alive() && !r.waiting() {
			return false
		}
	}
	return true
}

// name finds the members that make no progress while others wait.
func (w *watch) name(p Policy, quorumID int64, members []*replica, age, patience time.Duration, now time.Time) (actions []Action, found []verdict) {
	waiting := 0
	for _, r := range members {
		if said, _ := w.answer(r); r.alive() && (r.waiting() || said.Waits) {
			waiting++
		}
	}
	if waiting == 0 {
		return nil, nil // nobody is held up
	}
	for _, r := range members {
		said, answered := w.answer(r)
		if !r.alive() || r.waiting() || said.Waits {
			continue
		}
		still := age
		reason := "none of its ranks says what it does"
		if answered {
			still = min(age, said.For+now.Sub(w.heard[r.id]))
			reason = fmt.Sprintf("rank %d, step %d: %s", said.Rank, said.Step, said.Phase)
		}
		if still < patience {
			continue
		}
		reason = fmt.Sprintf("no progress for %s while %s of its quorum wait: %s", still.Round(100*time.Millisecond), replicas(waiting), reason)
		if _, named := w.stalled[r.id]; !named {
			if w.stalled == nil {
				w.stalled = map[string]string{}
			}
			actions = append(actions, Stalled{QuorumID: quorumID, ReplicaID: r.id, Reason: reason})
		}
		w.stalled[r.id] = reason
		if limit := p.EjectStalledAfter; limit > 0 && still >= limit {
			found = append(found, verdict{failure{r, NoProgress, reason + " (eject_stalled_after_ms)"}, true})
		}
	}
	return actions, found
}

// overdue does what the watch found.
func (m *Machine) overdue() (actions []Action, failed []failure) {
	actions, found := m.watch.overdue(m.policy, m.latest, m.members, m.anew.failed != "", m.now)
	for _, v := range found {
		if v.evict {
			m.roster.markFailed(v.replica, v.cause, v.reason, m.now)
		}
		failed = append(failed, v.failure)
	}
	return actions, failed
}
