package replica

import (
	"runtime"
	"testing"

	"github.com/torchft/torchft/go/internal/testmain"
)

func TestMain(m *testing.M) {
	if testmain.Race() {
		// Go 1.26 runs the timers of a synctest bubble on several processors in one context of the race
		// detector, which crashes then.
		runtime.GOMAXPROCS(1)
	}
	testmain.NoGoroutineIsLeft(m)
}
