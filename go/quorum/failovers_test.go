package quorum

import (
	"flag"
	"fmt"
	"math/bits"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var write = flag.Bool("write", false, "write testdata/failovers.md")

// The table of docs/operating.md: how many groups may end such that the others continue without an operator. All groups were in the
// last quorum and know it; the remaining ones ask at one lighthouse.
func TestTheTableOfFailovers(t *testing.T) {
	names := []string{"a", "b", "c", "d", "e"}
	continues := func(n, away int, bound bool) bool {
		var s succession
		p := Past{ID: 1}
		for i, name := range names[:n] {
			p.Members = append(p.Members, Voter{ReplicaID: name})
			if bound && away>>i&1 == 1 {
				s.end(name)
			}
		}
		asks := func(id string) bool { return away>>(id[0]-'a')&1 == 0 }
		return len(s.shortfalls(p, asks)) == 0
	}
	var table strings.Builder
	table.WriteString("| groups | processes that end at a lighthouse that serves | groups that vanish: the others go on | the others wait |\n|---|---|---|---|\n")
	for n := 2; n <= len(names); n++ {
		var on, wait []string
		for k := 1; k < n; k++ {
			var can, cannot [2]bool // index 1: the first member by name is among those that ended; 0: it is not
			for away := 1; away < 1<<n-1; away++ {
				if bits.OnesCount(uint(away)) != k {
					continue
				}
				require.True(t, continues(n, away, true), "%b of %d", away, n)
				if continues(n, away, false) {
					can[away&1] = true
				} else {
					cannot[away&1] = true
				}
			}
			for with := range 2 {
				require.False(t, can[with] && cannot[with], "whether a job continues depends only on the number that ended, and on the first member by name")
			}
			switch {
			case can[0] && can[1]:
				on = append(on, fmt.Sprint(k))
			case cannot[0] && cannot[1]:
				wait = append(wait, fmt.Sprint(k))
			default:
				require.True(t, can[0] && cannot[1])
				on = append(on, fmt.Sprintf("%d, if the first by name is not among them", k))
				wait = append(wait, fmt.Sprintf("%d, if the first by name is among them", k))
			}
		}
		fmt.Fprintf(&table, "| %d | go on, however many end | %s | %s |\n", n, strings.Join(on, "; "), strings.Join(wait, "; "))
	}
	const file = "testdata/failovers.md"
	if *write {
		require.NoError(t, os.WriteFile(file, []byte(table.String()), 0o644))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(want), table.String())
}
