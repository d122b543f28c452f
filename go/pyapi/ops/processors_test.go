package ops_test

import (
	"os"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
	"github.com/torchft/torchft/go/pyapi/ops"
)

// Read before a test changes it. In a container with a processor limit it is less than runtime.NumCPU.
var busyProcessors = min(4, runtime.GOMAXPROCS(0))

type idle struct{ closer }

func (*idle) Address() string { return "http://here:1" }

func TestProcessorsFollowTheWork(t *testing.T) {
	if runtime.NumCPU() < 2 || os.Getenv("GOMAXPROCS") != "" {
		testmain.Skip(t, "there is no choice of processors")
	}
	before := runtime.GOMAXPROCS(0)
	t.Cleanup(func() { runtime.GOMAXPROCS(before) })
	ops.Quiet()
	require.Equal(t, 1, runtime.GOMAXPROCS(0))
	first, second := ops.Busy(), ops.Busy()
	require.Equal(t, busyProcessors, runtime.GOMAXPROCS(0))
	first()
	first()
	require.Equal(t, busyProcessors, runtime.GOMAXPROCS(0), "the second one is still busy")
	second()
	require.Equal(t, 1, runtime.GOMAXPROCS(0))

	s := &idle{}
	busy := ops.NewBusyServer(s)
	require.Equal(t, "http://here:1", busy.Address())
	require.Equal(t, busyProcessors, runtime.GOMAXPROCS(0))
	ops.Quiet()
	require.Equal(t, busyProcessors, runtime.GOMAXPROCS(0))
	busy.Shutdown()
	require.Equal(t, 1, s.closed)
	require.Equal(t, 1, runtime.GOMAXPROCS(0))
}
