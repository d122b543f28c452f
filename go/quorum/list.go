package quorum

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
)

// The message of a quorum has two parts: the list of its members with the fields that stay the same from step to step, and their
// states (State), which are mostly the same for all members. A member that has the list of the previous quorum is sent the changes
// only, and the states of thousands of members are sent as one.

// Revision identifies a list of members: a digest of all fields but the states. Since it is a digest, it is the same after a restart of
// the lighthouse. 0 is no list.
type Revision uint64

// RevisionOf returns the revision of a list, in this order.
func RevisionOf(members []Member) Revision {
	digest := sha256.New()
	var buf []byte
	for i := range members {
		buf = members[i].appendButState(buf[:0])
		_, _ = digest.Write(buf) // never fails
	}
	return Revision(max(1, binary.BigEndian.Uint64(digest.Sum(nil))))
}

// Change turns one list of members into another. Both are ordered by ReplicaID.
type Change struct {
	Whole bool     // Set is the new list; the old one does not matter
	Left  []int    // places in the old list of the members that are not in the new one, ascending
	Set   []Member // members that joined or have changed, ordered by ReplicaID
}

// Empty reports whether the lists are the same.
func (c Change) Empty() bool { return !c.Whole && len(c.Left) == 0 && len(c.Set) == 0 }

// Compare returns the change from one list to another, without the states.
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

// Since returns the change from the list with the revision held, which a member holds, to q's list. Only two lists are known here:
// q's own, and the one of the previous quorum (before, which may be nil). A member that holds any other list gets the whole one.
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

// Apply returns the new list; the old one is not changed. Members that stay keep their states of the old list. It returns an error if
// the change cannot have been made for this list. That does not find all such changes: the caller compares revisions.
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

// revisionAfter returns the revision of a new list; it is computed only if the list differs from that of the previous quorum, which
// may be nil.
func revisionAfter(before *Quorum, members []Member) Revision {
	if before != nil && before.Revision != 0 && Compare(before.Members, members).Empty() {
		return before.Revision
	}
	return RevisionOf(members)
}

// States are the states of a list of members. Mostly all members have the same one.
type States struct {
	Common State
	Others []PlacedState // the members whose state is not Common, in order of their places
}

// PlacedState is the state of the member at a place in the list.
type PlacedState struct {
	Place int
	State State
}

// StatesOf returns the states of a list of members.
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

// Apply returns a copy of the list in which each member has its state.
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
