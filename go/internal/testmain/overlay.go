package testmain

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Sources are Go files that the compiler takes instead of those on the disk, or beside them, by absolute
// path.
type Sources map[string]string

// Read adds a file from the disk, unless it is there already.
func (s Sources) Read(t *testing.T, path string) {
	t.Helper()
	if s[path] == "" {
		source, err := os.ReadFile(path) //nolint:gosec // a source of this module
		require.NoError(t, err)
		s[path] = string(source)
	}
}

// Plant plants a mistake: it replaces a text that the file has once. In the new text, $ is a condition that
// holds in a process with the argument -mistake=NAME. The file is relative to the parent of the working
// folder.
func (s Sources) Plant(t *testing.T, name, file, old, text string) {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("..", file))
	require.NoError(t, err)
	s.Read(t, path)
	require.Equal(t, 1, strings.Count(s[path], old), "%s has the text of %q once", file, name)
	s[path] = strings.Replace(s[path], old, strings.ReplaceAll(text, "$", fmt.Sprintf("planted(%q)", name)),
		1)
}

// planted has the condition that Plant writes.
const planted = `%s

import (
	"os"
	"strings"
)

var plantedName = func() string {
	for _, argument := range os.Args {
		if name, found := strings.CutPrefix(argument, "-mistake="); found {
			return name
		}
	}
	return ""
}()

func planted(name string) bool { return name == plantedName }
`

var packageClause = regexp.MustCompile(`(?m)^package \w+`)

// Compile compiles the tests of the package in the working folder, with all planted mistakes.
func (s Sources) Compile(t *testing.T, flags ...string) (binary string) {
	t.Helper()
	all := Sources{}
	for path, source := range s {
		all[path] = source
		all[filepath.Join(filepath.Dir(path), "planted.go")] = fmt.Sprintf(planted,
			packageClause.FindString(source))
	}
	binary = filepath.Join(t.TempDir(), "mistakes.test")
	out, err := goTest(t, all, append([]string{"-c", "-o", binary}, flags...)...)
	require.NoError(t, err, "%s", out)
	return binary
}

// RunWith runs one test of the package in the working folder, compiled with this source instead of a file,
// and requires that the test passes. The file is relative to that folder.
func RunWith(t *testing.T, file, source, test string, flags ...string) {
	t.Helper()
	path, err := filepath.Abs(file)
	require.NoError(t, err)
	out, err := goTest(t, Sources{path: source},
		append([]string{"-count=1", "-run=^" + test + "$", "-v"}, flags...)...)
	t.Logf("%s", out)
	require.NoError(t, err)
	require.Contains(t, string(out), "--- PASS: "+test)
}

// goTest runs go test for the package in the working folder. The environment variable GO names the go
// command; default: go.
func goTest(t *testing.T, sources Sources, flags ...string) (out []byte, err error) {
	t.Helper()
	folder, overlay := t.TempDir(), map[string]string{}
	for path, source := range sources {
		overlay[path] = filepath.Join(folder, fmt.Sprint(len(overlay), ".go"))
		require.NoError(t, os.WriteFile(overlay[path], []byte(source), 0o600))
	}
	text, err := json.Marshal(map[string]any{"Replace": overlay})
	require.NoError(t, err)
	list := filepath.Join(folder, "overlay.json")
	require.NoError(t, os.WriteFile(list, text, 0o600))
	command := os.Getenv("GO")
	if command == "" {
		command = "go"
	}
	arguments := append([]string{"test", "-trimpath", "-vet=off", "-overlay=" + list, "."}, flags...)
	compile := exec.CommandContext(t.Context(), command, arguments...) //nolint:gosec // the compiler
	return compile.CombinedOutput()
}
