package testmain

import (
	"os"
	"slices"
	"testing"
)

// Skip leaves a test out, because the host lacks something. `go test` does not say so. Under CI=true, where all that can be installed is
// there, it is a failure, as in tests/policy.py.
func Skip(t testing.TB, why ...any) {
	t.Helper()
	if slices.Contains([]string{"1", "true"}, os.Getenv("CI")) {
		t.Fatal(append([]any{"skipped under CI=true: "}, why...)...)
	}
	t.Skip(why...)
}
