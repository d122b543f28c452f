package agree

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
)

// names are the names of processes. Each name has its own place on the network. One more place is for a
// second process with one of the names.
var names = []string{"a", "b", "c", "d", "e"}

var twin = len(names)

// The two channels of a link, which lose messages independently: notes travel in packets that other members
// forward, what members tell each other besides on connections.
const (
	notes = iota
	told
	kinds
)

// process is a running member.
type process struct {
	*Machine
	place   int
	seen    map[ID]Peer // its list of live members, with their last received notes
	version map[ID]int  // of the notes in seen
	in      *View       // the view that it took
	leaving bool        // it has announced that it leaves, and ends soon
}

func (p *process) id() ID { return p.cfg.Me }

// world has processes on a network that loses, delays and repeats messages of each kind in each direction.
// Sometimes their lists of live members are wrong.
type world struct {
	*rand.Rand
	running  []*process
	notes    map[ID][]Peer          // all notes of each incarnation
	old      []Known                // earlier messages, which may be repeated
	left     []*process             // processes that have left; others may learn it late
	stirred  *process               // the process that has just joined a view
	latest   *View                  // the latest view that any member has joined
	link     [][][kinds]int         // from, to, kind: percent that arrive
	pace     int                    // in one of so many rounds, a process ends
	names    int                    // number of names in use
	seeds    int                    // number of seeds, which are the first names
	doubled  string                 // the name that two processes may have at a time; empty: none
	late     bool                   // processes start with clocks that are behind
	lives    int64                  // number of processes started so far
	views    map[string]*View       // views that any member has joined, by digest
	by       map[string]map[ID]bool // the members that have joined a view, by its digest
	formed   []*View                // in order of their numbers
	together int64                  // number of the last view with all running members
	made     map[string]bool        // digests of the views that were live
	broken   string                 // the rule that was broken
	how      string                 // how it was broken
	events   int
}

func newWorld(random *rand.Rand) *world {
	w := &world{
		Rand: random, notes: map[ID][]Peer{}, views: map[string]*View{}, by: map[string]map[ID]bool{},
		made: map[string]bool{}, pace: []int{3, 10, 40}[random.IntN(3)],
		names: []int{2, 3, 4, 5, 5}[random.IntN(5)], seeds: 1 + random.IntN(2),
		link: make([][][kinds]int, len(names)+1),
	}
	for i := range w.link {
		w.link[i] = make([][kinds]int, len(names)+1)
	}
	w.connect()
	for _, name := range names[:w.seeds] {
		w.start(name)
	}
	return w
}

// find returns the process of an incarnation, nil if it has ended.
func (w *world) find(id ID) *process {
	for _, p := range w.running {
		if p.id() == id {
			return p
		}
	}
	return nil
}

// named returns the latest incarnation of a name, nil if there is none.
func (w *world) named(name string) (latest *process) {
	for _, p := range w.running {
		if p.id().Name == name && (latest == nil || latest.id().Incarnation < p.id().Incarnation) {
			latest = p
		}
	}
	return latest
}

func (w *world) start(name string) {
	place, at := slices.Index(names, name), name
	if w.named(name) != nil {
		place = twin
	}
	var seeds [][]string
	for _, seed := range names[:w.seeds] {
		seeds = append(seeds, []string{seed})
	}
	if w.lives++; w.lives > int64(w.seeds) { // the first processes of the seeds start the job
		at = fmt.Sprint(name, w.lives)
	}
	life := 2 * w.lives
	if w.late {
		life -= 1 + 2*w.Int64N(w.lives) // its clock is behind
	}
	p := &process{
		Machine: New(Config{Me: ID{name, life}, At: at, Seeds: seeds, MinMembers: 1}),
		place:   place, seen: map[ID]Peer{}, version: map[ID]int{},
	}
	if w.late && len(w.running) > 0 {
		other := w.pick() // an earlier incarnation may count as alive there
		maps.Copy(p.seen, other.seen)
		maps.Copy(p.version, other.version)
		p.See(p.seen)
		p.Rise()
	}
	if w.notes[p.id()] != nil {
		return // two incarnations with the same number: clocks with nanoseconds, and Rise, prevent that
	}
	w.notes[p.id()] = []Peer{{p.Note(), at}}
	w.running = append(w.running, p)
}

