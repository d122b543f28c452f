package quorum

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// speeds decides how fast the members of a quorum are in relation to each other, by the paces that they
// report. Their loaders cut each batch by these numbers (torchft/data/cut.py), so that a slow group computes
// fewer units. They travel with the quorum: its members cut alike because they have the same numbers.
//
// The numbers stay, from one quorum to the next, until others would shorten a step by recutGain. If a quorum
// stands, the next one is called for that.
type speeds struct {
	*core
	past     *memory
	standing *standing
	at       time.Time // of the last comparison
}

const (
	// recutGain is by how much other speeds must shorten a step. A new cut has a price, too: what groups have
	// read ahead is read again.
	recutGain = 1.1
	// usualSpeed is that of the group in the middle, and of one whose pace was not known at the last cut.
	usualSpeed = 100
	// maxSpeed bounds the numbers. A batch of fewer units than that cannot be cut more finely.
	maxSpeed = 100 * usualSpeed
)

// tick calls the next quorum if its members should cut batches by other speeds.
func (s *speeds) tick() {
	if !s.standing.holding || s.now.Sub(s.at) < paceEvery {
		return
	}
	s.at = s.now
	if latest := s.past.latest; !slices.Equal(s.next(latest.Members, s.past.members), latest.Speeds) {
		s.standing.wants("the groups are to cut a batch by other speeds")
	}
}

// next returns the speeds of the members of the next quorum, in their order; nil if they are equal, or if a
// member does not cut by them.
func (s *speeds) next(members []Member, records []*record) []int64 {
	present, paces := make([]int64, len(members)), make([]Pace, len(members))
	for i := range members {
		if !members[i].CutsBySpeed {
			return nil
		}
		present[i], paces[i] = s.past.speedOf(members[i].ReplicaID), records[i].pace
	}
	next := recut(present, paces)
	if slices.Min(next) == slices.Max(next) {
		return nil
	}
	return next
}

// speedOf returns the speed of a member in the latest quorum.
func (m *memory) speedOf(id string) int64 {
	if m.latest == nil || !m.latest.HasSpeeds() {
		return usualSpeed
	}
	if i, in := m.latest.Place(id); in {
		return m.latest.Speeds[i]
	}
	return usualSpeed
}

// HasSpeeds reports whether the quorum has a possible speed for each member. A member may have shown it.
func (q *Quorum) HasSpeeds() bool {
	return len(q.Members) > 0 && len(q.Speeds) == len(q.Members) && slices.Min(q.Speeds) > 0 &&
		slices.Max(q.Speeds) <= maxSpeed
}

// recut returns the speeds by which a batch is cut from now on, if these are the present ones: others if they
// shorten a step by recutGain. A member's speed changes only if its pace shows for certain that the present
// one is wrong, in relation to the member in the middle of those whose paces are known. The others, as spares
// and members that have just joined, keep their speeds in relation to it.
func recut(present []int64, paces []Pace) []int64 {
	var order []int
	for i, p := range paces {
		if p.Own > 0 {
			order = append(order, i)
		}
	}
	if len(order) < 2 {
		return present
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Compare(took(present, paces, a), took(present, paces, b))
	})
	middle := order[(len(order)-1)/2]
	others := make([]int64, len(paces))
	for i, p := range paces {
		scale := float64(present[middle]) / float64(present[i])
		fits := scale * float64(paces[middle].Own) // the own time with which the present speed is right
		off := math.Abs(float64(p.Own) - fits)
		speed := usualSpeed / scale
		if p.Own > 0 && off >= (recutGain-1)*fits &&
			off >= slowErrors*math.Hypot(float64(p.Error), scale*float64(paces[middle].Error)) {
			speed = usualSpeed * float64(paces[middle].Own) / float64(p.Own)
			if speed < recutGain*usualSpeed && usualSpeed < recutGain*speed {
				speed = usualSpeed // it is as fast as the others again, up to noise
			}
		}
		others[i] = int64(math.Round(min(maxSpeed, max(1, speed))))
	}
	if longest(present, paces) < recutGain*longest(others, paces) {
		return present
	}
	return others
}

// took returns how long a member computes if a batch is cut by these speeds, as a multiple of their sum.
func took(cut []int64, paces []Pace, i int) float64 { return float64(cut[i]) * float64(paces[i].Own) }

// longest returns how long the slowest member of known pace computes, as a multiple of what the whole
// batch takes it alone.
func longest(cut []int64, paces []Pace) (most float64) {
	sum := 0.0
	for i, speed := range cut {
		sum, most = sum+float64(speed), max(most, took(cut, paces, i))
	}
	return most / sum
}
