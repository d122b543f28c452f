package quorum

import (
	"fmt"
	"math"
	"time"
)

// Progress is the activity of a group, its answer to AskProgress.
type Progress struct {
	Step  int64
	Rank  int64 // the rank that the rest of the group waits for
	Phase Phase
	What  string        // what that rank does, in words
	For   time.Duration // how long it has been in that phase
	Waits bool          // it waits for other groups, and so is not the cause of the delay
}

const (
	// A process can be alive and hang, so that heartbeats do not show progress. When a step has taken this
	// many times the median, and at least leastStall, the members without progress are reported as stalled.
	// They are asked for their progress shortly before that (AnswerTime). In shorter steps none is asked.
	stallMultiple = 10
	leastStall    = 5 * time.Second
	// In a large quorum a step may take this long for each member: all of them receive the list of the others
	// first.
	leastStallOfMember = time.Millisecond
	// AnswerTime is how long a member may take to answer, and also the interval at which it is asked.
	AnswerTime = time.Second
)

// watch finds the members that make no progress in a step of the latest quorum: when the step takes too long,
// it asks the members for their progress, and reports those for which others wait as stalled.
//
// Invariants:
//
//  1. A member is reported as stalled only after the step has taken the stall timeout, and after the member
//     was asked and had the time to answer.
//  2. It is reported only while another member waits: if all members compute, the step is just long.
//  3. Answers count in one step only: they are dropped when the next one begins.
//  4. Unless the policy has a number of its own, a member that does something other than a step is neither
//     reported nor evicted before the limit of its phase (phases.go).
type watch struct {
	*core
	past      *memory
	reconnect *reconnect
	learned
	step
}

// step is the state of the latest quorum's step.
type step struct {
	began   time.Time           // when the quorum was delivered
	askedAt time.Time           // when its members were asked last, zero if they were not
	answers map[string]answered // since then, by member
	stalled map[string]string   // the members that were reported as stalled, and why
}

// answered is an answer, and when it arrived: the time since then is added to For.
type answered struct {
	Progress
	at time.Time
}

// next begins a step. The duration of the previous one is recorded only if the members stay the same: a
// failure or a joining member may have prolonged it.
func (w *watch) next(sameMembers bool) {
	if sameMembers {
		w.stepped(w.now.Sub(w.began))
	}
	w.step, w.other = step{began: w.now}, false
}

// advanced begins another step of a quorum that stands, after so many steps since the last one.
func (w *watch) advanced(steps int64) {
	w.began = w.now.Add(-w.now.Sub(w.began) / time.Duration(steps))
	w.next(true)
}

// forget drops all durations and answers: another training begins.
func (w *watch) forget() { w.learned, w.step = learned{}, step{} }

// median returns the median duration of the last steps, 0 if there is none.
func (w *watch) median() time.Duration { return w.of[Training].median() }

// usual returns the median, and 0 if the present step has taken much longer, so that it says nothing about
// the speed of the job any more.
func (w *watch) usual(now time.Time) time.Duration {
	median := w.median()
	if now.Sub(w.began) > max(leastStall, 3*median) {
		return 0
	}
	return median
}

// timeout returns how long a step may take before a member is reported as stalled.
func (w *watch) timeout() time.Duration {
	if after := w.policy.StalledAfter; after > 0 {
		return after
	}
	return max(leastStall, stallMultiple*w.median(), time.Duration(len(w.past.members))*leastStallOfMember)
}

// progressed records an answer. An answer after the end of its step is dropped (invariant 3).
func (w *watch) progressed(e Progressed) {
	if w.answers == nil {
		return
	}
	w.answers[e.ReplicaID] = answered{e.Progress, w.now}
	if r := w.roster.members[e.ReplicaID]; r != nil {
		w.occupied(r, e.Progress.Phase, e.Progress.For, w.now)
	}
}

