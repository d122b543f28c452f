package testmain

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// statementsCase and statementsSize are the environment variables of the process that Statements runs.
const statementsCase, statementsSize = "TEST_CASE", "TEST_SIZE"

// Case returns the case and the size for which a test runs in the process of Statements: "" and 0 in another
// process.
func Case() (name string, size int) {
	size, _ = strconv.Atoi(os.Getenv(statementsSize))
	return os.Getenv(statementsCase), size
}

// Statements returns a function that runs a test for a case and a size (Case), and returns how many
// statements of the package in the working folder that executed: how its cost grows with the size, without a
// clock.
func Statements(t *testing.T, test string) func(t *testing.T, name string, size int) int {
	t.Helper()
	folder := t.TempDir()
	binary, profile := filepath.Join(folder, "counting.test"), filepath.Join(folder, "profile")
	out, err := goTest(t, nil, "-c", "-covermode=count", "-o", binary)
	require.NoError(t, err, "%s", out)
	return func(t *testing.T, name string, size int) (sum int) {
		t.Helper()
		arguments := []string{"-test.run=^" + test + "$", "-test.v", "-test.coverprofile=" + profile}
		cmd := exec.CommandContext(t.Context(), binary, arguments...) //nolint:gosec // this test
		cmd.Env = append(os.Environ(), statementsCase+"="+name, fmt.Sprint(statementsSize, "=", size))
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "--- PASS: "+test)
		text, err := os.ReadFile(profile) //nolint:gosec // this test's
		require.NoError(t, err)
		for line := range strings.Lines(string(text)) {
			if fields := strings.Fields(line); len(fields) == 3 {
				// the block, its statements, and how often it ran
				statements, _ := strconv.Atoi(fields[1])
				times, _ := strconv.Atoi(fields[2])
				sum += statements * times
			}
		}
		require.Positive(t, sum)
		return sum
	}
}
