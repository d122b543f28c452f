package quorum

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"
)

// Pace is how long the slowest rank of a group works in a step without waiting for others, as of its last
// PaceSteps steps; the zero Pace: it is not known. A member reports it with its heartbeats.
type Pace struct {
	Rank  int64
	Own   time.Duration // the trimmed mean
	Error time.Duration // the standard error of it
	Host  string        // the rank's host: its load, clock, temperature
}

const (
	// PaceSteps is over how many steps a pace is averaged.
	PaceSteps = 10
	// trimmed is how many of them are left out at each end: an evaluation, a collection of garbage, a step
	// with a short sequence.
	trimmed = 2

	// A member is a straggler while its own time is at least slowRatio times the median of the others', and
	// their difference at least slowErrors times its standard error. It ends at fastRatio. Of ten steps that
	// scatter by 10 %, the mean scatters by 2 %: slowRatio lies in the middle between no difference and the
	// 20 % that must be found within ten steps.
	slowRatio, fastRatio = 1.12, 1.06
	slowErrors           = 4
	// paceEvery is the shortest time between two comparisons, which sort all members.
	paceEvery = time.Second / 2
)

// PaceOf returns the pace of a rank; the zero Pace unless there are PaceSteps times.
func PaceOf(rank int64, times []time.Duration, host string) (p Pace) {
	if len(times) != PaceSteps {
		return p
	}
	kept := slices.Sorted(slices.Values(times))[trimmed : PaceSteps-trimmed]
	var sum, squares float64
	for _, t := range kept {
		sum += float64(t)
	}
	mean := sum / float64(len(kept))
	// The variance of the winsorized sample, which stands for what was trimmed (Tukey and McLaughlin, 1963).
	for i, t := range kept {
		d := float64(t) - mean
		n := 1.0
		if i == 0 || i == len(kept)-1 {
			n += trimmed
		}
		squares += n * d * d
	}
	deviation := math.Sqrt(squares / (PaceSteps - 1))
	share := float64(len(kept)) / PaceSteps
	return Pace{Rank: rank, Own: time.Duration(mean),
		Error: time.Duration(deviation / (share * math.Sqrt(PaceSteps))), Host: host}
}

// slower reports whether a member with pace p is a straggler, if usual is the pace in the middle of the
// others', and was tells whether it was one before.
func slower(p, usual Pace, was bool) bool {
	ratio := float64(p.Own) / float64(usual.Own)
	if was {
		return ratio >= fastRatio
	}
	certain := math.Hypot(float64(p.Error), float64(usual.Error))
	return ratio >= slowRatio && float64(p.Own-usual.Own) >= slowErrors*certain
}

// stragglers finds the members of the latest quorum that are slower than the others in their own work. They
// are named, and stay in: only its operators know what a slow host is worth.
type stragglers struct {
	*core
	past *memory
	at   time.Time         // of the last comparison
	slow map[string]string // the stragglers, and why
}

func (s *stragglers) tick() {
	if s.now.Sub(s.at) < paceEvery {
		return
	}
	s.at = s.now
	var known []*record
	for _, r := range s.past.members {
		if r.alive() && r.pace.Own > 0 {
			known = append(known, r)
		}
	}
	if len(known) < 2 {
		s.slow = nil
		return
	}
	slices.SortFunc(known, func(a, b *record) int { return cmp.Compare(a.pace.Own, b.pace.Own) })
	before := s.slow
	s.slow = nil
	for i, r := range known {
		middle := (len(known) - 1) / 2 // of the others
		if i <= middle {
			middle++
		}
		usual := known[middle].pace
		reason, was := before[r.id]
		if !slower(r.pace, usual, was) {
			continue
		}
		if !was {
			reason = fmt.Sprintf("rank %d works %s in a step, %.2f times the others' %s; %s", r.pace.Rank,
				short(r.pace.Own), float64(r.pace.Own)/float64(usual.Own), short(usual.Own), r.pace.Host)
			s.do(Report{What: MemberStraggles, QuorumID: s.past.latest.ID, ReplicaID: r.id, Reason: reason})
		}
		if s.slow == nil {
			s.slow = map[string]string{}
		}
		s.slow[r.id] = reason
	}
}

// short rounds a duration to three digits.
func short(d time.Duration) time.Duration {
	unit := time.Nanosecond
	for d/unit >= 1000 {
		unit *= 10
	}
	return d.Round(unit)
}
