// Package testmain runs the tests of a package, and fails if a goroutine outlives them.
package testmain

import (
	"flag"
	"os"
	"runtime"
	"slices"
	"testing"

	"go.uber.org/goleak"

	"github.com/torchft/torchft/go/internal/clock"
)

// Run is the body of TestMain for a package with synctest bubbles.
//
// With the race detector the tests share one processor. In a synctest bubble all timers use one race context,
// and Go 1.26 runs a timer on the thread of the goroutine that polls its channel: two threads at once corrupt
// the context, and the detector crashes (TestTimersOfABubbleDoNotCrashTheRaceDetector). The detector finds
// races by the happens-before relation, so it needs no second processor.
func Run(m *testing.M, options ...goleak.Option) {
	// Go reuses the result of a test while the files that the test has read are the same, but compares only
	// files of this module. Some tests read docs/, outside of the module. So `make test` puts the checksum of
	// docs/ into this variable: Go also compares the variables that a test has read.
	_ = os.Getenv("DOCS_SUM")
	if raceEnabled {
		runtime.GOMAXPROCS(1)
	}
	clock.Fake() // a suspend of the test's host does not pass by the time of a bubble
	NoGoroutineIsLeft(m, options...)
}

// Full reports whether tests run at full size, however long that takes: `make test-all` sets FULL.
func Full() bool { return os.Getenv("FULL") != "" }

// Slow skips a test that takes long, unless tests run at full size.
func Slow(t testing.TB) {
	t.Helper()
	if !Full() {
		t.Skip("FULL=1 runs it")
	}
}

// Race reports whether the race detector is on, which makes computations ten times slower.
func Race() bool { return raceEnabled }

// NoGoroutineIsLeft is the body of TestMain for a package without synctest bubbles.
//
// A process of the fuzzer is not checked: it is ended while its server still serves.
func NoGoroutineIsLeft(m *testing.M, options ...goleak.Option) {
	flag.Parse()
	if fuzzing() {
		os.Exit(m.Run())
	}
	goleak.VerifyTestMain(m, options...)
}

// fuzzing reports whether this process fuzzes (-fuzz), or is a worker of one that does.
func fuzzing() bool {
	for name, off := range map[string]string{"test.fuzz": "", "test.fuzzworker": "false"} {
		if f := flag.Lookup(name); f != nil && f.Value.String() != off {
			return true
		}
	}
	return false
}

// Skip skips a test because the host lacks something that it needs. `go test` does not report skips. Under
// CI=true, where everything that can be installed is installed, a skip is a failure, as in tests/policy.py.
func Skip(t testing.TB, why ...any) {
	t.Helper()
	if slices.Contains([]string{"1", "true"}, os.Getenv("CI")) {
		t.Fatal(append([]any{"skipped under CI=true: "}, why...)...)
	}
	t.Skip(why...)
}
