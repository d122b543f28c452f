package sim

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
)

// docs/correctness.md lists the rules and the planted mistakes that there are.
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
	require.ElementsMatch(t, rules, testmain.Rules(t, "correctness.md"))

	var between, inside []string
	for _, m := range mistakes {
		between = append(between, m.name)
	}
	for _, m := range mutants {
		inside = append(inside, m.name)
	}
	require.GreaterOrEqual(t, len(between)+len(inside), 40)
	require.Equal(t, between, testmain.Row(t, "correctness.md", "go/sim/mistakes_test.go", "; "))
	require.Equal(t, inside, testmain.Row(t, "correctness.md", "go/sim/mutants_test.go", "; "))
}
