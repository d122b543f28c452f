package rendezvous

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Machine holds the groups of one job. It is not safe for concurrent use.
type Machine struct {
	timing    Timing
	groups    map[string]*group
	waiters   map[WaiterID]waiter
	wake      time.Time
	remembers bool // it was started with a saved state
	ahead     ahead
}

// ahead has those groups whose standings decide for the others (Machine.others): two of each kind, since one
// of them may be the group that is decided for.
type ahead struct {
	known    bool      // false: a standing has changed
	trains   [2]*group // that train, the first by name first
	smallest [2]*group // that may train again, the smallest last size first
}

type waiter struct {
	group *group
	node  *node
}

// NewMachine returns a machine that continues from a saved state; with the zero State a job begins. Nodes of
// the state count as failed unless they come within the timeout. The shell then feeds a Woken, so that the
// machine asks for a Wake at the end of the timeout.
func NewMachine(timing Timing, state State, now time.Time) *Machine {
	m := &Machine{timing: timing, groups: map[string]*group{}, waiters: map[WaiterID]waiter{},
		remembers: len(state.Groups) > 0}
	for _, s := range state.Groups {
		allowed, err := s.Settings.allowed()
		if err != nil || s.Round < 0 || s.Round > maxRound {
			continue // a version with other settings saved it: the group begins again
		}
		g := m.group(s.Group)
		g.settings, g.allowed, g.round, g.size, g.store, g.closed = s.Settings, allowed, s.Round, s.Size,
			s.Store, s.Closed
		for _, a := range s.Members {
			g.nodes[a.Node] = &node{
				name: a.Node, store: a.Store, ask: a.Ask, placed: a.Ask, round: s.Round, rank: a.Rank,
				size: s.Size, at: s.Store,
				away: now, seen: map[WaiterID]View{},
			}
		}
		g.stood = g.stands()
	}
	return m
}

func (m *Machine) group(name string) *group {
	g := m.groups[name]
	if g == nil {
		g = &group{name: name, nodes: map[string]*node{}, left: map[string]time.Time{},
			remembers: m.remembers}
		m.groups[name] = g
	}
	return g
}

// Step handles one event.
func (m *Machine) Step(event Event, now time.Time) (actions []Action) {
	do := func(a Action) { actions = append(actions, a) }
	var of *group // the group that the event is about
	switch e := event.(type) {
	case Attended:
		m.attended(e, now, do)
		if of = m.groups[e.Group]; of == nil {
			return actions // the request was refused
		}
	case Woken:
		m.wake = time.Time{}
	case Ended:
		w, ok := m.waiters[e.Waiter]
		if !ok {
			return nil // the request has been answered
		}
		m.end(e.Waiter, w, e.Broke, now)
		if !e.Broke {
			do(Answer{e.Waiter, w.group.view(w.node), w.group.reason})
		}
		of = w.group
	}
	m.settle(of, now, do)
	return actions
}

func (m *Machine) attended(e Attended, now time.Time, do func(Action)) {
	if err := e.validate(); err != nil {
		do(Refuse{Waiter: e.Waiter, Reason: err.Error()})
		return
	}
	g := m.groups[e.Group]
	if e.Leave {
		if g != nil {
			m.leave(g, e.Request, now, do)
		}
		do(Answer{Waiter: e.Waiter})
		return
	}
	if g == nil && len(m.groups) >= maxGroups && !m.makeRoom(now) {
		do(Refuse{e.Waiter, true, fmt.Sprintf("group %q is one too many: a job has at most %d", e.Group,
			maxGroups)})
		return
	}
	if g == nil {
		g = m.group(e.Group)
	}
	g.forget(now, m.timing)
	if _, left := g.left[e.Node]; left {
		do(Refuse{e.Waiter, true, "the node has left"})
		return
	}
	if g.nodes[e.Node] == nil && (g.closed || g.settings != e.Settings) && g.deserted(now, m.timing) {
		g.restart(e.Settings) // the job that used the name has ended
	}
	if why := g.misfit(e.Request); why != "" {
		do(Refuse{e.Waiter, true, why})
		return
	}
	if size, _ := m.others(g); size > 0 && !slices.Contains(allowedOf(e.Settings), size) {
		do(Refuse{e.Waiter, true, fmt.Sprintf("group %q of this node has %s, and the job's other groups "+
			"have %d nodes each", e.Group, e.Settings, size)})
		return
	}
	n := g.attend(e.Request, now, m.timing)
	if e.Close && !g.closed {
		g.closed, g.changed = true, true
	}
	n.seen[e.Waiter] = e.Seen
	m.waiters[e.Waiter] = waiter{g, n}
}

// makeRoom drops a group that has no nodes any more, and reports whether there was one. Otherwise names of
// groups that have ended would fill a job for ever. A node of the group that comes back restores its round,
// as after a restart of the lighthouse without its state.
func (m *Machine) makeRoom(now time.Time) bool {
	for _, g := range m.sorted() {
		if g.forget(now, m.timing); len(g.nodes) == 0 && len(g.left) == 0 {
			delete(m.groups, g.name)
			m.ahead.known = false
			return true
		}
	}
	return false
}

