//go:build tapes

package sim

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
)

// This file is compiled only with testdata/tape.go.txt (compile in mistakes_test.go), which records what the
// machines receive.

// The order of goroutines is another one in each run. But a machine gives the same actions for the same
// events, to the byte: the recorded events of a history are enough to see what a machine did and why. And a
// history feeds each kind of event.
func TestTheEventsOfAMachineReplay(t *testing.T) {
	quorum.Recording, round.Recording = true, true
	kinds := map[string]int{}
	check := func(lines, again []string) {
		require.Equal(t, lines, again)
		for _, line := range lines {
			_, event, _ := strings.Cut(line, " ")
			name, _, _ := strings.Cut(event, "{")
			kinds[name]++
		}
	}
	seeds := uint64(20)
	if *tapeFlag >= 0 {
		seeds = 1
	}
	for seed := range seeds {
		s := draw(seed, 0)
		if seed < 6 { // in few of the others a rank fails for long, or a group is asked to leave
			s.ranks = 2
			only(rankFails, dropRank, drain, loseVote)(&s)
		}
		if *tapeFlag >= 0 {
			s = draw(uint64(*tapeFlag), 0)
		}
		st := play(t, s)
		require.Nil(t, st.broken)
		for _, tape := range quorum.Tapes {
			check(tape.Lines, tape.Replay())
			if *tapeFlag >= 0 {
				t.Logf("a lighthouse:\n%s", strings.Join(tape.Lines, "\n"))
			}
		}
		for _, tape := range round.Tapes {
			check(tape.Lines, tape.Replay())
			if *tapeFlag >= 0 {
				t.Logf("a manager server:\n%s", strings.Join(tape.Lines, "\n"))
			}
		}
		quorum.Tapes, round.Tapes = nil, nil
	}
	if *tapeFlag >= 0 {
		return
	}
	t.Log(kinds)
	for path, name := range map[string]string{"../quorum/types.go": "quorum.",
		"../round/types.go": "round."} {
		for _, kind := range eventTypes(t, path) {
			if kind == "Slept" || kind == "Raised" || kind == "Limited" {
				// no process of a bubble can be stopped, or ended by an exception, and no operator sets a limit
				continue
			}
			require.Positive(t, kinds[name+kind], "%s%s is fed to no machine", name, kind)
		}
	}
}

// eventTypes returns the names of the types that have the method isEvent.
func eventTypes(t *testing.T, path string) (names []string) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	require.NoError(t, err)
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Recv != nil && f.Name.Name == "isEvent" {
			names = append(names, f.Recv.List[0].Type.(*ast.Ident).Name)
		}
	}
	require.NotEmpty(t, names)
	return names
}
