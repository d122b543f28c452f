// Package internal_test checks the rules of docs/internals/design.md about imports between packages.
package internal_test

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const module = "github.com/torchft/torchft/go"

type pkg struct {
	ImportPath   string
	Imports      []string // imports of its code, without those of its tests
	Deps         []string // all direct and indirect dependencies
	TestGoFiles  []string
	XTestGoFiles []string
}

// packages returns the packages of the module that match the patterns; all packages without a pattern.
func packages(t *testing.T, patterns ...string) map[string]pkg {
	t.Helper()
	if len(patterns) == 0 {
		patterns = []string{"./..."}
	}
	list := exec.Command("go", append([]string{"list", "-e",
		"-json=ImportPath,Imports,Deps,TestGoFiles,XTestGoFiles"}, patterns...)...)
	list.Dir = ".."
	out, err := list.Output()
	require.NoError(t, err)
	found := map[string]pkg{}
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		err := decoder.Decode(&p)
		if errors.Is(err, io.EOF) {
			return found
		}
		require.NoError(t, err)
		found[strings.TrimPrefix(p.ImportPath, module+"/")] = p
	}
}

// ours returns the imports that are packages of this module, without the module's name.
func ours(imports []string) (short []string) {
	for _, path := range imports {
		if name, ok := strings.CutPrefix(path, module+"/"); ok {
			short = append(short, name)
		}
	}
	return short
}

func isStandard(path string) bool {
	first, _, _ := strings.Cut(path, "/")
	return !strings.Contains(first, ".")
}

func TestImportsFollowTheDesign(t *testing.T) {
	decides := []string{"quorum", "recovery", "rendezvous", "round"}
	pure := append([]string{"gossip/agree", "slots"}, decides...)
	shared := append([]string{"torchftpb", "internal/auth", "internal/clock", "internal/logging",
		"internal/rpc", "internal/tracing", "internal/wire"}, decides...)
	client := append([]string{"membership"}, shared...)
	allowed := map[string][]string{
		"quorum":                 nil,
		"recovery":               {"quorum"},
		"rendezvous":             nil,
		"round":                  {"quorum", "recovery"},
		"sim":                    nil,
		"gossip/agree":           nil,
		"gossip":                 {"gossip/agree", "internal/auth", "internal/rpc"},
		"torchftpb":              nil,
		"internal/auth":          nil,
		"internal/clock":         nil,
		"internal/rpc":           {"internal/auth", "internal/admission"},
		"internal/wire":          append([]string{"internal/rpc", "membership", "torchftpb"}, decides...),
		"internal/tracing":       {"internal/logging"},
		"internal/admission":     nil,
		"internal/logging":       nil,
		"heal":                   {"internal/admission"},
		"replica":                {"internal/auth", "internal/clock", "internal/rpc", "torchftpb"},
		"dashboard":              {"internal/logging", "quorum"},
		"slots":                  nil,
		"keeper":                 {"internal/auth", "internal/rpc", "slots"},
		"lighthouse":             append([]string{"dashboard", "replica", "slots"}, shared...),
		"membership":             append([]string{"torchftpb"}, decides...),
		"membership/lighthouses": client,
		"internal/local":         client,
		"rankclient":             append([]string{"internal/local"}, client...),
		"manager":                append([]string{"internal/local"}, client...),
		"internal/transcript":    nil,
		"internal/testlog":       nil,
		"internal/fttest": append([]string{"internal/testlog", "lighthouse", "manager",
			"membership/lighthouses", "rankclient"}, client...),
		"cmd/torchft_lighthouse": {"internal/logging", "lighthouse"},
	}
	all := packages(t)
	for name, p := range all {
		for _, imported := range ours(p.Imports) {
			if may, ruled := allowed[name]; ruled {
				assert.Contains(t, may, imported, "%s imports %s", name, imported)
			}
			if slices.Contains([]string{"lighthouse", "manager"}, name) {
				assert.NotContains(t, []string{"membership/lighthouses", "rankclient"}, imported,
					"%s is a server, and %s a client", name, imported)
			}
			if imported == "pyapi" || strings.HasPrefix(imported, "pyapi/") {
				inside := name == "native" || name == "pyapi" || strings.HasPrefix(name, "pyapi/")
				assert.True(t, inside, "%s imports %s: only native may", name, imported)
			}
			if name != "internal/fttest" {
				assert.NotContains(t, []string{"internal/fttest", "internal/testlog", "internal/transcript"},
					imported, "%s imports it outside of tests", name)
			}
		}
	}
	for _, name := range pure {
		require.Contains(t, all, name)
		for _, path := range all[name].Deps {
			assert.True(t, isStandard(path) || strings.HasPrefix(path, module), "%s needs %s", name, path)
		}
		for _, path := range all[name].Imports {
			assert.False(t, slices.Contains([]string{"net", "os", "sync", "log/slog", "context"}, path),
				"%s is pure and imports %s", name, path)
		}
	}
}

// If a library handled SIGINT, Python would not receive Ctrl-C. go-metrics, which memberlist and raft import,
// can handle a signal to print its metrics, but only in a function that is not called.
func TestOnlyTheCommandTakesSignals(t *testing.T) {
	may := []string{"github.com/hashicorp/go-metrics", "internal/fttest"}
	for name, p := range packages(t, "-deps", "./...") {
		if slices.Contains(p.Imports, "os/signal") && !strings.HasPrefix(name, "cmd/") {
			assert.Contains(t, may, name)
		}
	}
	for _, name := range []string{"heal", "manager", "sim"} {
		assert.NotContains(t, packages(t, "./"+name)[name].Deps, "os/signal", "%s", name)
	}
}

// `go test` does not report skipped tests. Only these tests may skip: those that a flag or FULL turns on, and
// those that need a network namespace, which the Makefile reports. Any other skip is a failure under CI=true.
func TestASkipIsAFailureUnderCI(t *testing.T) {
	allowed := regexp.MustCompile(`t\.Skip\("-|"this system makes no network for a test:"`)
	tests, err := filepath.Glob("../*/*_test.go")
	require.NoError(t, err)
	deeper, err := filepath.Glob("../*/*/*_test.go")
	require.NoError(t, err)
	require.Greater(t, len(deeper), 10)
	for _, path := range append(tests, deeper...) {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		for line := range strings.Lines(string(text)) {
			if regexp.MustCompile(`\b[tb]\.Skip(f|Now)?\(`).MatchString(line) &&
				!strings.HasPrefix(path, "../internal/testmain/") {
				assert.Regexp(t, allowed, line, "%s: call testmain.Skip", path)
			}
		}
	}
}
