package quorum

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
)

// A quorum is a list of what its members say of themselves, which stays the same from step to step, and their states,
// which change together. So a member that holds the list of the quorum before need not be sent it again, and the states
// of thousands are sent as one.

// Revision names a list of members: a digest of all that they say but for their states. Being one, it means the same to
// a lighthouse that was restarted. 0 is no list.
type Revision uint64

// RevisionOf is the revision of a list, in this order.
func RevisionOf(members []Member) Revision {
	digest := sha256.New()
	var buf []byte
	for i := range members {
		buf = members[i].appendButState(buf[:0])
		_, _ = digest.Write(buf) // a hash takes everything
	}
	return Revision(max(1, binary.BigEndian.Uint64(digest.Sum(nil))))
}

// Change turns one list of members into another. Both are ordered by ReplicaID.
type Change struct {
	Whole bool     // Set is the new list; the old one does not matter
	Left  []int    // members that are not in it any more, by the place in the old list, ascending
	Set   []Member // members that joined, or say something new, ordered by ReplicaID
}

// Empty reports whether the lists are the same.
func (c Change) Empty() bool { return !c.Whole && len(c.Left) == 0 && len(c.Set) == 0 }

// Compare is what changed from one list to another, but for the states.
func Compare(before, after []Member) Change {
	var c Change
	for i, j := 0, 0; i < len(before) || j < len(after); {
		switch {
		case j == len(after) || i < len(before) && before[i].ReplicaID < after[j].ReplicaID:
			c.Left = append(c.Left, i)
			i++
		case i == len(before) || after[j].ReplicaID < before[i].ReplicaID:
			c.Set = append(c.Set, after[j])
			j++
		default:
			if !before[i].SameButState(&after[j]) {
				c.Set = append(c.Set, after[j])
			}
			i++
			j++
		}
	}
	return c
}

// Since is what a member that holds the list of a revision lacks of q's. Only q's own list and that of the quorum
// before, which may be nil, are known; a member that holds any other gets the whole.
func (q *Quorum) Since(held Revision, before *Quorum) Change {
	switch {
	case held == q.Revision:
		return Change{}
	case before != nil && held == before.Revision:
		if c := Compare(before.Members, q.Members); len(c.Set) < len(q.Members) {
			return c
		}
	}
	return Change{Whole: true, Set: q.Members}
}

// Apply makes the new list of the old one, which it leaves as it is. The states of members that stay are those of the
// old list. It fails on a change that was not made for this list, as far as that shows; comparing revisions shows it.
func (c Change) Apply(before []Member) ([]Member, error) {
	if c.Empty() {
		return before, nil
	}
	if c.Whole {
		before = nil
	}
	after := make([]Member, 0, max(0, len(before)-len(c.Left))+len(c.Set))
	set, left := c.Set, c.Left
	for i := range before {
		for len(set) > 0 && set[0].ReplicaID < before[i].ReplicaID {
			after, set = append(after, set[0]), set[1:]
		}
		replaced := len(set) > 0 && set[0].ReplicaID == before[i].ReplicaID
		if len(left) > 0 && left[0] == i {
			left = left[1:]
			if replaced {
				return nil, fmt.Errorf("member %s both left and changed", set[0].ReplicaID)
			}
			continue
		}
		if replaced {
			after, set = append(after, set[0]), set[1:]
			continue
		}
		after = append(after, before[i])
	}
	if len(left) > 0 {
		return nil, fmt.Errorf("place %d of those that left is not ascending, or not in a list of %d", left[0], len(before))
	}
	after = append(after, set...)
	for i := 1; i < len(after); i++ {
		if after[i-1].ReplicaID >= after[i].ReplicaID {
			return nil, fmt.Errorf("members %q and %q are not in order", after[i-1].ReplicaID, after[i].ReplicaID)
		}
	}
	return after, nil
}

// revisionAfter is the revision of a list that comes after a quorum's, which may be nil.
func revisionAfter(before *Quorum, members []Member) Revision {
	if before != nil && before.Revision != 0 && Compare(before.Members, members).Empty() {
		return before.Revision
	}
	return RevisionOf(members)
}

// States are the states of a list of members: nearly always all are in the same one.
type States struct {
	Common State
	Others []PlacedState // whose state is not Common, in order
}

// PlacedState is the state of the member at a place in the list.
type PlacedState struct {
	Place int
	State State
}

// StatesOf takes the states out of a list.
func StatesOf(members []Member) States {
	var s States
	counts, most := map[State]int{}, 0
	for i := range members {
		state := members[i].State()
		counts[state]++
		if n := counts[state]; n > most {
			s.Common, most = state, n
		}
	}
	if most == len(members) {
		return s
	}
	for i := range members {
		if state := members[i].State(); state != s.Common {
			s.Others = append(s.Others, PlacedState{i, state})
		}
	}
	return s
}

// Apply gives each member of a list its state, in a list of its own.
func (s States) Apply(members []Member) ([]Member, error) {
	members = slices.Clone(members)
	for i := range members {
		members[i].SetState(s.Common)
	}
	for _, other := range s.Others {
		if other.Place < 0 || other.Place >= len(members) {
			return nil, fmt.Errorf("a state is for place %d of a list of %d", other.Place, len(members))
		}
		members[other.Place].SetState(other.State)
	}
	return members, nil
}

func sorted[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
