package testmain

import (
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// WithoutReader runs a function in another process, whose standard error is a pipe without a reader, and
// requires that this process does not end by it. The process runs the calling test again, so the test must do
// nothing else. env has further variables, NAME=VALUE each.
func WithoutReader(t *testing.T, run func(), env ...string) {
	t.Helper()
	const child = "TEST_WITHOUT_READER"
	if os.Getenv(child) != "" {
		run()
		return
	}
	reader, writer, err := os.Pipe()
	require.NoError(t, err)
	require.NoError(t, reader.Close())
	again := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
	again.Env, again.Stderr = append(append(os.Environ(), child+"=1"), env...), writer
	assert.NoError(t, again.Run())
	require.NoError(t, writer.Close())
}
