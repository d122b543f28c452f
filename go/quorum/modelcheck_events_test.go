package quorum

import (
	"hash/maphash"
	"slices"
	"time"
)

var (
	checkedAt = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)
	stampedAt = checkedAt.Add(-time.Second)
	beganAt   = stampedAt.Add(-time.Second)
)

// explorer visits all states. A mistake can be planted in the lighthouses, which the exploration must then find.
type explorer struct {
	seen    map[[2]uint64]struct{}
	seeds   [2]maphash.Seed
	next    []world
	last    bool // this round of events is the last one: its resulting states are counted, and not explored
	broken  bool
	mistake string

	real succession // made from the state of a lighthouse, for one decision
}

func (x *explorer) add(w *world) {
	w.normal()
	key := [2]uint64{maphash.Comparable(x.seeds[0], *w), maphash.Comparable(x.seeds[1], *w)}
	if _, seen := x.seen[key]; !seen {
		x.seen[key] = struct{}{}
		if !x.last {
			x.next = append(x.next, *w)
		}
	}
}

// take builds a real succession from the state of a lighthouse. put stores its changes back into that state.
func (x *explorer) take(w *world, place int) *succession {
	h, s := &w.lighthouses[place], &x.real
	s.seat = Seat{place, 2}
	s.term = int64(h.term)
	if s.bound == nil {
		s.bound, s.ended = map[string]bond{}, map[string]struct{}{}
	}
	clear(s.bound)
	clear(s.ended)
	for i := range mostMembers {
		if h.bound.has(i) {
			s.bound[ids[i:i+1]] = bond{stamp: stampedAt, known: whole(w.id(h.greeted[i]))}
		}
		if h.ended.has(i) {
			s.ended[ids[i:i+1]] = struct{}{}
		}
	}
	return s
}

func (x *explorer) put(w *world, place int) {
	h, s := &w.lighthouses[place], &x.real
	h.term = int8(s.term)
	h.bound, h.ended = 0, 0
	for id, one := range s.bound {
		if !one.stamp.IsZero() {
			h.bound |= 1 << member(id)
		}
	}
	for id := range s.ended {
		h.ended |= 1 << member(id)
	}
}

// goes makes a member begin a stream with a lighthouse.
func (x *explorer) goes(w *world, i, place int) {
	p, h, id := &w.members[i], &w.lighthouses[place], ids[i:i+1]
	if from := int(p.at); from >= 0 && from != place && p.on && x.mistake != "bonds broken early" {
		w.lighthouses[from].bound &^= 1 << i
	}
	s := x.take(w, place)
	s.back(id)
	s.greets(id, whole(w.id(p.knows)), int64(p.term) > s.term, beganAt)
	known := int64(p.term)
	if x.mistake == "no terms" {
		known = s.term
	}
	before := h.bound
	if s.begin(known, whole(h.highest), beganAt) {
		h.highest = max(h.highest, int16(s.term)<<lowBits+int16(w.clock)+1) // as in firstID: above the clock, which advances across a crash
		h.asks = 0
		for j := range w.members {
			if int(w.members[j].at) == place {
				w.members[j].on = false
			}
		}
	}
	s.answered(id, stampedAt)
	x.put(w, place)
	if x.mistake == "a new term releases no bonds" {
		h.bound |= before
	}
	h.greeted[i] = p.knows
	h.asks &^= 1 << i
	p.at, p.on, p.term = int8(place), true, max(p.term, h.term)
}

// asks makes a member show the quorum that it knows, and then ask.
func (x *explorer) asks(w *world, i, place int) {
	p, h := &w.members[i], &w.lighthouses[place]
	if w.id(p.knows) > w.id(h.last) && (h.last < 0 || x.mistake != "no questions for later quorums") {
		h.last, h.knows = p.knows, 0
		x.forget(w, place)
	}
	h.asks |= 1 << i
	h.knows &^= 1 << i
	if w.id(p.knows) >= w.id(h.last) {
		h.knows |= 1 << i
	}
}

// forget resets the state that the machine resets when another quorum becomes the latest one.
func (x *explorer) forget(w *world, place int) {
	last := &w.branches[w.lighthouses[place].last]
	x.take(w, place).keep(func(id string) bool { return last.voters().has(member(id)) })
	x.put(w, place)
}

