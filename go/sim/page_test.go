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

// docs/correctness.md lists the rules, and has the number of the planted mistakes.
func TestThePageListsRulesAndMistakes(t *testing.T) {
	var rules []string
	for _, path := range []string{"check.go", "judge_rules.go"} {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		require.NoError(t, err)
		ast.Inspect(file, func(node ast.Node) bool {
			spec, ok := node.(*ast.ValueSpec)
			if !ok || len(spec.Values) != 1 || !strings.HasPrefix(spec.Names[0].Name, "rule") {
				return true
			}
			if text, ok := spec.Values[0].(*ast.BasicLit); ok {
				rule, err := strconv.Unquote(text.Value)
				require.NoError(t, err)
				rules = append(rules, rule)
			}
			return true
		})
	}
	require.Greater(t, len(rules), 30)
	var listed []string
	for _, row := range testmain.Table(t, "correctness.md", "rule") {
		listed = append(listed, row[0])
	}
	require.ElementsMatch(t, rules, listed)

	require.GreaterOrEqual(t, len(mistakes)+len(mutants), 40)
	require.Equal(t, []string{strconv.Itoa(len(mistakes))}, testmain.Row(t, "correctness.md", "go/sim/mistakes_test.go", ", "))
	require.Equal(t, []string{strconv.Itoa(len(mutants))}, testmain.Row(t, "correctness.md", "go/sim/mutants_test.go", ", "))
}

// The page has the cost of each kind of fault, and the simulation allows exactly that.
func TestThePageHasTheCostOfEachFault(t *testing.T) {
	kinds := map[string]FaultKind{}
	for kind, word := range faultWords {
		kinds[word] = FaultKind(kind)
	}
	for _, row := range testmain.Table(t, "correctness.md", "fault") {
		for word := range strings.SplitSeq(row[0], "; ") {
			require.Contains(t, kinds, word)
			f := Fault{Kind: kinds[word]}
			delete(kinds, word)
			if row[1] == "not bounded: each is a fault" {
				require.Equal(t, math.MaxInt32, f.cost(&Setup{Timeout: 1, Ranks: 1}))
				continue
			}
			number, more, _ := strings.Cut(strings.TrimSuffix(row[1], ":"), " ")
			steps, err := strconv.Atoi(strings.TrimRight(number, ":,"))
			require.NoError(t, err)
			require.Equal(t, steps, f.cost(&Setup{Timeout: 1, Ranks: 1}), word)
			f.For = 3
			if strings.Contains(more, "more each `timeout`") {
				steps += 3
			}
			require.Equal(t, steps, f.cost(&Setup{Timeout: 1, Ranks: 1}), word)
			if strings.Contains(more, "each rank") {
				steps *= 4
			}
			require.Equal(t, steps, f.cost(&Setup{Timeout: 1, Ranks: 4}), word)
		}
	}
	require.Empty(t, kinds, "each kind is in the table")
}
