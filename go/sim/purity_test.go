package sim

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A run must replay byte for byte. So the simulation has one thread, reads no clock, takes its randomness from the seed only, and does not
// iterate over maps.
func TestNothingDependsOnAScheduleOrAClock(t *testing.T) {
	clocks := []string{"Now", "Since", "Until", "After", "AfterFunc", "Sleep", "Tick", "NewTimer", "NewTicker"}
	random := []string{"New", "NewPCG", "Rand"}

	paths, err := filepath.Glob("*.go")
	require.NoError(t, err)
	files := token.NewFileSet()
	var parsed []*ast.File
	var maps []string // names of the fields and arguments that are maps
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(files, path, nil, 0)
		require.NoError(t, err)
		parsed = append(parsed, file)
		ast.Inspect(file, func(node ast.Node) bool {
			if field, ok := node.(*ast.Field); ok {
				if _, ok := field.Type.(*ast.MapType); ok {
					for _, name := range field.Names {
						maps = append(maps, name.Name)
					}
				}
			}
			return true
		})
	}
	require.Greater(t, len(parsed), 8)
	require.ElementsMatch(t, []string{"comms", "byID", "quorums"}, maps)

	for _, file := range parsed {
		ast.Inspect(file, func(node ast.Node) bool {
			at := func() string { return files.Position(node.Pos()).String() }
			switch node := node.(type) {
			case *ast.GoStmt, *ast.SelectStmt, *ast.SendStmt, *ast.ChanType:
				require.Fail(t, "the simulation has one thread", at())
			case *ast.RangeStmt:
				if x, ok := node.X.(*ast.SelectorExpr); ok {
					require.NotContains(t, maps, x.Sel.Name, "%s: the order of a map is random", at())
				}
			case *ast.SelectorExpr:
				from, ok := node.X.(*ast.Ident)
				require.False(t, ok && from.Name == "time" && slices.Contains(clocks, node.Sel.Name), "%s: time comes from the event queue", at())
				require.False(t, ok && from.Name == "rand" && !slices.Contains(random, node.Sel.Name), "%s: randomness comes from the seed", at())
			}
			return true
		})
	}
}