// tick checks whether the step takes too long.
func (w *watch) tick() {
	if w.past.latest == nil {
		return
	}
	age := w.now.Sub(w.began)
	if w.policy.StalledAfter == 0 && age < leastStall-AnswerTime {
		return // the usual case, without the cost of the median
	}
	timeout := w.timeout()
	answers := min(AnswerTime, timeout/2)
	if age < timeout-answers {
		return
	}
	if age >= timeout && !w.askedAt.IsZero() && (w.now.Sub(w.askedAt) >= answers || w.allAnswered()) {
		w.name(age, timeout)
		if w.reconnect.failed == "" {
			// after a failure, the members have been notified already, and abort the step
			w.parted()
		}
	}
	if w.askedAt.IsZero() || age >= timeout && w.now.Sub(w.askedAt) >= answers {
		w.ask()
	}
}

// ask asks the members that may be stalled for their progress. A member with a pending request has completed
// its step.
func (w *watch) ask() {
	var ids []string
	for _, r := range w.past.members {
		if r.alive() && !r.waiting() {
			ids = append(ids, r.id)
		}
	}
	if len(ids) > 0 {
		w.askedAt, w.answers = w.now, map[string]answered{}
		w.do(AskProgress{ids})
	}
}

// parted finds a member that asks for the quorum of a step in which its peers wait for it: the answer to its
// earlier request was lost, together with the lighthouse that sent it. No member is stalled, and yet none
// would continue before the timeout of the collective. The member is reported as failed, so that its peers
// abort the step and all of them ask for the next quorum. It is not evicted: it is alive, and its request
// stays pending.
func (w *watch) parted() {
	reached := int64(math.MinInt64) // the latest step in which a peer waits
	for _, peer := range w.past.members {
		if p := w.answers[peer.id]; p.Waits && peer.alive() && !peer.waiting() {
			reached = max(reached, p.Step)
		}
	}
	for _, r := range w.past.members {
		if r.waiting() && r.member().Step <= reached {
			reason := fmt.Sprintf("it asks for the quorum of step %d, in which its peers wait for it",
				r.member().Step)
			w.failed = append(w.failed, failure{r, Parted, reason})
			return
		}
	}
}

func (w *watch) allAnswered() bool {
	for _, r := range w.past.members {
		if _, answered := w.answers[r.id]; !answered && r.alive() && !r.waiting() {
			return false
		}
	}
	return true
}

// name reports the members that make no progress while others wait, and evicts those that have made none for
// the limit of their phase.
func (w *watch) name(age, timeout time.Duration) {
	waiting := 0
	for _, r := range w.past.members {
		if r.alive() && (r.waiting() || w.answers[r.id].Waits) {
			waiting++
		}
	}
	if waiting == 0 {
		return // no member waits (invariant 2)
	}
	for _, r := range w.past.members {
		p, answered := w.answers[r.id]
		if !r.alive() || r.waiting() || p.Waits {
			continue
		}
		still := age
		reason := "none of its ranks has reported its activity"
		if answered {
			still = min(age, p.For+w.now.Sub(p.at))
			reason = fmt.Sprintf("rank %d, step %d: %s", p.Rank, p.Step, p.What)
		}
		limit := w.policy.limit(p.Phase, &w.learned)
		if still < w.policy.named(p.Phase, &w.learned, timeout) {
			continue
		}
		reason = fmt.Sprintf("no progress for %s while %s of its quorum wait: %s",
			still.Round(100*time.Millisecond), memberCount(waiting), reason)
		if _, named := w.stalled[r.id]; !named { // it is reported once in a step
			if w.stalled == nil {
				w.stalled = map[string]string{}
			}
			w.do(Stalled{QuorumID: w.past.latest.ID, ReplicaID: r.id, Reason: reason})
		}
		w.stalled[r.id] = reason
		if still >= limit {
			w.fail(r, NoProgress, fmt.Sprintf("%s (eject_stalled_after_ms: %s)", reason,
				milliseconds(limit)))
		}
	}
}
