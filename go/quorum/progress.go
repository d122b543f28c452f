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
	// A step of many members takes at least this long for each: all have to receive the list of the others first.
	leastStallOfMember = time.Millisecond
	// answerTime is how long a member may take to say what it does, and how often it is asked.
	answerTime = time.Second
)

// watch looks after the progress of the latest quorum: it asks members what they do when a step takes too long, and names
// those that hold up the others.
//
// Invariants:
//
//  1. Nobody is named before a step takes as long as the stall timeout, before it was asked, and before it had the time to answer.
//  2. A member is named only while another one waits: where all compute, nobody is held up.
//  3. Answers are of this step: the next one begins with none.
type watch struct {
	*core
	past      *memory
	reconnect *reconnect
	pace
	step
}

// pace is how long steps take.
type pace struct {
	steps [64]time.Duration // what the last ones took, in no order
	count int               // of all
}

// step is what is known of the step of the latest quorum.
type step struct {
	began   time.Time           // when the quorum was delivered
	askedAt time.Time           // when its members were asked last, zero if they were not
	said    map[string]Progress // by the members that answered since; For is still to grow by the age of heard
	heard   map[string]time.Time
	stalled map[string]string // by member that was named: why
}

// next begins a step. The first quorum of a set of members shows nothing of how long a step takes.
func (w *watch) next(sameMembers bool) {
	if sameMembers {
		w.steps[w.count%len(w.steps)] = w.now.Sub(w.began)
		w.count++
	}
	w.step = step{began: w.now}
}

// forget begins with another training.
func (w *watch) forget() { w.pace, w.step = pace{}, step{} }

// forgive takes a time off the age of the step, in which nobody was heard: without it members would be named for that time.
func (w *watch) forgive(span time.Duration) { w.began = w.began.Add(span) }

// median is of the last steps, 0 if there is none.
func (p *pace) median() time.Duration {
	n := min(p.count, len(p.steps))
	if n == 0 {
		return 0
	}
	steps := slices.Sorted(slices.Values(p.steps[:n]))
	return steps[n/2]
}

// timeout is how long a step may take before somebody is named.
func (w *watch) timeout() time.Duration {
	if after := w.policy.StalledAfter; after > 0 {
		return after
	}
	return max(leastStall, stallMultiple*w.median(), time.Duration(len(w.past.members))*leastStallOfMember)
}

// progressed notes an answer. One that comes after its step is dropped: the step was not asked about (invariant 3).
func (w *watch) progressed(e Progressed) {
	if w.said != nil {
		w.said[e.ReplicaID], w.heard[e.ReplicaID] = e.Progress, w.now
	}
}

// answer is what a member said since it was asked.
func (w *watch) answer(r *replica) (p Progress, said bool) {
	r.looks++
	p, said = w.said[r.id]
	return p, said
}

// tick looks at a step that takes too long.
func (w *watch) tick() {
	if w.past.latest == nil {
		return
	}
	age := w.now.Sub(w.began)
	if w.policy.StalledAfter == 0 && age < leastStall-answerTime {
		return // as nearly always: there is no need to look for the median
	}
	timeout := w.timeout()
	answers := min(answerTime, timeout/2)
	if age < timeout-answers {
		return
	}
	if age >= timeout && !w.askedAt.IsZero() && (w.now.Sub(w.askedAt) >= answers || w.allSaid()) {
		w.name(age, timeout)
		if w.reconnect.failed == "" { // else the members know already that one of them has failed, and abort the step
			w.parted()
		}
	}
	if w.askedAt.IsZero() || age >= timeout && w.now.Sub(w.askedAt) >= answers {
		w.ask()
	}
}

// ask asks those that may hold up the others what they do. A member that waits has ended its step.
func (w *watch) ask() {
	var ids []string
	for _, r := range w.past.members {
		if r.alive() && !r.waiting() {
			ids = append(ids, r.id)
		}
	}
	if len(ids) > 0 {
		w.askedAt, w.said, w.heard = w.now, map[string]Progress{}, map[string]time.Time{}
		w.do(AskProgress{ids})
	}
}

// parted finds a member that asks for the quorum of a step in which its peers wait for it: the answer to it was lost, with
// the lighthouse that gave it. Nobody is stalled, and none of them would go on before the timeout of a collective. The
// peers are notified that they wait in vain, and all meet in the next quorum. It is alive, and its request stays: it is not evicted.
func (w *watch) parted() {
	reached := int64(math.MinInt64) // the latest step in which a peer waits
	for _, peer := range w.past.members {
		if p, said := w.answer(peer); said && p.Waits && peer.alive() && !peer.waiting() {
			reached = max(reached, p.Step)
		}
	}
	for _, r := range w.past.members {
		if r.waiting() && r.member().Step <= reached {
			reason := fmt.Sprintf("it asks for the quorum of step %d, in which its peers wait for it", r.member().Step)
			w.failed = append(w.failed, failure{r, Parted, reason})
			return
		}
	}
}

func (w *watch) allSaid() bool {
	for _, r := range w.past.members {
		if _, said := w.answer(r); !said && r.alive() && !r.waiting() {
			return false
		}
	}
	return true
}

// name finds the members that make no progress while others wait, and evicts those that make none for too long.
func (w *watch) name(age, timeout time.Duration) {
	waiting := 0
	for _, r := range w.past.members {
		if said, _ := w.answer(r); r.alive() && (r.waiting() || said.Waits) {
			waiting++
		}
	}
	if waiting == 0 {
		return // nobody is held up
	}
	for _, r := range w.past.members {
		said, answered := w.answer(r)
		if !r.alive() || r.waiting() || said.Waits {
			continue
		}
		still := age
		reason := "none of its ranks says what it does"
		if answered {
			still = min(age, said.For+w.now.Sub(w.heard[r.id]))
			reason = fmt.Sprintf("rank %d, step %d: %s", said.Rank, said.Step, said.Phase)
		}
		if still < timeout {
			continue
		}
		reason = fmt.Sprintf("no progress for %s while %s of its quorum wait: %s", still.Round(100*time.Millisecond), replicas(waiting), reason)
		if _, named := w.stalled[r.id]; !named { // it is reported once in a step
			if w.stalled == nil {
				w.stalled = map[string]string{}
			}
			w.do(Stalled{QuorumID: w.past.latest.ID, ReplicaID: r.id, Reason: reason})
		}
		w.stalled[r.id] = reason
		if limit := w.policy.EjectStalledAfter; limit > 0 && still >= limit {
			w.fail(r, NoProgress, reason+" (eject_stalled_after_ms)")
		}
	}
}
