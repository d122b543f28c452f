package dashboard

import "time"

const (
	// paceOver is the time over which the rate of steps is averaged.
	paceOver = 5 * time.Second
	// paceMarks is how many parts of this time are kept, for steps that are shorter than a part.
	paceMarks = 20
	// mostPeriods : without a step for this many times the usual duration of one (and for paceOver), the rate is unknown.
	mostPeriods = 3
)

// pace measures the duration of a job's steps. The groups of a quorum are in the same step, so they have one. The step of a single group,
// or of different quorums, would not do: a group that heals takes over the step of the others. `torchft run` does the same
// (torchft/launch/pace.py).
type pace struct {
	quorum int64
	marks  []mark // the oldest first
	last   mark   // the latest step
}

type mark struct {
	at   time.Time
	step int64
}

func (p *pace) round(quorum, step int64, now time.Time) {
	if quorum != p.quorum {
		*p = pace{quorum: quorum}
	}
	if len(p.marks) > 0 && step <= p.last.step {
		return // the step was not committed
	}
	p.last = mark{now, step}
	if n := len(p.marks); n == 0 || now.Sub(p.marks[n-1].at) >= paceOver/paceMarks {
		p.marks = append(p.marks, p.last)
	}
	for len(p.marks) > 2 && now.Sub(p.marks[1].at) >= paceOver {
		p.marks = p.marks[1:]
	}
}

// duration returns how long a step takes; 0 if that is unknown, as in the first step of a quorum, or if a step takes long.
func (p *pace) duration(now time.Time) time.Duration {
	if len(p.marks) == 0 || p.last.step == p.marks[0].step {
		return 0
	}
	step := p.last.at.Sub(p.marks[0].at) / time.Duration(p.last.step-p.marks[0].step)
	if now.Sub(p.last.at) > max(paceOver, mostPeriods*step) {
		return 0
	}
	return step
}
