// Package testmain runs the tests of a package that has synctest bubbles. No goroutine may outlive them.
package testmain

import (
	"runtime"
	"testing"

	"go.uber.org/goleak"
)

// Run is a package's TestMain.
//
// With the race detector the tests share one processor. In a synctest bubble all timers use one race context, and Go 1.26
// runs the timer of whoever polls its channel on that goroutine's thread: two threads at once corrupt the context, and
// the detector crashes (TestABubblesTimersCrashNoDetector). It finds races by what happens before what, so it needs no
// second processor.
func Run(m *testing.M, options ...goleak.Option) {
	if raceEnabled {
		runtime.GOMAXPROCS(1)
	}
	goleak.VerifyTestMain(m, options...)
}
