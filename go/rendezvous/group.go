package rendezvous

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"
)

// stopTime is the time that agents have to stop the workers of a round that has ended: torchrun kills those
// that do not end within 30 s.
const stopTime = 35 * time.Second

// group is the state of one replica group's rendezvous.
type group struct {
	name      string
	settings  Settings
	allowed   []int
	nodes     map[string]*node
	arrivals  uint64
	remembers bool // the machine has the state from before its restart

	// in a machine without its state: until then, unknown nodes of the round may come back
	returning time.Time
	left      map[string]time.Time // nodes that left, kept as long as their earlier requests may still arrive

	round   int64 // the last released round, 0 if none
	size    int   // nodes of that round
	store   string
	closed  bool
	over    bool      // the last round has ended: a new one has to be released
	since   time.Time // since when a round, or a larger one, has been possible; zero: not possible
	until   time.Time // when the wait that began at since ends
	ending  bool      // nodes of the round should restart their workers
	waiting int       // connected nodes that have asked
	reason  string    // why no round is released
	changed bool      // since the state was last saved
	stood   standing  // the standing that the other groups' last decisions were based on
	wake    time.Time // the next time at which a decision may change without an event, zero: never
}

// node is the state of one agent.
type node struct {
	name, store string
	ask         int64 // the highest number of its requests
	placed      int64 // the request that was answered with its round, 0 before the first
	round       int64 // the round in which it has a place
	rank, size  int   // its rank, and the number of nodes, in that round
	// the store of that round; it distinguishes two rounds of the same number, which a lighthouse that lost
	// its state may have released
	at      string
	arrived uint64 // order of its request among those of all nodes
	// for each pending request: the last answer that the node had received when it sent the request
	seen  map[WaiterID]View
	away  time.Time // since when it has no pending request
	broke bool      // its connection broke
}

func (n *node) asks() bool { return n.ask > n.placed }

// expected reports whether a release may wait for a node. Between two requests a node is away for a moment.
func (n *node) expected(now time.Time, t Timing) bool {
	return len(n.seen) > 0 || now.Before(n.expectedUntil(t))
}

func (n *node) expectedUntil(t Timing) time.Time {
	if n.broke {
		return n.away.Add(t.Grace)
	}
	return n.away.Add(t.Timeout)
}

// ready reports whether a node can be placed: it has a pending request, and its connection is not broken.
func (n *node) ready(now time.Time, t Timing) bool {
	return n.asks() && (len(n.seen) > 0 || !n.broke && n.expected(now, t))
}

// current reports whether a node belongs to the round that was released last.
func (g *group) current(n *node) bool { return g.store != "" && n.round == g.round && n.at == g.store }

// trains reports whether any node is in the round and does not ask for another one.
func (g *group) trains() bool {
	for _, n := range g.nodes {
		if g.current(n) && !n.asks() {
			return true
		}
	}
	return false
}

// standing is the part of a group's state on which the allowed sizes of the job's other groups depend.
type standing struct {
	size   int  // number of nodes in its last round; 0: it has not trained yet, or will not train again
	trains bool // false: it is between two rounds
}

func (g *group) stands() standing {
	if g.closed || len(g.nodes) == 0 {
		return standing{}
	}
	return standing{g.size, g.trains()}
}

// members returns the known nodes of the round, by rank.
func (g *group) members() (members []*node) {
	for _, n := range g.nodes {
		if g.current(n) {
			members = append(members, n)
		}
	}
	slices.SortFunc(members,
		func(a, b *node) int { return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.name, b.name)) })
	return members
}

// deserted reports whether no node is connected.
func (g *group) deserted(now time.Time, t Timing) bool {
	for _, n := range g.nodes {
		if n.expected(now, t) {
			return false
		}
	}
	return true
}

// restart resets the group, except for the round's number: a store must not be used twice for one.
func (g *group) restart(s Settings) {
	clear(g.nodes)
	g.size, g.store = 0, ""
	g.settings, g.allowed, g.closed, g.over, g.since, g.changed = s, allowedOf(s), false, false, time.Time{},
		true
}

