package rendezvous

import (
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestAllowedSizes(t *testing.T) {
	for _, c := range []struct {
		settings Settings
		want     []int
	}{
		{Settings{Min: 2, Max: 5, Sizes: "all"}, []int{2, 3, 4, 5}},
		{Settings{Min: 1, Max: 1, Sizes: "all"}, []int{1}},
		{Settings{Min: 1, Max: 9, Sizes: "powers_of_two"}, []int{1, 2, 4, 8}},
		{Settings{Min: 3, Max: 8, Sizes: "powers_of_two"}, []int{4, 8}},
		{Settings{Min: 1, Max: 8, Sizes: "6/2/2"}, []int{2, 6}},
	} {
		got, err := c.settings.allowed()
		require.NoError(t, err)
		assert.Equal(t, c.want, got, c.settings)
	}
}

func TestInvalidRequestsAreRefused(t *testing.T) {
	good := Request{Node: "a", Store: "a:1", Settings: Settings{Min: 1, Max: 4, Sizes: "all"}}
	require.NoError(t, good.validate())
	for _, c := range []struct {
		change func(*Request)
		want   string
	}{
		{func(r *Request) { r.Node = "" }, "node has 0 bytes: it must have 1 to 128"},
		{func(r *Request) { r.Node = strings.Repeat("a", 129) }, "node has 129 bytes: it must have 1 to 128"},
		{func(r *Request) { r.Group = strings.Repeat("a", 129) },
			"group has 129 bytes: it must have at most 128"},
		{func(r *Request) { r.Store = "" }, "store has 0 bytes: it must be HOST:PORT"},
		{func(r *Request) { r.Min = 0 }, "nnodes is 0:4: it must be MIN:MAX with 1 <= MIN <= MAX <= 4096"},
		{func(r *Request) { r.Min = 5 }, "nnodes is 5:4: it must be MIN:MAX with 1 <= MIN <= MAX <= 4096"},
		{func(r *Request) { r.Max = 10_001 },
			"nnodes is 1:10001: it must be MIN:MAX with 1 <= MIN <= MAX <= 4096"},
		{func(r *Request) { r.LastCallMS = -1 }, "last_call_timeout is -0.001 s: it must be from 0 to a day"},
		{func(r *Request) { r.Min, r.Max, r.Sizes = 5, 7, "powers_of_two" },
			"sizes is powers_of_two: none is within nnodes 5:7"},
		{func(r *Request) { r.Sizes = "odd" },
			`sizes is "odd": it must be "all", "powers_of_two", or numbers of nodes such as 1/2/4`},
		{func(r *Request) { r.Sizes = "2/8" }, `sizes is "2/8": 8 nodes are not within nnodes 1:4`},
		{func(r *Request) { r.Ask = -1 }, "ask is -1 after an answer to 0: it must not decrease"},
		{func(r *Request) { r.Seen.Ask = 1 }, "ask is 0 after an answer to 1: it must not decrease"},
		{func(r *Request) { r.Seen = View{Round: 1 << 41, Size: 1} },
			"seen has rank 0 of 1 in round 2199023255552: no such round was released"},
		{func(r *Request) { r.Seen = View{Round: 1, Rank: 2, Size: 2} },
			"seen has rank 2 of 2 in round 1: no such round was released"},
	} {
		bad := good
		c.change(&bad)
		require.EqualError(t, bad.validate(), c.want)
	}
}

// A job has a bounded number of groups at once. Groups whose nodes have ended make room for others: over its
// life, a job may have any number.
func TestAJobHasABoundedNumberOfGroups(t *testing.T) {
	w := newWorld()
	for i := range maxGroups {
		g := w.m.group(strconv.Itoa(i)) // adds the group
		g.round, g.nodes["n"] = 1, &node{name: "n", away: w.now, seen: map[WaiterID]View{}}
		if i != 7 {
			g.nodes["n"].seen[0] = View{} // its request is pending
		}
	}
	a := &agent{group: "one more", name: "n", settings: Settings{Min: 1, Max: 1, Sizes: "all"}}
	w.agents["n"] = a
	w.poll()
	require.Equal(t, `group "one more" is one too many: a job has at most 4096`, a.refused)

	w.now = w.now.Add(timing.Timeout)
	a.refused = ""
	w.poll()
	require.Empty(t, a.refused)
	require.Len(t, w.m.groups, maxGroups)
	require.NotContains(t, w.m.groups, "7")
}
