package round

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/torchft/torchft/go/"

// Imports form a ladder: recovery imports quorum, round imports both, and none of them imports other packages
// of this module.
func TestThePureImportOnlyTheStandardLibraryAndEachOther(t *testing.T) {
	for name, want := range map[string][]string{
		"quorum":   {"quorum"},
		"recovery": {"quorum", "recovery"},
		"round":    {"quorum", "recovery", "round"},
	} {
		out, err := exec.CommandContext(t.Context(), "go", "list", "-deps",
			"-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", module+name).Output()
		require.NoError(t, err)
		var got []string
		for path := range strings.FieldsSeq(string(out)) {
			got = append(got, strings.TrimPrefix(path, module))
		}
		require.ElementsMatch(t, want, got, name)
	}
}

// The replay of a seed must not depend on scheduling, on a clock or on the environment.
func TestThePureHaveNoGoroutinesLocksOrClocks(t *testing.T) {
	allowed := map[string]bool{
		"bytes": true, "cmp": true, "container/list": true, "crypto/sha256": true, "encoding/binary": true,
		"encoding/json": true, "errors": true, "fmt": true,
		"maps": true, "math": true, "math/bits": true, "reflect": true, "slices": true, "strings": true,
		"time":            true,
		module + "quorum": true, module + "recovery": true,
	}
	clocks := map[string]bool{"Now": true, "Since": true, "Until": true, "After": true, "AfterFunc": true,
		"Sleep": true, "Tick": true, "NewTimer": true, "NewTicker": true}

	files := token.NewFileSet()
	n := 0
	for _, name := range []string{"quorum", "recovery", "round"} {
		paths, err := filepath.Glob("../" + name + "/*.go")
		require.NoError(t, err)
		for _, path := range paths {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			n++
			file, err := parser.ParseFile(files, path, nil, 0)
			require.NoError(t, err)
			for _, spec := range file.Imports {
				require.True(t, allowed[strings.Trim(spec.Path.Value, `"`)], "%s imports %s", path,
					spec.Path.Value)
			}
			ast.Inspect(file, func(node ast.Node) bool {
				at := func() string { return files.Position(node.Pos()).String() }
				switch node := node.(type) {
				case *ast.GoStmt, *ast.SelectStmt, *ast.SendStmt, *ast.ChanType:
					require.Fail(t, "a machine has one goroutine", at())
				case *ast.SelectorExpr:
					if from, ok := node.X.(*ast.Ident); ok && from.Name == "time" {
						require.False(t, clocks[node.Sel.Name], "%s: time is an argument", at())
					}
				}
				return true
			})
		}
	}
	require.Greater(t, n, 8)
}