// misfit returns why a node does not belong to the group, empty if it does.
func (g *group) misfit(r Request) string {
	others := len(g.nodes)
	if g.nodes[r.Node] != nil {
		others--
	}
	switch {
	case others > 0 && g.settings != r.Settings:
		return fmt.Sprintf("the rendezvous is in use by %s with %s, and this node has %s", nodes(others),
			g.settings, r.Settings)
	case others >= 2*r.Max+16:
		return fmt.Sprintf("the rendezvous has %s already, with %s", nodes(others), g.settings)
	}
	return ""
}

// attend handles the request of a node.
func (g *group) attend(r Request, now time.Time, t Timing) *node {
	n := g.nodes[r.Node]
	if n == nil {
		n = &node{name: r.Node, seen: map[WaiterID]View{}}
		g.nodes[r.Node] = n
	}
	if n.ask == 0 && r.Seen.Ask > 0 && g.round == 0 && !g.remembers && g.returning.IsZero() {
		// The node's last answer is from a machine that lost its state, and with it the round of the other
		// nodes, if there was one.
		g.returning = now.Add(t.Timeout)
	}
	n.store = r.Store
	if v := r.Seen; v.Round > 0 && v.Ask > n.placed {
		// The node knows a round in which this machine does not have it: the machine was restarted without
		// its state, or has dropped the node.
		if v.Round > g.round {
			g.round, g.size, g.store, g.changed = v.Round, v.Size, v.Store, true
			g.returning = now.Add(t.Timeout)
		}
		n.round, n.rank, n.size, n.at, n.placed, n.ask = v.Round, v.Rank, v.Size, v.Store, v.Ask,
			max(n.ask, v.Ask)
	}
	if r.Ask > n.ask {
		n.ask = r.Ask
		g.arrivals++
		n.arrived = g.arrivals
	}
	return n
}

// forget drops nodes that have been away for too long.
func (g *group) forget(now time.Time, t Timing) {
	for name, n := range g.nodes {
		if len(n.seen) == 0 && !now.Before(n.away.Add(t.Timeout)) {
			delete(g.nodes, name)
		}
	}
	maps.DeleteFunc(g.left, func(_ string, at time.Time) bool { return !now.Before(at.Add(t.Timeout)) })
}

// largest returns the largest allowed number of nodes up to n; 0 if none is. others is the size of the job's
// other groups.
func (g *group) largest(n, others int) int {
	best := 0
	for _, size := range g.allowed {
		if size <= n && (others == 0 || size == others) {
			best = size
		}
	}
	return best
}

// decide releases a round if one is due. others is the number of nodes of each of the job's other groups that
// train; had is the smallest last size of the other groups, which counts only while none of them trains.
func (g *group) decide(now time.Time, t Timing, others, had int) *Released {
	g.forget(now, t)
	var ready []*node
	var trains, again, known, coming int
	for _, n := range g.nodes {
		switch {
		case n.ready(now, t):
			ready = append(ready, n)
			if g.current(n) {
				again++
				known++
			}
		case n.asks() && g.current(n):
			again++
			if n.expected(now, t) {
				coming++
			}
		case g.current(n):
			trains++
			if n.expected(now, t) {
				coming++
			}
		case n.expected(now, t):
			coming++
		}
	}
	g.waiting, g.ending = len(ready), false
	if over := trains == 0 || again > 0; over != g.over {
		g.over, g.since = over, time.Time{}
	}
	if g.closed || len(g.nodes) == 0 {
		g.since, g.reason = time.Time{}, "the rendezvous is closed"
		return nil
	}
	if !g.over {
		if others == 0 && had > 0 {
			others = g.size // a group between two rounds must be able to get the size of this one
		}
		g.grow(now, len(ready), trains, others)
		return nil
	}
	// Workers of a round that has ended cannot continue: their agents stop them, and ask for the next round.
	g.ending = again > 0
	if known == 0 && now.Before(g.returning) {
		g.reason = "the lighthouse was restarted without its state: nodes of a round that it does not know " +
			"may come"
		return nil
	}
	most := maxNodes
	if others == 0 && g.largest(had, 0) > 0 {
		most = had // with more nodes, a group between two rounds might not be able to get the same size
	}
	size, best := g.largest(min(len(ready), most), others), g.largest(min(len(ready)+coming, most), others)
	if size == 0 {
		g.since = time.Time{}
		g.reason = g.missing(len(ready), others)
		return nil
	}
	// Without a node of the last round, the number of nodes to come is unknown: the first round waits for the
	// largest allowed number. Later rounds wait for the known nodes, whose agents stop their workers first.
	full, wait := size == g.largest(most, others), g.settings.lastCall()
	if known > 0 {
		full, wait = full || size == best && !now.Before(g.returning), max(wait, stopTime)
	}
	if !g.passed(now, wait) && !full {
		g.reason = fmt.Sprintf("%d of up to %s asked; the last call waits for further ones", len(ready),
			nodes(g.largest(most, others)))
		return nil
	}
	return g.release(ready, size)
}