// forms makes a lighthouse form a quorum of some of the asking members, which some of them receive.
func (x *explorer) forms(w *world, place int, in, receivers set) bool {
	h := &w.lighthouses[place]
	before := w.branches[h.last]
	last := w.past(h.last)
	changed := in != before.members
	base := x.take(w, place).baseAfter(last, changed, func(id string) bool {
		switch x.mistake {
		case "all know the last quorum":
			return true
		case "a late vote counts as knowledge":
			return (h.knows&in | h.ended).has(member(id))
		}
		return (h.knows & in).has(member(id))
	})
	switch {
	case x.mistake == "no base":
		base = nil
	case x.mistake == "one quorum in the base" && len(base) > 1:
		base = base[:1]
	case changed && len(base) > mostBases:
		return false
	}
	q := branch{id: before.id, members: in, alive: before.alive}
	for i, set := range base {
		q.base[i] = layer{setOf(set, func(Voter) bool { return true }), setOf(set, func(v Voter) bool { return v.Given })}
	}
	if changed || h.highest > before.id {
		h.highest++
		q.id = h.highest
	} else if q.base == before.base {
		return false // no event: this quorum equals the latest one
	}
	if receivers == in {
		if !q.alive {
			x.broken = true
		}
		for other := range w.branches {
			w.branches[other].alive = false
		}
		q.alive = true
	}
	n := int8(slices.IndexFunc(w.branches[:], func(b branch) bool { return b.members == 0 }))
	w.branches[n] = q
	h.last = n
	h.asks &^= in
	h.knows = 0
	if x.mistake == "a vote for two branches" {
		x.forget(w, place)
	} else {
		x.take(w, place).spend()
		x.put(w, place)
	}
	for i := range mostMembers {
		if receivers.has(i) {
			w.members[i].knows = n
			x.asks(w, i, place)
		}
	}
	return true
}

// mayForm reports whether the votes suffice for a quorum.
func (x *explorer) mayForm(w *world, place int, in set) bool {
	short := x.take(w, place).shortfalls(w.past(w.lighthouses[place].last), func(id string) bool { return in.has(member(id)) })
	if x.mistake == "half is enough" {
		short = slices.DeleteFunc(short, func(f shortfall) bool { return 2*f.votes >= len(f.set) })
	}
	return len(short) == 0
}

// step adds all states to which one event leads.
func (x *explorer) step(w *world) {
	for place := range w.lighthouses {
		for i := range mostMembers {
			x.learns(w, i, place)
			if w.members[i].at != ended {
				x.moves(w, i, place)
			}
		}
		x.formAll(w, place)
		if w.crashes > 0 {
			x.crash(w, place, false)
			x.crash(w, place, true)
		}
	}
}

func (x *explorer) moves(w *world, i, place int) {
	next := *w
	p, h := &next.members[i], &next.lighthouses[place]
	switch here := int(p.at) == place && p.on; {
	case here && h.asks.has(i):
		return
	case !here:
		x.goes(&next, i, place)
		if next.id(p.knows) > next.id(h.last) {
			silent := next
			x.add(&silent)
		}
	}
	x.asks(&next, i, place)
	x.add(&next)
}

func (x *explorer) learns(w *world, i, place int) {
	h := &w.lighthouses[place]
	if h.last < 0 || h.ended.has(i) {
		return
	}
	last := &w.branches[h.last]
	holds := x.take(w, place).holds(ids[i:i+1], whole(last.id), checkedAt)
	switch x.mistake {
	case "an unbound end is a vote":
		holds = true
	case "bonds of members that know more":
		holds = h.bound.has(i)
	}
	if !holds || !last.voters().has(i) {
		return
	}
	next := *w
	x.take(&next, place).end(ids[i : i+1])
	x.put(&next, place)
	next.members[i].at = ended
	next.lighthouses[place].asks &^= 1 << i
	x.add(&next)
}

func (x *explorer) formAll(w *world, place int) {
	h := &w.lighthouses[place]
	if h.last < 0 {
		return
	}
	var listens set
	for i := range mostMembers {
		if p := &w.members[i]; int(p.at) == place && p.on {
			listens |= 1 << i
		}
	}
	for in := h.asks; in != 0; in = (in - 1) & h.asks {
		if !x.mayForm(w, place, in) {
			continue
		}
		for receivers := in & listens; ; receivers = (receivers - 1) & in & listens {
			next := *w
			if x.forms(&next, place, in, receivers) {
				x.add(&next)
			}
			if receivers == 0 {
				break
			}
		}
	}
}

func (x *explorer) crash(w *world, place int, disk bool) {
	next := *w
	next.crashes--
	h := lighthouse{last: -1, highest: int16(w.clock) + 1} // the clock has advanced across the crash
	if old := &w.lighthouses[place]; disk {
		if old.last < 0 {
			return
		}
		h.last, h.highest = old.last, old.highest+1
	}
	next.lighthouses[place] = h
	for i := range next.members {
		if int(next.members[i].at) == place {
			next.members[i].on = false
		}
	}
	x.add(&next)
}
