package agree

import (
	"flag"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
)

var (
	seedFlag   = flag.Uint64("agree.seed", 23, "of the random histories")
	eventsFlag = flag.Int("agree.events", 0,
		"of all histories together; 0: 200,000, or 6,000,000 with FULL=1")
)

// dated returns the seed of the histories: SEED of the environment, which make test-all sets to the date, or
// the flag's value.
func dated() uint64 {
	if number, err := strconv.ParseUint(os.Getenv("SEED"), 10, 64); err == nil {
		return number
	}
	return *seedFlag
}

// history plays the random history of this seed and number, and reports whether it ended with a view of all
// running members.
func history(seed, number uint64) (w *world, together bool) {
	random := rand.New(rand.NewPCG(seed, number))
	w = newWorld(random)
	switch random.IntN(3) {
	case 0:
		w.calm()
	case 1:
		w.supervised()
	default:
		return w, w.wild()
	}
	return w, true
}

func TestRandomHistoriesKeepTheRules(t *testing.T) {
	want := 200_000
	if testmain.Full() && !testmain.Race() { // nothing to race: the histories have a single goroutine
		want = 6_000_000
	}
	if *eventsFlag > 0 {
		want = *eventsFlag
	}
	made, formed, blocked, histories := 0, 0, 0, 0
	for events := 0; events < want; histories++ {
		w, together := history(dated(), uint64(histories))
		require.Empty(t, w.broken, "seed %d, history %d, event %d: %s", dated(), histories, w.events, w.how)
		events += w.events
		made += len(w.made)
		formed += len(w.formed)
		if !together {
			blocked++
		}
	}
	t.Logf("%d histories with %d views, %d of them live; %d ended without enough members",
		histories, formed, made, blocked)
	require.Less(t, blocked, histories/3)
	require.Greater(t, made, histories)
}
