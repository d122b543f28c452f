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

// The model check looks at all histories of a few members, two lighthouses and a bounded number of events, not at a sample: breadth
// first, each state once. The decisions of the lighthouses are made by succession.go and bond.go themselves. The rule is that at
// most one branch of a job ever commits, whoever is in it: of two quorums of which all members have heard, one comes after
// the other.
//
// An event is one of these:
//
//   - A member begins a stream with a lighthouse, shows what it knows, and asks. Its request to the other lighthouse may stay there,
//     and be used. If it was not let go there, its bond has run out.
//   - The same, and it has yet to show what it knows. (Later it shows it, and asks.)
//   - A lighthouse forms a quorum of some of those that ask there, and some of them hear of it. Those ask again.
//   - A member ends, and a lighthouse learns of it.
//   - A lighthouse crashes, and starts with an empty memory, or with what was on disk.
//
// These are enough. A member whose end no lighthouse learns is a member that does nothing more. Answers to stamps are no event:
// a member that did not answer is like a bound one whose end nobody learns. A member hears of a quorum at once or never: before it
// hears of it, it does nothing, and the others see no difference.
//
// modelcheck_state_test.go has the state, modelcheck_events_test.go the events.

var events = flag.Int("events", 0, "how many more events the model check looks at than it does otherwise")

// explore looks at all histories of a job whose first quorum is at the first lighthouse, up to a number of events.
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

// histories are those that are looked at: who was in the job's first quorum, who comes, and how many events there are.
var histories = []struct {
	first, newcomers set
	events           int
	// states is how many states there are that differ in something that matters: with that many events, with
	// one more (-events=1), and with two.
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

// between begins with a quorum {b,c} after {a,b,c}. Both have heard of it, the lighthouse has formed it once more, and c has
// moved to the other lighthouse, where it has yet to show it. A quorum of a and b, formed there, is the third of a base.
func between(x *explorer, w *world) {
	const b, c = 0b010, 0b100
	x.forms(w, 0, b|c, b|c)
	x.forms(w, 0, b|c, 0)
	x.goes(w, 2, 1)
}

// few begins with a quorum of all but the first member, of which one has heard, and the last one is on its way to the other
// lighthouse.
func few(first set) func(*explorer, *world) {
	last := bits.Len8(uint8(first)) - 1
	return func(x *explorer, w *world) {
		x.forms(w, 0, first&^1, 0b10)
		x.goes(w, last, 1)
	}
}

// spent begins with {b,c,d}, of which d ended while it was bound. The first lighthouse went on with b, the vote of d and a, and only a
// has heard of it. b and c met at the other one, which went on with them; only b has heard of that, and the lighthouse crashed.
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

// late begins with {a,c,d} after {b,c,d}, of which a and c have heard. The other lighthouse formed {b,d}, of which only b has heard. d came
// back and ended while it was bound, so the first lighthouse has its vote. a and c ask there.
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

// These begin later, so that a history is longer than those that are looked at from the first quorum on.
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

// Each of these is found: what the rule has is needed.
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