// passed begins the wait for further nodes, if it has not begun, and reports whether it is over. Membership
// churn must not restart the wait.
func (g *group) passed(now time.Time, wait time.Duration) bool {
	if g.since.IsZero() {
		g.since = now
	}
	g.until = g.since.Add(wait)
	return !now.Before(g.until)
}

// grow decides whether a training round ends for newcomers, if these allow a larger number of nodes: at once
// if it is the largest allowed number, otherwise at the end of the last call. Meanwhile the workers train.
func (g *group) grow(now time.Time, ready, trains, others int) {
	if now.Before(g.returning) {
		trains = max(trains, g.size) // the missing nodes of the round are expected back
	}
	reach := g.largest(ready+trains, others)
	g.reason = fmt.Sprintf("round %d trains with %s, and %d more asked: no larger size is allowed for them "+
		"(%s%s)", g.round, nodes(trains), ready,
		g.settings, ofOthers(others))
	if ready == 0 || reach <= trains {
		g.since = time.Time{}
		return
	}
	g.ending = g.passed(now, g.settings.lastCall()) || reach == g.largest(maxNodes, others)
	g.reason = fmt.Sprintf("round %d trains with %s, and ends for a round of %d", g.round, nodes(trains),
		reach)
}

// release places the nodes of the last round first, in the order of their ranks, so that rank 0 and its store
// stay where they are.
func (g *group) release(ready []*node, size int) *Released {
	slices.SortFunc(ready, func(a, b *node) int {
		if g.current(a) != g.current(b) {
			if g.current(a) {
				return -1
			}
			return 1
		}
		if g.current(a) {
			return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.name, b.name))
		}
		return cmp.Compare(a.arrived, b.arrived)
	})
	g.round++
	g.size, g.store, g.since, g.changed = size, ready[0].store, time.Time{}, true
	g.over, g.ending, g.waiting = false, false, len(ready)-size
	released := &Released{Group: g.name, Round: g.round, Store: g.store}
	for rank, n := range ready[:size] {
		n.round, n.rank, n.size, n.at, n.placed = g.round, rank, size, g.store, n.ask
		released.Nodes = append(released.Nodes, n.name)
	}
	return released
}

// view returns the answer to a node.
func (g *group) view(n *node) View {
	v := View{Ask: n.ask, Closed: g.closed}
	if n.asks() || n.ask == 0 {
		return v
	}
	v.Round, v.Rank, v.Size = n.round, n.rank, n.size
	if g.current(n) {
		v.Store = g.store
	}
	if g.ending || !g.current(n) { // the group ends its round, or has continued without this node
		v.Waiting = max(1, g.waiting)
	}
	return v
}

// next returns the next time at which a decision may change without an event; zero: never.
func (g *group) next(now time.Time, t Timing) (at time.Time) {
	sooner := func(when time.Time) {
		if when.After(now) && (at.IsZero() || when.Before(at)) {
			at = when
		}
	}
	if !g.since.IsZero() {
		sooner(g.until)
	}
	sooner(g.returning)
	for _, n := range g.nodes {
		if len(n.seen) == 0 {
			sooner(n.expectedUntil(t))
			sooner(n.away.Add(t.Timeout))
		}
	}
	return at
}

// missing describes how many nodes a round still needs.
func (g *group) missing(ready, others int) string {
	least := g.allowed[0]
	if others > 0 {
		least = others
	}
	return fmt.Sprintf("%d of at least %s asked (%s%s)", ready, nodes(least), g.settings, ofOthers(others))
}

func ofOthers(size int) string {
	if size == 0 {
		return ""
	}
	return fmt.Sprintf("; the job's other groups have %s each", nodes(size))
}

func nodes(n int) string {
	if n == 1 {
		return "1 node"
	}
	return fmt.Sprintf("%d nodes", n)
}
