package quorum

import (
	"slices"
	"time"
)

// Phase is what a group does at present: that of the rank that has been in its phase for longest. A group
// reports it with its heartbeats and with its answers to AskProgress. The numbers are those of the proto.
type Phase int

const (
	// Unsaid : the group reports no phases: it is of an earlier version, or upstream's.
	Unsaid       Phase = iota
	Starting           // it has not asked for a quorum yet
	FirstSteps         // its first steps, or a compilation
	Training           // a step
	BetweenSteps       // after a vote and before the next step; its script has not said what it does
	Evaluation
	Checkpoint // it writes one
	Healing
	Ending

	phases // their number
)

var phaseNames = [phases]string{"", "starting", "first_steps", "training", "between_steps", "evaluation",
	"checkpoint", "healing", "ending"}

// PhaseOf returns the phase of a message: Unsaid for one of a later version.
func PhaseOf[N ~int32](number N) Phase {
	if number < 0 || int(number) >= int(phases) {
		return Unsaid
	}
	return Phase(number)
}

func (p Phase) String() string { return phaseNames[p] }

// Phases are all phases that a group may report.
func Phases() (all []Phase) {
	for p := Starting; p < phases; p++ {
		all = append(all, p)
	}
	return all
}

const (
	// EjectAuto is the default of Policy.EjectStalledAfter: each phase has a limit of its own, which follows
	// from the job's own times.
	EjectAuto time.Duration = -1

	// never is the limit of a phase in which no other group waits, and of one that is not reported.
	never time.Duration = 1<<63 - 1
	// unlearned is the limit of a phase that the job has not been in leastLearned times, to know what is
	// usual. A compilation with a cold cache takes minutes, and a check of an evaluation before the
	// training says nothing about the first whole one.
	unlearned    = 30 * time.Minute
	leastLearned = 3
	// The limit is stallMultiple times the median, as of a step that is reported as stalled, and at least
	// longestMultiple times the longest one: sequences of variable length have few long steps.
	longestMultiple = 3
	// fading is how much of the longest duration is forgotten with each later one: half of it in 700.
	fading = 1024
)

// LeastLimit is the shortest limit of a phase.
func (p Phase) LeastLimit() time.Duration {
	switch p {
	case Training:
		return 30 * time.Second
	case BetweenSteps, Evaluation, Checkpoint: // one may save a part, and once in a while the whole model
		return 5 * time.Minute
	case FirstSteps, Healing: // the caches of compilers may be cold on one host only
		return unlearned
	default:
		return never
	}
}

// patient reports whether a phase is known to take longer than a step.
func (p Phase) patient() bool { return p != Unsaid && p != Training }

// durations are the last durations of one phase, of all groups of the job.
type durations struct {
	last    [64]time.Duration // in no order
	count   int               // of all
	longest time.Duration     // it fades
}

func (d *durations) add(took time.Duration) {
	d.last[d.count%len(d.last)] = took
	d.count++
	d.longest = max(took, d.longest-d.longest/fading)
}

// median returns 0 if there is none.
func (d *durations) median() time.Duration {
	n := min(d.count, len(d.last))
	if n == 0 {
		return 0
	}
	return slices.Sorted(slices.Values(d.last[:n]))[n/2]
}

// limit returns how long a group may be in a phase while others wait for it.
func (d *durations) limit(p Phase) time.Duration {
	least := p.LeastLimit()
	if least < unlearned && d.count < leastLearned {
		return unlearned
	}
	return max(least, stallMultiple*d.median(), longestMultiple*d.longest)
}

// learned has the durations of each phase. Those of training are the durations of steps in which no member
// was in another phase. A phase between two heartbeats is missed: it is shorter than every limit.
type learned struct {
	of    [phases]durations
	other bool // in the present step, a member was in another phase than training
}

// Doing is what a group says of itself with a heartbeat.
type Doing struct {
	Phase Phase
	For   time.Duration // how long it has been in that phase
	Pace  Pace
}

// occupation is the phase of a member as it was reported last.
type occupation struct {
	Phase
	lasted time.Duration // until the report
	at     time.Time     // of the report
}

// occupied records a report of a member's phase.
func (l *learned) occupied(r *record, p Phase, lasted time.Duration, now time.Time) {
	if p == Unsaid {
		return
	}
	if is := r.occupation; is.Phase != p || lasted < is.lasted {
		l.ended(r)
	}
	r.occupation = occupation{p, lasted, now}
	l.other = l.other || r.previous && p.patient()
}

// ended records the duration of the phase that a member was in.
func (l *learned) ended(r *record) {
	if is := r.occupation; is.patient() {
		l.of[is.Phase].add(is.lasted)
	}
	r.occupation = occupation{}
}

// stepped records the duration of a step.
func (l *learned) stepped(took time.Duration) {
	if !l.other {
		l.of[Training].add(took)
	}
}

// limit returns how long a group may be in a phase while others wait for it, before it is evicted.
func (p Policy) limit(phase Phase, l *learned) time.Duration {
	switch p.EjectStalledAfter {
	case 0:
		return never
	case EjectAuto:
		return l.of[phase].limit(phase)
	default:
		return p.EjectStalledAfter
	}
}

// named returns how long a group may be in a phase while others wait for it, before it is reported as
// stalled. timeout is that time for a step.
func (p Policy) named(phase Phase, l *learned, timeout time.Duration) time.Duration {
	if p.EjectStalledAfter > 0 || !phase.patient() {
		return timeout
	}
	return max(timeout, l.of[phase].limit(phase))
}
