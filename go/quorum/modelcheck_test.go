package quorum

import (
	"flag"
	"hash/maphash"
	"math/bits"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
)

// The model check explores all histories of a few members, two lighthouses and a bounded number of events: breadth first, each
// state once. The lighthouses use the decisions of succession.go and bond.go. The rule is that at most one branch of a job ever
// commits: of two quorums that all of their members have received, one is a successor of the other.
//
// An event is one of these:
//
//   - A member begins a stream with a lighthouse, shows the quorum that it knows, and asks. Its request to the other lighthouse may
//     still be pending there, and be used. If the member was not released there, its bond has run out.
//   - The same, but the member has not shown its quorum yet. (Later it shows the quorum, and asks.)
//   - A lighthouse forms a quorum of some of the members that ask there, and some of them receive it. Those ask again.
//   - A member ends, and a lighthouse learns of it.
//   - A lighthouse crashes, and starts with an empty memory, or with the state on its disk.
//
// Other events are not needed. A member whose end no lighthouse learns is the same as a member that sends nothing more. Answers to
// stamps are no event: a member that has not answered is like a bound one whose end no lighthouse learns. A member receives a
// quorum at once or never: until a quorum arrives, its member does nothing, so that the delay makes no difference to the others.
//
// modelcheck_state_test.go has the state, modelcheck_events_test.go the events.

var events = flag.Int("events", 0, "how many events longer the histories of the model check are")

// explore visits all histories of a job whose first quorum is at the first lighthouse, up to a number of events.
func explore(first, newcomers set, events, crashes int, mistake string, start ...func(*explorer, *world)) (states int, broken bool) {
	w := world{crashes: int8(crashes), clock: 1}
	w.branches[0] = branch{id: 1, members: first, alive: true}
	w.lighthouses[0] = lighthouse{highest: 1, asks: first, knows: first, bound: first}
	w.lighthouses[1] = lighthouse{last: -1}
	for i := range w.members {
		switch {
		case first.has(i):
			w.members[i] = memberState{on: true}
		case newcomers.has(i):
			w.members[i] = memberState{at: -1, knows: -1}
		default:
			w.members[i].at = ended
		}
	}
	x := &explorer{seen: map[[2]uint64]struct{}{}, seeds: [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}, mistake: mistake}
	for _, begin := range start {
		w.normal()
		begin(x, &w)
	}
	x.add(&w)
	for n := range events {
		frontier := x.next
		x.next, x.last = nil, n == events-1
		for i := range frontier {
			x.step(&frontier[i])
			if x.broken {
				return len(x.seen), true
			}
		}
	}
	return len(x.seen), false
}

// histories are the jobs whose histories are explored: the members of the first quorum, those that join, and the number of events.
var histories = []struct {
	first, newcomers set
	events           int
	// states is the number of different states (world.normal) with that many events, with one more (-events=1), and with two more.
	states [3]int
}{
	{0b00011, 0b00100, 6, [3]int{166282, 764397, 3211904}},
	{0b00110, 0b00001, 6, [3]int{144657, 636325, 2570242}}, // the newcomer is the first by name
	{0b00111, 0b00000, 6, [3]int{516392, 2122679, 8051712}},
	{0b00011, 0b01100, 5, [3]int{91841, 653603, 4418459}},
	{0b00111, 0b11000, 4, [3]int{88837, 960878, 9915270}},
	{0b11111, 0b00000, 2, [3]int{8104, 216101, 4095012}},
}

func TestNoHistoryHasTwoBranches(t *testing.T) {
	for _, h := range histories {
		start := time.Now()
		states, broken := explore(h.first, h.newcomers, h.events+*events, 1, "")
		require.False(t, broken, "%s, and then %s", h.first, h.newcomers)
		t.Logf("%d members, then %d more: all histories of %d events, one of them a crash: %d states, %s",
			bits.OnesCount8(uint8(h.first)), bits.OnesCount8(uint8(h.newcomers)), h.events+*events, states, time.Since(start).Round(time.Millisecond))
		if *events < len(h.states) {
			assert.Equal(t, h.states[*events], states)
		}
	}
}

// between begins with a quorum {b,c} after {a,b,c}. b and c have received it, the lighthouse has formed it again, and c has moved
// to the other lighthouse, where c has not shown the quorum yet. A quorum of a and b there has a base of three.
func between(x *explorer, w *world) {
	const b, c = 0b010, 0b100
	x.forms(w, 0, b|c, b|c)
	x.forms(w, 0, b|c, 0)
	x.goes(w, 2, 1)
}

// few begins with a quorum of all members but the first. One member has received it, and the last one is moving to the other lighthouse.
func few(first set) func(*explorer, *world) {
	last := bits.Len8(uint8(first)) - 1
	return func(x *explorer, w *world) {
		x.forms(w, 0, first&^1, 0b10)
		x.goes(w, last, 1)
	}
}

