package quorum

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

const (
	mostMembers = 5
	mostBranch  = 8
	ids         = "abcde"
	lowBits     = 6 // of an id here, below its term
)

// set is a set of members, with one bit for each.
type set uint8

func (s set) has(i int) bool { return s>>i&1 == 1 }

func (s set) String() string {
	var names strings.Builder
	for i := range mostMembers {
		if s.has(i) {
			names.WriteByte(ids[i])
		}
	}
	return names.String()
}

func member(id string) int { return int(id[0] - 'a') }

// voters converts each set to the real type, with the votes that are given.
var voters = func() (all [1 << mostMembers][1 << mostMembers][]Voter) {
	for s := range all {
		for given := range all[s] {
			for i := range mostMembers {
				if set(s).has(i) && given&^s == 0 {
					all[s][given] = append(all[s][given], Voter{ReplicaID: ids[i : i+1], Given: set(given).has(i)})
				}
			}
		}
	}
	return all
}()

func setOf(of []Voter, counts func(Voter) bool) (s set) {
	for _, v := range of {
		if counts(v) {
			s |= 1 << member(v.ReplicaID)
		}
	}
	return s
}

type (
	// world is the state of all members and lighthouses. States that differ only in irrelevant details are made equal (normal).
	world struct {
		branches    [mostBranch]branch // quorums that a member or lighthouse knows, in order; the rest is empty
		lighthouses [2]lighthouse
		members     [mostMembers]memberState
		clock       int8 // low part of the highest id
		crashes     int8
	}
	branch struct {
		id      int16
		members set
		base    [mostBases]layer // the entries after the last one are empty
		alive   bool             // it is the latest quorum that all of its members have received, or a successor of that
	}
	layer struct {
		members, given set
	}
	lighthouse struct {
		highest            int16
		term               int8
		last               int8 // quorum, -1 if it knows none
		asks, bound, ended set
		knows              set               // asking members that know its last quorum
		greeted            [mostMembers]int8 // the quorum that each bound member knew when its stream began; -1 for none
	}
	memberState struct {
		at    int8 // its lighthouse; -1 before the first; ended if it has ended or is no member in this history
		knows int8 // quorum, -1 for none
		term  int8 // highest that it knows
		on    bool // its stream with the lighthouse has not ended
	}
)

const ended = -2

func whole(id int16) int64 { return int64(id>>lowBits)<<termBits + int64(id&(1<<lowBits-1)) }

func (w *world) id(q int8) int16 {
	if q < 0 {
		return 0
	}
	return w.branches[q].id
}

func (w *world) past(q int8) Past {
	b := &w.branches[q]
	p := Past{ID: whole(b.id), Members: voters[b.members][0]}
	for _, l := range b.base {
		if l.members != 0 {
			p.Base = append(p.Base, voters[l.members][l.given])
		}
	}
	return p
}

// voters returns the members and those of the base.
func (b *branch) voters() set {
	all := b.members
	for _, l := range b.base {
		all |= l.members
	}
	return all
}

// normal makes states equal that differ only in irrelevant details: quorums that are not known any more, the record of ended members, and the
// values of numbers that are only compared.
func (w *world) normal() {
	for i := range w.members {
		if p := &w.members[i]; p.at == ended {
			*p = memberState{at: ended, knows: -1}
		}
	}
	var used [mostBranch]bool
	for at := range w.lighthouses {
		h := &w.lighthouses[at]
		h.knows &= h.asks
		for i, known := range h.greeted {
			if !h.bound.has(i) || w.id(known) <= w.id(h.last) {
				h.greeted[i] = -1
			} else {
				used[known] = true
			}
		}
		if h.last >= 0 {
			used[h.last] = true
		}
	}
	for i := range w.members {
		if k := w.members[i].knows; k >= 0 {
			used[k] = true
		}
	}
	// Quorums are listed in the order of their ids, each once.
	var order []int8
	for q := range w.branches {
		if used[q] {
			order = append(order, int8(q))
		}
	}
	slices.SortFunc(order, func(a, b int8) int { return w.branches[a].compare(&w.branches[b]) })
	var branches [mostBranch]branch
	var place [mostBranch]int8
	n := int8(-1)
	for _, q := range order {
		if n < 0 || branches[n] != w.branches[q] {
			n++
		}
		branches[n], place[q] = w.branches[q], n
	}
	w.branches = branches
	move := func(q *int8) {
		if *q >= 0 {
			*q = place[*q]
		}
	}
	for at := range w.lighthouses {
		h := &w.lighthouses[at]
		move(&h.last)
		for i := range h.greeted {
			move(&h.greeted[i])
		}
	}
	for i := range w.members {
		move(&w.members[i].knows)
	}
	for at := range w.lighthouses {
		w.lower(&w.lighthouses[at])
	}
	w.shorten()
}

// lower makes the highest id of a lighthouse as small as possible: only whether it is above the ids of the quorums of its term
// matters.
func (w *world) lower(h *lighthouse) {
	term := h.highest >> lowBits
	top := term<<lowBits - 1
	for q := range w.branches {
		if b := &w.branches[q]; b.members != 0 && b.id>>lowBits == term {
			top = max(top, b.id)
		}
	}
	h.highest = min(h.highest, top+1)
}

// shorten makes the low parts of ids small, since they are only compared.
func (w *world) shorten() {
	low := func(id int16) int16 { return id & (1<<lowBits - 1) }
	used := uint64(1)
	for q := range w.branches {
		used |= 1 << low(w.branches[q].id)
	}
	for at := range w.lighthouses {
		used |= 1 << low(w.lighthouses[at].highest)
	}
	var rank [1 << lowBits]int16
	n := int16(-1)
	for i := range rank {
		if used>>i&1 == 1 {
			n++
		}
		rank[i] = n
	}
	for q := range w.branches {
		w.branches[q].id += rank[low(w.branches[q].id)] - low(w.branches[q].id)
	}
	for at := range w.lighthouses {
		w.lighthouses[at].highest += rank[low(w.lighthouses[at].highest)] - low(w.lighthouses[at].highest)
	}
	w.clock = int8(n)
}

func (b *branch) compare(o *branch) int {
	return cmp.Or(
		cmp.Compare(b.id, o.id),
		cmp.Compare(b.members, o.members),
		slices.CompareFunc(b.base[:], o.base[:], func(l, m layer) int {
			return cmp.Or(cmp.Compare(l.members, m.members), cmp.Compare(l.given, m.given))
		}),
		cmp.Compare(truth(b.alive), truth(o.alive)),
	)
}

func truth(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (w *world) String() string {
	var s strings.Builder
	for i, q := range w.branches {
		if q.members != 0 {
			fmt.Fprintf(&s, "quorum %d (id %d.%d): %s, base and given %v, alive %t\n", i, q.id>>lowBits, q.id&(1<<lowBits-1), q.members, q.base, q.alive)
		}
	}
	for i, h := range w.lighthouses {
		fmt.Fprintf(&s, "lighthouse %d: term %d, last %d, asks %s, bound %s, ended %s\n", i+1, h.term, h.last, h.asks, h.bound, h.ended)
	}
	for i, p := range w.members {
		if p.at != ended {
			fmt.Fprintf(&s, "%c: %+v\n", ids[i], p)
		}
	}
	return s.String()
}