func (w *world) end(p *process) {
	w.running = slices.DeleteFunc(w.running, func(o *process) bool { return o == p })
}

// connect makes all links reliable.
func (w *world) connect() {
	w.split(make([]int, len(w.link)), [kinds]int{100, 100}, [kinds]int{})
}

// split assigns each place to a part of the network, and sets which percentage of messages arrives within a
// part, and across parts.
func (w *world) split(part []int, within, across [kinds]int) {
	for from := range w.link {
		for to := range w.link {
			if w.link[from][to] = across; part[from] == part[to] {
				w.link[from][to] = within
			}
		}
	}
}

// change changes the state of the network at random.
func (w *world) change() {
	part, within, across := make([]int, len(w.link)), [kinds]int{100, 100}, [kinds]int{}
	switch w.IntN(4) {
	case 0: // one network
	case 1:
		for place := range part {
			part[place] = w.IntN(3)
		}
	default:
		// a cut through the latest view: some of its members are with others that may know an earlier one
		if v := w.latest; v != nil {
			for _, p := range w.running {
				if v.Has(p.id()) && w.IntN(2) == 0 {
					part[p.place] = 1
				}
			}
		}
	}
	if w.IntN(8) == 0 {
		within[w.IntN(kinds)] = 30 * w.IntN(2)
	}
	if w.IntN(4) == 0 {
		across[w.IntN(kinds)] = 100
	}
	w.split(part, within, across)
	if w.IntN(2) == 0 { // links that lose all messages of one kind in one direction
		for range 1 + w.IntN(len(part)) {
			w.link[w.IntN(len(part))][w.IntN(len(part))][w.IntN(kinds)] = 0
		}
	}
}

func (w *world) arrives(from, to *process, kind int) bool {
	return from != to && w.IntN(100) < w.link[from.place][to.place][kind]
}

// deliver delivers a note to a process, unless the process has a later one of the same sender.
func (w *world) deliver(p *process, id ID, version int) {
	if known, found := p.version[id]; id == p.id() || found && known >= version {
		return
	}
	p.seen[id], p.version[id] = w.notes[id][version], version
	w.does(p, func() { p.See(p.seen) })
}

func (w *world) forget(p *process, id ID) {
	delete(p.seen, id)
	delete(p.version, id)
	w.does(p, func() { p.See(p.seen) })
}

// pull delivers to a process what another one knows.
func (w *world) pull(p, other *process) {
	known := other.Known()
	if len(w.old) < 50 {
		w.old = append(w.old, known)
	} else {
		w.old[w.IntN(50)] = known
	}
	w.does(p, func() { p.Learn(known) })
}

// exchange delivers one message of another process to a process, if it arrives.
func (w *world) exchange(p, other *process) {
	switch kind := w.IntN(kinds); {
	case !w.arrives(other, p, kind):
	case kind == told:
		w.pull(p, other)
	case w.IntN(4) > 0:
		w.deliver(p, other.id(), len(w.notes[other.id()])-1)
	default: // a delayed note, and the notes that the other one has seen
		id := other.id()
		w.deliver(p, id, w.IntN(len(w.notes[id])))
		for _, id := range slices.SortedFunc(maps.Keys(other.seen), compare) {
			w.deliver(p, id, other.version[id])
		}
	}
}

func (w *world) pick() *process { return w.running[w.IntN(len(w.running))] }

// play plays this many events; processes end if ends is set. Some events come in rounds, in which members
// agree if the network allows it. Others come one by one, which leaves members between two views.
func (w *world) play(events int, ends bool) {
	for end := w.events + events; w.events < end && w.broken == ""; {
		if w.IntN(3) == 0 {
			w.change()
		}
		if name := w.name(); w.IntN(4) == 0 && (w.named(name) == nil || name == w.doubled && !w.runs(twin)) {
			w.start(name)
		}
		if ends && len(w.running) > 1 && w.IntN(w.pace) == 0 {
			w.ends(w.pick())
		}
		switch w.IntN(4) {
		case 0:
			w.round(ends)
			continue
		case 1, 2:
			w.episode(ends)
			continue
		}
		for range 1 + w.IntN(2*len(w.running)) {
			w.step(w.pick())
			w.disturb(ends)
		}
	}
}

