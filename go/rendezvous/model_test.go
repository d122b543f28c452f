package rendezvous

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
)

// Random histories of nodes that start, fail, lose their connections, reconnect and end, and of a lighthouse
// that is restarted with and without its state. Each released round is checked against the views of the
// agents. At the end, when there are no more failures, as many nodes must train as the settings allow.
func TestRandomHistories(t *testing.T) {
	histories := uint64(50)
	if testmain.Full() {
		histories = 500
	}
	for seed := range histories {
		if why := history(seed); why != "" {
			require.Fail(t, why, "seed %d", seed)
		}
	}
}

func history(seed uint64) (why string) {
	rng := rand.New(rand.NewPCG(seed, 0))
	settings := Settings{
		Min: 1 + rng.IntN(3), Max: 4 + rng.IntN(5), Sizes: []string{"all", "powers_of_two", "3"}[rng.IntN(3)],
		LastCallMS: []int64{0, 1000, 30_000}[rng.IntN(3)],
	}
	allowed, err := settings.allowed()
	if err != nil {
		return err.Error()
	}
	groups := []string{"a"}
	if rng.IntN(3) == 0 {
		groups = append(groups, "b")
	}
	w := newWorld()
	everCut := map[string]bool{} // nodes that lost their connection: their views may be outdated
	forgot := false
	w.released = func(r Released) {
		fits := false
		for _, size := range allowed {
			fits = fits || size == len(r.Nodes)
		}
		if !fits {
			why = fmt.Sprintf("round of %d nodes with %s", len(r.Nodes), settings)
		}
		trains, again := 0, 0
		for _, a := range w.agents {
			if everCut[a.name] || forgot {
				continue
			}
			switch {
			case a.group == r.Group && a.trains() && a.view.Round == r.Round-1 && a.view.Store != "":
				trains++
			case a.group == r.Group && a.was == r.Round-1 && !a.trains():
				again++
			case a.group != r.Group && a.trains() && a.view.Store != "" && a.view.Size != len(r.Nodes) &&
				a.view.Waiting == 0:
				why = fmt.Sprintf("round of %d nodes beside another group's of %d", len(r.Nodes), a.view.Size)
			}
		}
		if trains > 0 && again == 0 && len(everCut) == 0 {
			why = fmt.Sprintf("round %d ended while all of its %d nodes trained", r.Round-1, trains)
		}
	}
	named := 0
	for range 40 {
		var pick *agent
		if all := w.sorted(); len(all) > 0 {
			pick = all[rng.IntN(len(all))]
		}
		switch n := rng.IntN(20); {
		case pick == nil || n < 5 && len(w.agents) < 10:
			named++
			a := &agent{group: groups[rng.IntN(len(groups))], name: fmt.Sprintf("n%d", named),
				settings: settings}
			w.agents[a.name] = a
			w.poll()
		case n < 9:
			if pick.ask == 0 {
				w.ask(pick)
			}
		case n < 11:
			if pick.trains() { // its workers failed
				w.ask(pick)
			}
		case n < 12:
			if !pick.cut {
				everCut[pick.name] = true
				w.cut(pick)
			}
		case n < 14:
			if pick.cut {
				pick.cut = false
				w.poll()
			}
		case n < 15:
			w.leave(pick, false)
		case n < 16:
			if rng.IntN(3) == 0 {
				forgot = true
				w.restart(State{})
			} else {
				w.restart(w.kept)
			}
		case n < 18:
			regroup(w)
		default:
			w.pass(time.Duration(rng.IntN(40_000)) * time.Millisecond)
		}
		if why == "" {
			why = consistent(w)
		}
		if why != "" {
			return why
		}
	}
	if len(groups) > 1 {
		// the group that trains first determines the size: the other one may never get that many nodes
		return ""
	}
	// From here on there are no failures: the nodes must form the largest allowed round.
	for _, a := range w.sorted() {
		a.cut = false
		if a.ask == 0 {
			w.ask(a)
		}
	}
	for range 6 {
		regroup(w)
		w.pass(31 * time.Second)
	}
	trains, most := 0, 0
	for _, a := range w.agents {
		if a.trains() && a.view.Store != "" {
			trains++
		}
	}
	for _, size := range allowed {
		if size <= len(w.agents) {
			most = size
		}
	}
	if trains < most {
		// more nodes may train than a new round may have: survivors of a larger round whose workers did not
		// fail
		return fmt.Sprintf("in the end %d of %d nodes train: %d could (%s); %s", trains, len(w.agents), most,
			settings, w.m.groups["a"].reason)
	}
	return why
}

// regroup makes the nodes ask for a round if they have learned that newcomers wait for it.
func regroup(w *world) {
	for _, a := range w.sorted() {
		if a.trains() && a.view.Waiting > 0 && !a.cut {
			w.ask(a)
		}
	}
}

// consistent returns a difference between the views of two nodes of one round, if there is one.
func consistent(w *world) string {
	type place struct {
		group string
		round int64
	}
	type seat struct {
		place
		rank int
	}
	sizes, taken := map[place]View{}, map[seat]string{}
	for _, a := range w.sorted() {
		if !a.trains() || a.view.Store == "" || a.cut {
			continue
		}
		at := place{a.group, a.view.Round}
		if before, ok := sizes[at]; ok && (before.Size != a.view.Size || before.Store != a.view.Store) {
			return fmt.Sprintf("%s is in round %d of %d nodes at %s, another node says %d at %s", a.name,
				at.round, a.view.Size, a.view.Store, before.Size, before.Store)
		}
		sizes[at] = a.view
		if other, ok := taken[seat{at, a.view.Rank}]; ok {
			return fmt.Sprintf("%s and %s have rank %d in round %d", other, a.name, a.view.Rank, at.round)
		}
		taken[seat{at, a.view.Rank}] = a.name
	}
	return ""
}
