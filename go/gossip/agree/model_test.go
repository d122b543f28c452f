package agree

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
)

var seed = flag.Uint64("agree.seed", 23, "of the random histories")

// world is members on a network that loses, delays and repeats what they say, and whose membership is wrong at times. Its oracle
// knows nothing of the rules: a view is live while all of its members run and are in it.
type world struct {
	*rand.Rand
	t        *testing.T
	running  map[string]*Machine
	part     map[string]int           // of the network that a name is in
	seen     map[*Machine]map[ID]Peer // what membership tells a member
	old      []Proposal               // may come again
	lives    int64
	careless bool
	quiet    int // how rare faults are
	events   int
	made     map[string]bool // live views there were
}

func (w *world) start(name string) {
	w.lives++
	at := name
	if w.lives > 1 && name == "a" {
		at = "a again" // the first a founds the job; later lives of it join
	}
	m := New(Config{Me: ID{name, w.lives}, At: at, Seeds: [][]string{{"a"}}, MinMembers: 1})
	m.careless = w.careless
	w.running[name], w.seen[m] = m, map[ID]Peer{}
}

func (w *world) names() []string { return slices.Sorted(maps.Keys(w.running)) }

// live are the views whose members are all in it.
func (w *world) live() (live []*View) {
	for _, name := range w.names() {
		v := w.running[name].Taken()
		if v == nil || slices.ContainsFunc(live, func(o *View) bool { return o.Digest() == v.Digest() }) {
			continue
		}
		all := true
		for _, q := range v.Members {
			m := w.running[q.Name]
			all = all && m != nil && m.cfg.Me == q.ID && m.Taken() != nil && m.Taken().Digest() == v.Digest()
		}
		if all {
			w.made[v.Digest()] = true
			live = append(live, v)
		}
	}
	return live
}

// hear lets a member hear what another one says now.
func (w *world) hear(m, other *Machine) {
	w.seen[m][other.cfg.Me] = Peer{other.Note(), other.cfg.At}
	m.See(w.seen[m])
}

func (w *world) pull(m, other *Machine) {
	if p, found := other.Proposal(); found {
		w.old = append(w.old, p)
		require.True(w.t, m.Hear(p))
	}
}

func (w *world) pick(names []string) string { return names[w.IntN(len(names))] }

// step lets one thing happen.
func (w *world) step(calm bool) {
	w.events++
	name := w.pick([]string{"a", "b", "c", "d", "e"})
	m := w.running[name]
	what := w.IntN(1000 * w.quiet)
	if m == nil {
		if w.IntN(5) == 0 {
			w.start(name)
		}
		return
	}
	switch {
	case what < 3 && !calm:
		delete(w.running, name)
	case what < 7 && !calm:
		m.Leave()
		for _, other := range w.names() {
			if o := w.running[other]; o != m && w.part[name] == w.part[other] && w.IntN(4) > 0 {
				o.Bury(m.cfg.Me, m.Note())
			}
		}
		delete(w.running, name)
	case what < 13:
		for _, n := range []string{"a", "b", "c", "d", "e"} {
			w.part[n] = w.IntN(2)
		}
	case what < 23:
		w.part = map[string]int{}
	case what < 35: // membership takes a member for dead, rightly or not
		if ids := slices.SortedFunc(maps.Keys(w.seen[m]), compare); len(ids) > 0 {
			delete(w.seen[m], ids[w.IntN(len(ids))])
			m.See(w.seen[m])
		}
	case what < 40:
		m.Ask()
	case what < 45:
		if m.asked {
			m.GiveUp()
		}
	case what < 70:
		if len(w.old) > 0 {
			m.Hear(w.old[w.IntN(len(w.old))])
		}
	default:
		for _, id := range slices.SortedFunc(maps.Keys(w.seen[m]), compare) {
			if o := w.running[id.Name]; (o == nil || o.cfg.Me != id || w.part[name] != w.part[id.Name]) && w.IntN(3) == 0 {
				delete(w.seen[m], id) // it was suspected for long enough
				m.See(w.seen[m])
			}
		}
		for _, other := range w.names() {
			switch o := w.running[other]; {
			case o == m || w.part[name] != w.part[other] || w.IntN(3) == 0:
			case w.IntN(2) > 0:
				w.hear(m, o)
			default:
				w.pull(m, o)
			}
		}
		w.train(m)
	}
}

// train is a step of the training: a view that does not hold is left.
func (w *world) train(m *Machine) {
	if news := m.News(); !m.asked && (m.Taken() == nil || news.Lost != "" || len(news.Joining) > 0) {
		m.Ask()
	}
}

// rest lets all that runs hear all, and ask where its view does not hold.
func (w *world) rest() {
	w.part = map[string]int{}
	for range 60 {
		for _, name := range w.names() {
			m := w.running[name]
			for id := range w.seen[m] {
				if o := w.running[id.Name]; o == nil || o.cfg.Me != id {
					delete(w.seen[m], id)
				}
			}
			for _, other := range w.names() {
				if other != name {
					w.hear(m, w.running[other])
					w.pull(m, w.running[other])
				}
			}
			w.train(m)
			require.LessOrEqual(w.t, len(w.live()), 1)
		}
		if w.together() {
			return
		}
	}
}

// together reports whether all that runs is in one live view.
func (w *world) together() bool {
	live := w.live()
	return len(live) == 1 && len(live[0].Members) == len(w.running)
}

func newWorld(t *testing.T, random *rand.Rand) *world {
	w := &world{Rand: random, t: t, running: map[string]*Machine{}, part: map[string]int{}, seen: map[*Machine]map[ID]Peer{}, made: map[string]bool{}, quiet: []int{1, 4, 16}[random.IntN(3)]}
	w.start("a")
	return w
}

// dated is the seed of the day where make test-all sets one.
func dated() uint64 {
	if number, err := strconv.ParseUint(os.Getenv("SEED"), 10, 64); err == nil {
		return number
	}
	return *seed
}

func TestRandomHistoriesHaveOneLiveView(t *testing.T) {
	random := rand.New(rand.NewPCG(dated(), 1))
	want := 100_000
	if testmain.Full() && !testmain.Race() { // one goroutine: the detector would only take its time
		want = 3_000_000
	}
	made, blocked, histories := 0, 0, 0
	for events := 0; events < want; histories++ {
		w := newWorld(t, random)
		calm := random.IntN(3) == 0
		for range 20 + random.IntN(800) {
			w.step(calm)
			require.LessOrEqual(t, len(w.live()), 1, "seed %d, history %d, event %d: %v", dated(), histories, w.events, w.live())
		}
		events += w.events
		w.rest()
		made += len(w.made)
		if w.together() {
			continue
		}
		blocked++
		require.False(t, calm, "seed %d, history %d: nobody ended, and there is no view of all: %v", dated(), histories, w.waits())
	}
	t.Logf("%d histories with %d live views; %d ended without enough members", histories, made, blocked)
	require.Less(t, blocked, histories/2)
	require.Greater(t, made, histories)
}

func (w *world) waits() (all []string) {
	for _, name := range w.names() {
		all = append(all, fmt.Sprintf("%s: %s", name, w.running[name].Waits()))
	}
	return all
}

// The oracle sees what the rules prevent.
func TestWithoutTheRulesTwoViewsAreLive(t *testing.T) {
	random := rand.New(rand.NewPCG(dated(), 2))
	for range 1000 {
		w := newWorld(t, random)
		w.careless, w.running["a"].careless = true, true
		for range 400 {
			if w.step(true); len(w.live()) > 1 {
				return
			}
		}
	}
	t.Fatal("two live views were never seen")
}
