package rendezvous

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
)

// The lighthouse handles one event of a job at a time. A round of one group may concern all others, so its
// cost may grow with their number, but not faster.
func TestTheCostOfARoundGrowsWithTheNumberOfGroups(t *testing.T) {
	statements := testmain.Statements(t, "TestRoundsOfManyGroups")
	few, many := statements(t, "", 100), statements(t, "", 1000)
	require.LessOrEqual(t, many, 130*few, "statements with 100 groups: %d, with 1,000: %d", few, many)
}

// TestRoundsOfManyGroups is what TestTheCostOfARoundGrowsWithTheNumberOfGroups measures.
func TestRoundsOfManyGroups(t *testing.T) {
	_, groups := testmain.Case()
	w := newWorld()
	for i := range groups {
		w.last++
		w.feed(Attended{w.last, Request{
			Group: strconv.Itoa(i), Node: "n", Store: "n:1", Ask: 1,
			Settings: Settings{Min: 1, Max: 1, Sizes: "all"},
		}})
	}
	require.Len(t, w.out, groups, "each group has its round")
}
