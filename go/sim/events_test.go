package sim

import (
	"go/ast"
	"go/parser"
	"go/token"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
)

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

// The simulation must feed each kind of event to the machines many times: otherwise it would not test how they handle that kind.
func TestEveryEventIsFed(t *testing.T) {
	t.Parallel()
	fed := map[string]int{}
	note := func(e any) {
		fed[reflect.TypeOf(e).String()]++
		switch e := e.(type) {
		case quorum.ShuttingDown:
			fed["finished"] += toInt(e.Finished)
		case round.QuorumAsked:
			fed["drain"] += toInt(e.Drain)
		}
	}
	watched := mistake{
		lighthouse: spoil(func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
			note(e)
			return m.Step(e, now)
		}),
		group: spoilGroup(func(m *round.Machine, e round.Event, now time.Time) []round.Action {
			note(e)
			return m.Step(e, now)
		}),
	}
	for seed := range uint64(budget(45, 25)) {
		s := Draw(seed, 2+int(seed%4), 400)
		s.Ranks = 1 + int(seed%3)
		s.Faults = drawFaults(rand.New(rand.NewPCG(seed, 4)), s, 8)
		plain := Run(s, nil)
		s.mistake = watched
		require.Equal(t, plain, Run(s, nil), "the watched machines behave the same")
	}
	t.Log(fed)
	require.Positive(t, fed["finished"], "groups whose training is complete")
	require.Positive(t, fed["drain"], "ranks that were asked to leave")
	for path, pkg := range map[string]string{"../quorum/types.go": "quorum.", "../round/types.go": "round."} {
		for _, name := range eventTypes(t, path) {
			require.GreaterOrEqual(t, fed[pkg+name], budget(4, 2), "%s%s is fed %d times", pkg, name, fed[pkg+name])
		}
	}
}
