package dashboard

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/quorum"
)

// metricNames returns the names of all metrics, for a histogram also those with its suffixes.
func metricNames(t *testing.T) []string {
	families, err := registry(func() []*Feed {
		step := int64(1)
		status := Status{Snapshots: Snapshots{Step: &step, Checkpoint: &step}}
		status.EjectAfterMS = map[string]int64{"training": 30_000}
		return []*Feed{NewFeed("default", false, func() Status { return status })}
	}).Gather()
	require.NoError(t, err)
	var found []string
	for _, family := range families {
		name := family.GetName()
		found = append(found, name)
		if family.GetType().String() == "HISTOGRAM" {
			found = append(found, name+"_bucket", name+"_sum", name+"_count")
		}
	}
	return found
}

func TestMetricsOfTheDocsAndTheGrafanaDashboardExist(t *testing.T) {
	known := metricNames(t)
	for _, path := range []string{"../../docs/grafana.json", "../../docs/metrics.md", "../../docs/alerts.yml"} {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		if strings.HasSuffix(path, ".json") {
			require.True(t, json.Valid(text))
		}
		for _, name := range slices.Compact(slices.Sorted(slices.Values(regexp.MustCompile(`\b(torchft|process)_[a-z_]+`).FindAllString(string(text), -1)))) {
			if strings.HasSuffix(path, ".md") &&
				!regexp.MustCompile("_(total|seconds|members|id|step|viewers)$").MatchString(name) {
				continue // a module or a command
			}
			if strings.HasPrefix(name, "torchft_manager_") {
				continue // tested in go/manager
			}
			assert.Contains(t, known, name, path)
		}
	}
	operating, err := os.ReadFile("../../docs/metrics.md")
	require.NoError(t, err)
	for _, name := range known {
		if strings.HasPrefix(name, "torchft_") &&
			!regexp.MustCompile("_(bucket|sum|count)$").MatchString(name) {
			assert.True(t, strings.Contains(string(operating), name), "%s is not documented", name)
		}
	}
}

func TestEachCauseOfAFailureIsInTheDocs(t *testing.T) {
	text, err := os.ReadFile("../../docs/metrics.md")
	require.NoError(t, err)
	row := regexp.MustCompile(`(?m)^\| .torchft_member_failures_total\{cause\}. \|.*$`).FindString(string(text))
	require.NotEmpty(t, row)
	for _, cause := range quorum.Causes {
		assert.Contains(t, row, "`"+string(cause)+"`")
	}
	noFailures := []string{string(quorum.ShutDown), string(quorum.Parts)}
	for _, cause := range constants(t, "../quorum/types.go", "Cause") {
		if !slices.Contains(noFailures, cause) {
			assert.Contains(t, quorum.Causes, quorum.Cause(cause))
		}
	}
}

// constants returns the values of all constants of a type of strings in a file.
func constants(t *testing.T, path, of string) (values []string) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	require.NoError(t, err)
	ast.Inspect(file, func(n ast.Node) bool {
		spec, is := n.(*ast.ValueSpec)
		if !is {
			return true
		}
		if name, named := spec.Type.(*ast.Ident); named && name.Name == of {
			value, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
			require.NoError(t, err)
			values = append(values, value)
		}
		return true
	})
	require.NotEmpty(t, values)
	return values
}

// panel has the fields of a Grafana panel that are checked.
type panel struct {
	ID         int
	Type       string
	Title      string
	Datasource struct{ Type, UID string }
	GridPos    struct{ H, W, X, Y int }
	Targets    []struct{ RefID, Expr, LegendFormat string }
}

// The alerting rules use labels that exist; their metrics are checked above.
func TestTheAlertingRulesUseStatesAndCausesThatExist(t *testing.T) {
	text, err := os.ReadFile("../../docs/alerts.yml")
	require.NoError(t, err)
	found := regexp.MustCompile(`expr: .*(state|cause)="(\w+)"`).FindAllStringSubmatch(string(text), -1)
	require.NotEmpty(t, found)
	for _, label := range found {
		if label[1] == "cause" {
			assert.Contains(t, quorum.Causes, quorum.Cause(label[2]))
		} else {
			assert.Contains(t, []State{Training, Healing, Waiting, Joining, Suspect, Stalled, Draining,
				Standby, Failed}, State(label[2]))
		}
	}
	assert.Equal(t, strings.Count(string(text), "- alert:"), strings.Count(string(text), "expr:"))
}

func TestTheGrafanaDashboardShowsEveryMetricAndIsWellMade(t *testing.T) {
	text, err := os.ReadFile("../../docs/grafana.json")
	require.NoError(t, err)
	var board struct {
		Panels     []panel
		Templating struct {
			List []struct{ Name, Query string }
		}
	}
	require.NoError(t, json.Unmarshal(text, &board))
	var expressions []string
	variables := map[string]bool{"__rate_interval": true, "__range": true}
	for _, v := range board.Templating.List {
		expressions = append(expressions, v.Query)
		variables[v.Name] = true
	}
	ids, places := map[int]bool{}, map[[2]int]string{}
	for _, p := range board.Panels {
		assert.False(t, ids[p.ID], "two panels have id %d", p.ID)
		ids[p.ID] = true
		assert.NotEmpty(t, p.Title)
		assert.LessOrEqual(t, p.GridPos.X+p.GridPos.W, 24, p.Title)
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				place := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				assert.Empty(t, places[place], "%s lies on it", p.Title)
				places[place] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		assert.Equal(t, "${datasource}", p.Datasource.UID, p.Title)
		assert.NotEmpty(t, p.Targets, p.Title)
		refs := map[string]bool{}
		for _, target := range p.Targets {
			assert.False(t, refs[target.RefID], "%s has two targets %s", p.Title, target.RefID)
			refs[target.RefID] = true
			expressions = append(expressions, target.Expr)
			for _, brackets := range []string{"()", "{}", "[]"} {
				assert.Equal(t, strings.Count(target.Expr, brackets[:1]),
					strings.Count(target.Expr, brackets[1:]), target.Expr)
			}
			for _, name := range regexp.MustCompile(`\$(\w+)`).FindAllStringSubmatch(target.Expr, -1) {
				assert.True(t, variables[name[1]], "%s: there is no variable %s", target.Expr, name[1])
			}
		}
	}
	all := strings.Join(expressions, "\n")
	for _, name := range metricNames(t) {
		if base := regexp.MustCompile("_(bucket|sum|count)$").ReplaceAllString(name,
			""); strings.HasPrefix(name, "torchft_") {
			assert.Regexp(t, `\b`+base+`(_bucket|_sum|_count)?\b`, all, "%s is on no panel", name)
		}
	}
}