func allowedOf(s Settings) []int {
	allowed, _ := s.allowed() // the request was validated
	return allowed
}

// leave removes a node and its requests.
func (m *Machine) leave(g *group, r Request, now time.Time, do func(Action)) {
	n := g.nodes[r.Node]
	if r.Close && n != nil && !g.closed {
		g.closed, g.changed = true, true
	}
	if n == nil {
		return
	}
	for _, id := range slices.Sorted(maps.Keys(n.seen)) {
		m.end(id, waiter{g, n}, false, now)
		do(Answer{Waiter: id, View: View{Ask: n.ask, Closed: g.closed}})
	}
	delete(g.nodes, r.Node)
	g.left[r.Node] = now
}

func (m *Machine) end(id WaiterID, w waiter, broke bool, now time.Time) {
	delete(m.waiters, id)
	delete(w.node.seen, id)
	if len(w.node.seen) == 0 {
		w.node.away, w.node.broke = now, broke
	}
}

// settle decides for one group (only), and for all groups if that changes their allowed sizes. If only is
// nil, it decides for all.
func (m *Machine) settle(only *group, now time.Time, do func(Action)) {
	groups := []*group{only}
	if only == nil {
		groups = m.sorted()
	}
	for again := true; again; {
		again = false
		for _, g := range groups {
			others, had := m.others(g)
			if round := g.decide(now, m.timing, others, had); round != nil {
				do(*round)
				again = true
			}
			if stands := g.stands(); stands != g.stood {
				g.stood, again = stands, true
				m.ahead.known = false
			}
		}
		if again {
			groups = m.sorted()
		}
	}
	var changed bool
	for _, g := range groups {
		changed = changed || g.changed
		g.changed = false
		m.answer(g, now, do)
		g.wake = g.next(now, m.timing)
		if len(g.nodes) == 0 && len(g.left) == 0 && g.round == 0 {
			delete(m.groups, g.name)
		}
	}
	if changed {
		do(Keep{m.State()})
	}
	var wake time.Time
	for _, g := range m.groups {
		if !g.wake.IsZero() && (wake.IsZero() || g.wake.Before(wake)) {
			wake = g.wake
		}
	}
	if wake != m.wake {
		m.wake = wake
		if !wake.IsZero() {
			do(Wake{wake})
		}
	}
}

// answer answers the pending requests of the nodes whose view has changed.
func (m *Machine) answer(g *group, now time.Time, do func(Action)) {
	for _, n := range slices.SortedFunc(maps.Values(g.nodes),
		func(a, b *node) int { return cmp.Compare(a.name, b.name) }) {
		view := g.view(n)
		for _, id := range slices.Sorted(maps.Keys(n.seen)) {
			if n.seen[id] != view {
				m.end(id, waiter{g, n}, false, now)
				do(Answer{id, view, g.reason})
			}
		}
	}
}

func (m *Machine) sorted() []*group {
	return slices.SortedFunc(maps.Values(m.groups),
		func(a, b *group) int { return cmp.Compare(a.name, b.name) })
}

// others returns two sizes of the job's other groups: size is the number of nodes of each training group, 0
// if none trains; had is the smallest last size of the groups that may train again.
func (m *Machine) others(g *group) (size, had int) {
	if !m.ahead.known {
		m.lookAhead()
	}
	return sizeOfOther(g, m.ahead.trains), sizeOfOther(g, m.ahead.smallest)
}

func sizeOfOther(g *group, of [2]*group) int {
	for _, other := range of {
		if other != nil && other != g {
			return other.stood.size
		}
	}
	return 0
}

func (m *Machine) lookAhead() {
	m.ahead = ahead{known: true}
	for _, g := range m.groups {
		if g.stood.size == 0 {
			continue
		}
		insert(&m.ahead.smallest, g, func(a, b *group) bool { return a.stood.size < b.stood.size })
		if g.stood.trains {
			insert(&m.ahead.trains, g, func(a, b *group) bool { return a.name < b.name })
		}
	}
}

// insert keeps the first two groups of an order.
func insert(first *[2]*group, g *group, before func(a, b *group) bool) {
	switch {
	case first[0] == nil || before(g, first[0]):
		first[0], first[1] = g, first[0]
	case first[1] == nil || before(g, first[1]):
		first[1] = g
	}
}

// State returns the state from which a restarted machine continues.
func (m *Machine) State() (s State) {
	for _, g := range m.sorted() {
		if g.round == 0 {
			continue
		}
		state := GroupState{Group: g.name, Settings: g.settings, Round: g.round, Store: g.store,
			Closed: g.closed, Size: g.size, Members: []Assigned{}}
		for _, n := range g.members() {
			state.Members = append(state.Members, Assigned{n.name, n.store, n.rank, n.placed})
		}
		s.Groups = append(s.Groups, state)
	}
	return s
}

// Nodes returns the number of known nodes: a job with nodes is in use.
func (m *Machine) Nodes() (n int) {
	for _, g := range m.groups {
		n += len(g.nodes)
	}
	return n
}
