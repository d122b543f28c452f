package round

import (
	"fmt"
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
}

func (a *activity) begin(p phase, step int64, now time.Time) {
	*a = activity{phase: p, step: step, since: now}
}

func (m *Machine) forgetProgress() {
	for r := range m.ranks {
		m.ranks[r].answered = false
	}
}

func (m *Machine) rankProgressed(e RankProgressed) {
	if e.GroupRank >= 0 && e.GroupRank < m.group.WorldSize {
		a := &m.ranks[e.GroupRank].activity
		a.answered, a.waits, a.what = true, e.Waits, e.What
	}
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
	p.Step, p.Rank, p.For, p.Phase = a.step, int64(max(worst, 0)), now.Sub(a.since), a.phase.String()
	switch {
	case a.phase == inStep && a.answered:
		p.Phase = a.what
	case a.phase == inStep:
		p.Phase = "does not answer"
	case a.since.IsZero():
		p.For = 0
	}
	if f := m.ranks[p.Rank].absent; f != nil {
		p.Phase = fmt.Sprintf("%s (%s)", p.Phase, f.Reason)
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
