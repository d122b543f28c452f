package agree

import (
	"fmt"
	"slices"
)

// The rules that every history must keep. The oracle knows which views members join and take, and which
// members run; for ruleRemembered it reads the state of the machine. Most rules are lemmas of the proof: a
// mistake breaks one of them long before two views are live.
const (
	ruleLive       = "at most one view is live"
	ruleTaken      = "a member takes a view that all of its members have joined"
	ruleShared     = "a formed view shares a member with the one before"
	ruleJoined     = "a member joins views with growing numbers, and none after it has left"
	ruleFollows    = "a member of the last formed view joins more than half of it, or half with the oldest"
	ruleRemembered = "a member that was in a formed view remembers it, or a later one"
	ruleTogether   = "members that reach each other get a view of all"
)

func (w *world) fails(rule, how string, arguments ...any) {
	if w.broken == "" {
		w.broken, w.how = rule, fmt.Sprintf(how, arguments...)
	}
}

// does runs an action of a process, and then checks its note and its view.
func (w *world) does(p *process, happens func()) {
	happens()
	id, note, in := p.id(), p.Note(), p.Taken()
	notes := w.notes[id]
	if last := notes[len(notes)-1].Note; note != last {
		w.notes[id] = append(notes, Peer{note, p.cfg.At})
		if note.Joined != last.Joined || note.Digest != last.Digest {
			w.joins(p, last, note)
		}
	}
	w.remembers(p)
	if in != p.in {
		if p.in = in; in != nil {
			w.taken(p)
		}
	}
}

func (w *world) joins(p *process, last, note Note) {
	if note.Joined <= last.Joined || last.Left {
		w.fails(ruleJoined, "%v: %+v after %+v", p.id(), note, last)
	}
	v := p.formed // at once, if there are no other members
	for _, a := range p.joined {
		v = a
	}
	if v.Digest() != note.Digest {
		w.fails(ruleJoined, "%v: %+v is not the view that it remembers", p.id(), note)
		return
	}
	w.stirred, w.latest = p, v
	if w.by[note.Digest] == nil {
		w.views[note.Digest], w.by[note.Digest] = v, map[ID]bool{}
	}
	w.by[note.Digest][p.id()] = true
	w.follows(p, v)
	if len(w.by[note.Digest]) < len(v.Members) {
		return
	}
	compareNumber := func(f *View, number int64) int { return int(f.Number - number) }
	at, same := slices.BinarySearchFunc(w.formed, v.Number, compareNumber)
	if same {
		w.fails(ruleShared, "two views have the number %d", v.Number)
	}
	w.formed = slices.Insert(w.formed, at, v)
	for i := max(at, 1); i < min(at+2, len(w.formed)); i++ {
		before, after := w.formed[i-1], w.formed[i]
		if !slices.ContainsFunc(before.Members, func(q Member) bool { return after.Has(q.ID) }) {
			w.fails(ruleShared, "%+v and %+v", before, after)
		}
	}
	for _, p := range w.running {
		w.remembers(p)
	}
}

// follows compares a view that a process joins with the last formed view before it, if the process is a
// member of that formed view.
func (w *world) follows(p *process, v *View) {
	var last *View
	for _, f := range w.formed {
		if f.Number < v.Number {
			last = f
		}
	}
	if last == nil || !last.Has(p.id()) {
		return
	}
	here, counted := 0, []ID{}
	for _, q := range last.Members {
		note := w.notes[q.ID][len(w.notes[q.ID])-1]
		switch {
		case v.Has(q.ID): // one that has left, too: v will not be formed
			here++
		case note.Left && note.Joined <= last.Number:
			continue
		}
		counted = append(counted, q.ID)
	}
	if all := len(counted); 2*here < all || 2*here == all && !v.Has(slices.MinFunc(counted, older)) {
		w.fails(ruleFollows, "%v joins %+v after %+v", p.id(), v, last)
	}
}

// remembers checks the views after the last one that a process knows to be formed.
func (w *world) remembers(p *process) {
	for _, v := range slices.Backward(w.formed) {
		if v.Number <= p.formed.number() {
			return
		}
		if v.Has(p.id()) && !slices.ContainsFunc(p.joined,
			func(a *View) bool { return a.Digest() == v.Digest() }) {
			w.fails(ruleRemembered, "%v has forgotten %+v", p.id(), v)
		}
	}
}

func (w *world) taken(p *process) {
	if by := w.by[p.in.Digest()]; len(by) < len(p.in.Members) {
		w.fails(ruleTaken, "%v: %+v, which %v have joined", p.id(), p.in, by)
	}
	if live := w.live(); len(live) > 1 {
		w.fails(ruleLive, "%+v", live)
	}
}

// live returns the views whose members are all running and in the view.
func (w *world) live() (live []View) {
	in := map[ID]string{}
	for _, p := range w.running {
		if v := p.Taken(); v != nil {
			in[p.id()] = v.Digest()
		}
	}
	seen := map[string]bool{}
	for _, p := range w.running {
		v := p.Taken()
		if v == nil || seen[v.Digest()] {
			continue
		}
		seen[v.Digest()] = true
		if !slices.ContainsFunc(v.Members, func(q Member) bool { return in[q.ID] != v.Digest() }) {
			w.made[v.Digest()] = true
			live = append(live, *v)
		}
	}
	return live
}
