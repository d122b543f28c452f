package sim

import (
	"go/ast"
	"go/parser"
	"go/token"
	"math"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
)

// docs/internals/correctness.md lists the rules, and has the number of the planted mistakes.
func TestThePageListsRulesAndMistakes(t *testing.T) {
	var rules []string
	for _, path := range []string{"rules_test.go"} {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		require.NoError(t, err)
		ast.Inspect(file, func(node ast.Node) bool {
			spec, ok := node.(*ast.ValueSpec)
			if !ok || len(spec.Values) != 1 || !strings.HasPrefix(spec.Names[0].Name, "rule") {
				return true
			}
			rules = append(rules, text(t, spec.Values[0]))
			return true
		})
	}
	require.GreaterOrEqual(t, len(rules), 30)
	var listed []string
	for _, row := range testmain.Table(t, "internals/correctness.md", "rule") {
		listed = append(listed, row[0])
	}
	require.ElementsMatch(t, rules, listed)
}

// text returns the value of a string, which may be written in parts.
func text(t *testing.T, of ast.Expr) string {
	if sum, is := of.(*ast.BinaryExpr); is {
		return text(t, sum.X) + text(t, sum.Y)
	}
	value, err := strconv.Unquote(of.(*ast.BasicLit).Value)
	require.NoError(t, err)
	return value
}

// The page has the cost of each kind of fault, and the simulation allows exactly that.
func TestThePageHasTheCostOfEachFault(t *testing.T) {
	kinds := map[string]faultKind{}
	for kind, word := range faultWords {
		kinds[word] = faultKind(kind)
	}
	for _, row := range testmain.Table(t, "internals/correctness.md", "fault") {
		for word := range strings.SplitSeq(row[0], "; ") {
			require.Contains(t, kinds, word)
			f := fault{kind: kinds[word]}
			delete(kinds, word)
			if row[1] == "not bounded: each is a fault" {
				require.Equal(t, math.MaxInt32, f.cost(&setup{timeout: 1, ranks: 1}))
				continue
			}
			number, more, _ := strings.Cut(strings.TrimSuffix(row[1], ":"), " ")
			steps, err := strconv.Atoi(strings.TrimRight(number, ":,"))
			require.NoError(t, err)
			require.Equal(t, steps, f.cost(&setup{timeout: 1, ranks: 1}), word)
			f.lasts = 3
			if strings.Contains(more, "more each `timeout`") {
				steps += 3
			}
			require.Equal(t, steps, f.cost(&setup{timeout: 1, ranks: 1}), word)
			if strings.Contains(more, "each rank") {
				steps *= 4
			}
			require.Equal(t, steps, f.cost(&setup{timeout: 1, ranks: 4}), word)
		}
	}
	require.Empty(t, kinds, "each kind is in the table")
}
