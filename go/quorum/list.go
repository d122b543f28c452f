package quorum

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
)

// The message of a quorum has two parts: the list of its members with the fields that stay the same from step to step, and their
// states (State), which are usually the same for all members. A member that holds the list of the previous quorum is sent only the
// changes of the list. A state that is common to most members is sent once (States).

// Revision identifies a list of members. It is a digest of all fields but those of State, so a restarted lighthouse computes the same
// revision for the same list. 0 means that there is no list, or that its revision is not known.
type Revision uint64

// RevisionOf returns the revision of a list. It depends on the order of the members.
func RevisionOf(members []Member) Revision {
	digest := sha256.New()
	var buf []byte
	for i := range members {
		buf = members[i].appendButState(buf[:0])
		_, _ = digest.Write(buf) // never fails
	}
	return Revision(max(1, binary.BigEndian.Uint64(digest.Sum(nil)))) // never 0, which means no list
}

// Change turns one list of members into another. Both are ordered by ReplicaID.
type Change struct {
	Whole bool     // Set is the whole new list, and the old list is not used
	Left  []int    // indexes, in the old list, of the members that are not in the new list, ascending
	Set   []Member // members that are new, or that changed in fields other than those of State, ordered by ReplicaID
}

// Empty reports whether the two lists are equal, apart from the states.
func (c Change) Empty() bool { return !c.Whole && len(c.Left) == 0 && len(c.Set) == 0 }

// Compare returns the change from one list to another. Members that differ only in their State are equal.
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

// Since returns the change from a member's list to q's list. The argument held is the revision of the member's list, and before is the
// previous quorum, or nil if there is none. If the member's list is neither q's list nor that of before, the change has the whole list
// of q.
func (q *Quorum) Since(held Revision, before *Quorum) Change {
	switch {
	case held == q.Revision:
		return Change{}
	case before != nil && held != 0 && held == before.Revision: // 0 is not compared: in held it means no list, in before an adopted quorum
		if c := Compare(before.Members, q.Members); len(c.Set) < len(q.Members) { // otherwise the whole list is no larger than the change
			return c
		}
	}
	return Change{Whole: true, Set: q.Members}
}

// Apply returns the new list, and does not modify the old one. Members that are not in Set keep their states. Apply returns an error if
// the change was evidently made for another list. It does not detect every such change, so the caller must compare the revision of the
// result with that of the sender: otherwise two groups could compute their replica ranks from different lists.
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
			if replaced { // Compare puts a member into Left or into Set, never into both
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
	for i := 1; i < len(after); i++ { // a member's replica rank is its index, so all groups must have the same order
		if after[i-1].ReplicaID >= after[i].ReplicaID {
			return nil, fmt.Errorf("members %q and %q are not in order", after[i-1].ReplicaID, after[i].ReplicaID)
		}
	}
	return after, nil
}

// revisionAfter returns the revision of the list of a new quorum. The argument before is the previous quorum, or nil if there is none.
// If both have the same list, the revision of before is reused, because a comparison costs less than a digest. A previous quorum
// without a revision was adopted (memory.adopt): this lighthouse does not know all fields of its members.
func revisionAfter(before *Quorum, members []Member) Revision {
	if before != nil && before.Revision != 0 && Compare(before.Members, members).Empty() {
		return before.Revision
	}
	return RevisionOf(members)
}

// States has the states of a list of members. Usually all members have the same state.
type States struct {
	Common State         // the most frequent one
	Others []PlacedState // the states that differ from Common, ordered by Place
}

// PlacedState is the state of the member at the index Place of the list.
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

// Apply returns a copy of the list with these states. It returns an error if the list is too short for them.
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
