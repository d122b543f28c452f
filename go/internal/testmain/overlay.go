package testmain

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// RunWith runs one test of the package in the working folder, compiled with this source instead of a file, and requires that the
// test passes. The file is relative to that folder. The environment variable GO names the go command; default: go.
func RunWith(t *testing.T, file, source, test string, flags ...string) {
	t.Helper()
	folder := t.TempDir()
	path, err := filepath.Abs(file)
	require.NoError(t, err)
	changed, overlay := filepath.Join(folder, filepath.Base(file)), filepath.Join(folder, "overlay.json")
	require.NoError(t, os.WriteFile(changed, []byte(source), 0o600))
	text, err := json.Marshal(map[string]map[string]string{"Replace": {path: changed}})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(overlay, text, 0o600))
	command := os.Getenv("GO")
	if command == "" {
		command = "go"
	}
	args := append([]string{"test", "-trimpath", "-vet=off", "-count=1", "-overlay=" + overlay, ".", "-run=^" + test + "$", "-v"}, flags...)
	out, err := exec.CommandContext(t.Context(), command, args...).CombinedOutput() //nolint:gosec // the compiler and this test
	t.Logf("%s", out)
	require.NoError(t, err)
	require.Contains(t, string(out), "--- PASS: "+test)
}
