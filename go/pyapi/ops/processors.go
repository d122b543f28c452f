package ops

import (
	"os"
	"runtime"
	"sync"
)

// The Go code in a training process mostly waits on sockets, so one processor is enough for it. With more
// processors, Go's scheduler wakes idle threads at each event to look for work. That took a third of Go's
// processor time in a training process. Code that computes much, or moves much data, calls Busy at its
// beginning and done at its end.

// maxProcessors is the number of processors that Go may use while it is busy. The others are left to the
// training. Go's default respects the processor limit of a container, which runtime.NumCPU does not show; it
// is read before the first call of Quiet changes it.
var maxProcessors = min(4, runtime.GOMAXPROCS(0))

var processors = struct {
	sync.Mutex
	fixed bool // the user has set GOMAXPROCS
	busy  int  // calls of Busy whose done has not been called
}{fixed: os.Getenv("GOMAXPROCS") != ""}

// Quiet limits Go to one processor, unless the user has set GOMAXPROCS or Go is busy.
func Quiet() {
	processors.Lock()
	defer processors.Unlock()
	if !processors.fixed && processors.busy == 0 {
		runtime.GOMAXPROCS(1)
	}
}

// Busy lets Go use up to maxProcessors, unless the user has set GOMAXPROCS. The limit returns to one when the
// done of each call of Busy has been called. done may be called more than once, and counts once.
func Busy() (done func()) {
	processors.Lock()
	defer processors.Unlock()
	if processors.busy++; processors.busy == 1 && !processors.fixed {
		runtime.GOMAXPROCS(maxProcessors)
	}
	return sync.OnceFunc(func() {
		processors.Lock()
		processors.busy--
		processors.Unlock()
		Quiet()
	})
}

// BusyServer is a server that keeps Go busy (Busy) until it is shut down.
type BusyServer struct {
	server
	done func()
}

type server interface {
	Address() string
	Shutdown()
}

// NewBusyServer wraps a running server. The caller shuts the server down through the wrapper, which then ends
// the call of Busy.
func NewBusyServer(s server) *BusyServer { return &BusyServer{s, Busy()} }

// Shutdown shuts the server down. Go counts as busy until that is complete.
func (s *BusyServer) Shutdown() {
	s.server.Shutdown()
	s.done()
}
