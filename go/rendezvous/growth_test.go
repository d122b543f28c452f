package rendezvous

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// The lighthouse handles one event of a job at a time. A round of one group may concern all others, so its cost may grow with their
// number, but not faster.
func TestTheCostOfARoundGrowsWithTheNumberOfGroups(t *testing.T) {
	const groups = 300
	w := newWorld()
	for i := range groups {
		before := w.m.looks
		w.last++
		w.feed(Attended{w.last, Request{
			Group: strconv.Itoa(i), Node: "n", Store: "n:1", Ask: 1, Settings: Settings{Min: 1, Max: 1, Sizes: "all"},
		}})
		require.LessOrEqual(t, w.m.looks-before, 4*groups)
	}
	require.Len(t, w.out, groups, "each group has its round")
}