// disturb causes faults between the joining of a view and its consequences, where most mistakes show.
func (w *world) disturb(ends bool) {
	p := w.stirred
	if w.stirred = nil; p == nil || w.IntN(4) > 0 {
		return
	}
	if w.change(); ends && len(w.running) > 1 && w.find(p.id()) == p && w.IntN(4) == 0 {
		w.ends(p)
	}
}

func (w *world) name() string { return names[w.IntN(w.names)] }

func (w *world) runs(place int) bool {
	return slices.ContainsFunc(w.running, func(p *process) bool { return p.place == place })
}

// round delivers all messages between all processes, as far as the network allows, and lets each train.
func (w *world) round(ends bool) {
	order := slices.Clone(w.running)
	w.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	for _, p := range order {
		if w.find(p.id()) == nil {
			continue
		}
		w.events += len(order)
		if w.IntN(2) == 0 {
			w.miss(p)
		}
		for _, other := range order {
			if w.find(other.id()) == nil {
				continue
			}
			if w.arrives(other, p, notes) {
				w.deliver(p, other.id(), len(w.notes[other.id()])-1)
			}
			if w.arrives(other, p, told) {
				w.pull(p, other)
			}
		}
		w.train(p)
		w.disturb(ends)
	}
}

// episode delivers some messages among some of the processes only, so that views may be joined that few
// members know of.
func (w *world) episode(ends bool) {
	within := map[*process]bool{}
	for _, p := range w.running {
		within[p] = w.IntN(3) > 0
		if v := w.latest; v != nil && w.IntN(4) > 0 {
			within[p] = v.Has(p.id()) == (w.IntN(4) > 0)
		}
	}
	for range 1 + w.IntN(8) {
		p := w.pick()
		if w.events++; !within[p] {
			continue
		}
		for _, id := range slices.SortedFunc(maps.Keys(p.seen), compare) {
			if other := w.find(id); (other == nil || !within[other]) && w.IntN(2) == 0 {
				w.forget(p, id)
			}
		}
		kind := w.IntN(2 * kinds)
		for _, other := range w.running {
			if !within[other] || other == p || w.IntN(4) == 0 {
				continue
			}
			if kind != notes {
				w.pull(p, other)
			}
			if kind != told {
				w.deliver(p, other.id(), len(w.notes[other.id()])-1)
			}
		}
		w.train(p)
		w.disturb(ends)
	}
}

// ends ends a process at once, or makes it leave first.
func (w *world) ends(p *process) {
	if p.leaving || w.IntN(2) == 0 {
		w.end(p)
		return
	}
	w.leaves(p)
}

// leaves makes a process announce that it leaves.
func (w *world) leaves(p *process) {
	p.leaving = true
	w.does(p, p.Leave)
	w.left = append(w.left, p)
	for _, other := range w.running {
		if w.arrives(p, other, told) {
			w.deliverLeft(other, p)
		}
	}
}

// deliverLeft delivers to a process the message that another one has left.
func (w *world) deliverLeft(p, left *process) {
	if p != left {
		w.does(p, func() { p.Learn(gone(left.Machine)) })
	}
}

// miss makes a process count the members whose notes do not reach it as failed.
func (w *world) miss(p *process) {
	for _, id := range slices.SortedFunc(maps.Keys(p.seen), compare) {
		if other := w.find(id); other == nil || w.link[other.place][p.place][notes] == 0 {
			w.forget(p, id)
		}
	}
}

// step plays one event of a process.
func (w *world) step(p *process) {
	w.events++
	switch what := w.IntN(100); {
	case what < 60:
		w.exchange(p, w.pick())
	case what < 70:
		w.miss(p)
	case what < 85:
		w.train(p)
	case what < 88: // a live member is missing in the list
		if ids := slices.SortedFunc(maps.Keys(p.seen), compare); len(ids) > 0 {
			w.forget(p, ids[w.IntN(len(ids))])
		}
	case what < 91:
		w.does(p, p.Ask)
	case what < 94:
		if p.note.Asks {
			w.does(p, p.Cancel)
		}
	case what < 97:
		if len(w.left) > 0 {
			w.deliverLeft(p, w.left[w.IntN(len(w.left))])
		}
	default:
		if len(w.old) > 0 {
			w.does(p, func() { p.Learn(w.old[w.IntN(len(w.old))]) })
		}
	}
}

