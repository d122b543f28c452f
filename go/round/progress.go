package round

import (
	"fmt"
	"slices"
	"time"

	"github.com/torchft/torchft/go/quorum"
)

// phase is the state of a rank that follows from its requests.
type phase int

const (
	starting  phase = iota // it has not asked for anything yet
	inQuorum               // it waits for a quorum
	inStep                 // it has a quorum, and has not voted
	inVote                 // it waits for the decision
	afterVote              // it has not asked for the next quorum
)

func (p phase) String() string {
	return [...]string{"has not asked for a quorum yet", "waits for a quorum", "in the step",
		"waits for the vote", "after the vote"}[p]
}

// activity is the phase of a rank, and since when it lasts. The phase follows from the rank's requests, at no
// extra cost. Details within a step are reported by the rank only when it is asked.
type activity struct {
	phase phase
	step  int64
	since time.Time

	answered bool // it has answered the latest ProgressAsked, with waits and what
	waits    bool
	what     string
	said     quorum.Phase // as it answered last; Unsaid: nothing that does not follow from its requests
	heals    bool
}

func (a *activity) begin(p phase, step int64, now time.Time) {
	*a = activity{phase: p, step: step, since: now}
}

// firstSteps is the number of votes up to which a rank makes its first steps. The second one may compile,
// too: for shapes that vary, or for an optimizer that had no state before.
const firstSteps = 2

// doing is the phase of a rank: the one that its script has begun, or else what follows from its requests and
// its answers.
func (m *Machine) doing(r *rank) quorum.Phase {
	switch {
	case r.begun != quorum.Unsaid:
		return r.begun
	case r.heals:
		return quorum.Healing
	case r.phase == starting:
		return quorum.Starting
	case r.votes < firstSteps:
		return quorum.FirstSteps
	case m.draining && r.phase == afterVote:
		return quorum.Ending
	case r.said != quorum.Unsaid:
		return r.said
	case r.phase == afterVote:
		return quorum.BetweenSteps
	default:
		return quorum.Training
	}
}

func (m *Machine) forgetProgress() {
	for r := range m.ranks {
		m.ranks[r].answered = false
	}
}

func (m *Machine) rankProgressed(e RankProgressed) {
	if e.GroupRank >= 0 && e.GroupRank < m.group.WorldSize {
		r := &m.ranks[e.GroupRank]
		if e.Begins {
			r.begun, r.since, r.answered = e.Phase, m.now, false
			return
		}
		r.answered, r.waits, r.what, r.said = true, e.Waits, e.What, e.Phase
	}
}

func (m *Machine) rankWorked(e RankWorked) {
	if e.GroupRank >= 0 && e.GroupRank < m.group.WorldSize {
		r := &m.ranks[e.GroupRank]
		r.took, r.host = append(r.took, e.Took...), e.Host
		r.took = slices.Clone(r.took[max(0, len(r.took)-quorum.PaceSteps):])
	}
}

// Pace returns the pace of the slowest rank, once all of them are known.
func (m *Machine) Pace() (slowest quorum.Pace) {
	for i := range m.ranks {
		r := &m.ranks[i]
		p := quorum.PaceOf(int64(i), r.took, r.host)
		if p.Own == 0 {
			return p
		}
		if p.Own > slowest.Own {
			slowest = p
		}
	}
	return slowest
}

// Progress returns the progress of the group, and whether all ranks that are in the step have answered. It is
// that of the rank that the others wait for, or of any rank if all wait for other groups. It changes nothing.
func (m *Machine) Progress(now time.Time) (p quorum.Progress, complete bool) {
	complete = true
	worst := -1
	for r := range m.ranks {
		a := &m.ranks[r].activity
		if a.phase == inStep && !a.answered {
			complete = false
		}
		if !a.idle() && (worst < 0 || m.ranks[worst].since.After(a.since)) {
			worst = r
		}
	}
	p.Waits = worst < 0
	a := &m.ranks[max(worst, 0)].activity
	p.Step, p.Rank, p.For, p.What = a.step, int64(max(worst, 0)), now.Sub(a.since), a.phase.String()
	p.Phase = m.doing(&m.ranks[p.Rank])
	switch {
	case a.phase == inStep && a.answered:
		p.What = a.what
	case a.phase == inStep:
		p.What = "does not answer"
	case a.since.IsZero():
		p.For = 0
	}
	if f := m.ranks[p.Rank].absent; f != nil {
		p.What = fmt.Sprintf("%s (%s)", p.What, f.Reason)
	}
	return p, complete
}

// idle reports whether a rank waits for others: ranks of the group, other groups, or the lighthouse.
func (a *activity) idle() bool {
	switch a.phase {
	case inQuorum, inVote:
		return true
	case inStep:
		return a.answered && a.waits
	default:
		return false
	}
}