// spent begins with {b,c,d}, of which d has ended while it was bound. The first lighthouse formed {a,b} with the vote of d, which only a has
// received. The other lighthouse formed {b,c}, which only b has received, and crashed.
func spent(x *explorer, w *world) {
	const a, b, c = 0, 1, 2
	x.goes(w, a, 0)
	x.asks(w, a, 0)
	x.take(w, 0).end("d")
	x.put(w, 0)
	w.members[3].at = ended
	w.lighthouses[0].asks &^= 0b1000
	x.forms(w, 0, 0b0011, 0b0001)
	for _, i := range []int{b, c} {
		x.goes(w, i, 1)
		x.asks(w, i, 1)
	}
	x.forms(w, 1, 0b0110, 0b0010)
	w.lighthouses[1] = lighthouse{last: -1, highest: int16(w.clock) + 1}
	w.members[b].on, w.members[c].on = false, false
}

// late begins with {a,c,d} after {b,c,d}, which a and c have received. The other lighthouse formed {b,d}, which only b has received. d
// returned to the first lighthouse and ended while it was bound there, so that its vote is there. a and c ask there.
func late(x *explorer, w *world) {
	const a, b, c, d = 0, 1, 2, 3
	x.goes(w, a, 0)
	x.asks(w, a, 0)
	x.forms(w, 0, 0b1101, 0b0101)
	for _, i := range []int{b, d} {
		x.goes(w, i, 1)
		x.asks(w, i, 1)
	}
	x.forms(w, 1, 0b1010, 0b0010)
	x.goes(w, d, 0)
	x.take(w, 0).end("d")
	x.put(w, 0)
	w.members[d].at = ended
	w.lighthouses[0].asks &^= 1 << d
	for _, i := range []int{a, c} {
		x.goes(w, i, 0)
		x.asks(w, i, 0)
	}
}

// These histories begin later, and so reach further than those from the first quorum on.
func TestNoLaterHistoryHasTwoBranches(t *testing.T) {
	for _, h := range []struct {
		name             string
		first, newcomers set
		events           int
		start            func(*explorer, *world)
	}{
		{"a quorum between", 0b111, 0, 6, between},
		{"three members, a quorum that few know", 0b111, 0, 6, few(0b111)},
		{"four members, a quorum that few know", 0b1111, 0, 5, few(0b1111)},
		{"five members, a quorum that few know", 0b11111, 0, 4, few(0b11111)},
		{"two quorums after one with a vote that was given", 0b1110, 0b0001, 5, spent},
		{"two quorums after one, and then a vote that is given", 0b1110, 0b0001, 5, late},
	} {
		start := time.Now()
		states, broken := explore(h.first, h.newcomers, h.events+*events, 1, "", h.start)
		require.False(t, broken, h.name)
		t.Logf("%s: all histories of %d events, one of them a crash: %d states, %s", h.name, h.events+*events, states, time.Since(start).Round(time.Millisecond))
	}
}

// Without any one part of the rule, a history has two branches: each part is needed.
func TestTheModelCheckFindsMistakes(t *testing.T) {
	planted := 0
	for _, m := range []struct {
		mistake          string
		first, newcomers set
		events           int // of the shortest history that shows it, from its start on
		start            []func(*explorer, *world)
	}{
		{"an unbound end is a vote", 0b011, 0b100, 4, nil},
		{"half is enough", 0b011, 0b100, 3, nil},
		{"no base", 0b011, 0b100, 5, nil},
		{"all know the last quorum", 0b111, 0, 6, nil},
		{"no terms", 0b011, 0b100, 6, nil},
		{"no questions for later quorums", 0b011, 0b100, 5, nil},
		{"bonds broken early", 0b011, 0b100, 4, nil},
		{"a new term releases no bonds", 0b011, 0b100, 6, nil},
		{"bonds of members that know more", 0b011, 0b100, 5, nil},
		{"one quorum in the base", 0b111, 0, 7, []func(*explorer, *world){between}},
		{"a vote for two branches", 0b1110, 0b0001, 5, []func(*explorer, *world){spent}},
		{"a late vote counts as knowledge", 0b1110, 0b0001, 5, []func(*explorer, *world){late}},
	} {
		planted++
		t.Run(m.mistake, func(t *testing.T) {
			states, broken := explore(m.first, m.newcomers, m.events, 0, m.mistake, m.start...)
			require.True(t, broken)
			t.Logf("found after %d states", states)
		})
	}
	require.Equal(t, []string{strconv.Itoa(planted)}, testmain.Row(t, "correctness.md", "go/quorum/modelcheck_test.go", ", "))
}
