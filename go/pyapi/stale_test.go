package pyapi_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// crossing maps the types that may be passed to Python to gopy's names for them.
var crossing = map[string]string{"int64": "C.longlong", "bool": "C.char", "string": "*C.char",
	"float64": "C.double"}

// The committed binding has the functions of the facade, with the same parameters. The order of gopy's output
// is random, so the test compares signatures instead of text.
func TestBindingIsNotStale(t *testing.T) {
	sources, err := filepath.Glob("*.go")
	require.NoError(t, err)
	var facade []string
	for _, path := range sources {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		for _, f := range functions(t, path) {
			if !f.Name.IsExported() {
				continue
			}
			require.Nil(t, f.Recv, "%s: only package-level functions may cross to Python", f.Name)
			results := fields(f.Type.Results)
			require.Len(t, results, 2, "%s must return (T, error)", f.Name)
			require.Equal(t, "error", results[1].kind, "%s must return (T, error)", f.Name)
			facade = append(facade, signature(t, f.Name.Name, fields(f.Type.Params), results[0]))
		}
	}

	var binding []string
	for _, f := range functions(t, "../native/torchft_go.go") {
		if name, ok := strings.CutPrefix(f.Name.Name, "pyapi_"); ok {
			result := fields(f.Type.Results)[0]
			binding = append(binding, name+join(fields(f.Type.Params))+" "+result.kind)
		}
	}
	slices.Sort(facade)
	slices.Sort(binding)
	require.Equal(t, facade, binding, "the facade changed: run `make bindings`")

	stubs, err := os.ReadFile("../native/torchft_go.c")
	require.NoError(t, err)
	var listed []string
	for _, match := range regexp.MustCompile(`\{\(char \*\) "pyapi_(\w+)"`).FindAllSubmatch(stubs, -1) {
		listed = append(listed, string(match[1]))
	}
	slices.Sort(listed)
	var names []string
	for _, f := range facade {
		name, _, _ := strings.Cut(f, "(")
		names = append(names, name)
	}
	require.Equal(t, names, listed, "torchft_go.c does not match torchft_go.go: run `make bindings`")
}

type field struct{ name, kind string }

func functions(t *testing.T, path string) []*ast.FuncDecl {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	require.NoError(t, err)
	var found []*ast.FuncDecl
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok {
			found = append(found, f)
		}
	}
	return found
}

func fields(list *ast.FieldList) []field {
	var all []field
	if list == nil {
		return nil
	}
	for _, f := range list.List {
		kind := types.ExprString(f.Type)
		if len(f.Names) == 0 {
			all = append(all, field{"", kind})
		}
		for _, name := range f.Names {
			all = append(all, field{name.Name, kind})
		}
	}
	return all
}

func signature(t *testing.T, name string, params []field, result field) string {
	t.Helper()
	for i, p := range params {
		require.Contains(t, crossing, p.kind, "%s: a %s must not cross to Python", name, p.kind)
		params[i].kind = crossing[p.kind]
	}
	require.Contains(t, crossing, result.kind, "%s: a %s must not cross to Python", name, result.kind)
	return name + join(params) + " " + crossing[result.kind]
}

func join(params []field) string {
	var all []string
	for _, p := range params {
		all = append(all, p.name+" "+p.kind)
	}
	return "(" + strings.Join(all, ", ") + ")"
}