// train plays a training step: the process asks for another view if its view is not live any more, or if
// others want to join.
func (w *world) train(p *process) {
	news := p.News()
	if !p.note.Asks && !p.leaving && (p.Taken() == nil || news.Ended != "" || len(news.Joining) > 0) {
		w.does(p, p.Ask)
	}
}

// rest delivers all messages of the running processes until their view has all of them. It reports whether
// there is such a view.
func (w *world) rest() bool {
	for _, p := range slices.Clone(w.running) {
		if p.leaving || w.named(p.id().Name) != p {
			w.end(p)
		}
	}
	for range 60 {
		for _, p := range w.running {
			for _, id := range slices.SortedFunc(maps.Keys(p.seen), compare) {
				if w.find(id) == nil {
					w.forget(p, id)
				}
			}
			for _, other := range w.running {
				if other != p {
					w.deliver(p, other.id(), len(w.notes[other.id()])-1)
					w.pull(p, other)
				}
			}
			w.train(p)
		}
		if live := w.live(); w.broken != "" || len(live) == 1 && len(live[0].Members) == len(w.running) {
			w.together = w.running[0].Taken().number()
			return w.broken == ""
		}
	}
	return false
}

func (w *world) mustRest() {
	if w.broken == "" && !w.rest() {
		w.fails(ruleTogether, "%v", w.waits())
	}
}

func (w *world) waits() (all []string) {
	for _, p := range w.running {
		all = append(all, fmt.Sprintf("%v: %s", p.id(), p.Waits()))
	}
	return all
}

// calm is a history in which only the network fails.
func (w *world) calm() {
	w.play(20+w.IntN(600), false)
	w.mustRest()
}

// supervised is a history in which at most one process at a time ends unannounced, of a view with at least
// three, or the younger one of two, and is then restarted under its name. Or some processes leave, and all
// others learn of it.
func (w *world) supervised() {
	w.calm()
	for range 1 + w.IntN(4) {
		if n := len(w.running); n > 2 && w.broken == "" && w.IntN(3) == 0 {
			w.end(w.pick())
			w.mustRest()
		} else if n > 1 && w.broken == "" && w.IntN(2) == 0 {
			w.connect()
			for _, p := range w.running[:1+w.IntN(n-1)] {
				w.leaves(p)
			}
			if w.IntN(2) == 0 { // the leaving members end at once: new members do not learn it from them
				w.running = slices.DeleteFunc(w.running, func(p *process) bool { return p.leaving })
			}
			w.play(w.IntN(100), false)
			w.mustRest()
		}
		w.play(20+w.IntN(200), false)
		killed := w.pick()
		if w.broken == "" && !w.needed(killed) {
			w.end(killed)
			w.play(w.IntN(100), false)
			if w.named(killed.id().Name) == nil {
				w.start(killed.id().Name)
			}
			w.play(w.IntN(100), false)
		}
		if w.needed(killed) { // another one has joined a view with it since it ended
			return
		}
		w.mustRest()
	}
}

// needed reports whether the job may not continue without a process: it is the oldest one of one or two
// members of a view that any of them has joined since the last view of all processes.
func (w *world) needed(p *process) bool {
	for _, v := range w.views {
		if v.Number >= w.together && len(v.Members) <= 2 && v.Has(p.id()) &&
			older(p.id(), v.Members[0].ID) <= 0 &&
			older(p.id(), v.Members[len(v.Members)-1].ID) <= 0 {
			return true
		}
	}
	return false
}

// wild is a history in which processes leave and are killed, sometimes more than half of a view. It reports
// whether the remaining ones get a view.
func (w *world) wild() bool {
	if w.IntN(4) == 0 {
		w.doubled = w.name()
	}
	w.late = w.IntN(4) == 0
	w.play(20+w.IntN(800), true)
	return w.broken == "" && w.rest()
}
