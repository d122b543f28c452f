package ops

import (
	"os"
	"runtime"
	"sync"
)

// The Go code in a training process waits on sockets and computes little: one processor is enough. With more, Go's scheduler wakes
// idle threads at each event to look for work, which took a third of Go's processor time in a training process. Code that computes
// or moves much data calls Busy meanwhile.

// most is how many processors Go uses while it is busy: the rest is for the training.
const most = 4

var processors = struct {
	sync.Mutex
	fixed bool // the user has set GOMAXPROCS
	busy  int  // calls of Busy that are not done
}{fixed: os.Getenv("GOMAXPROCS") != ""}

// Quiet limits Go to one processor, unless the user has set GOMAXPROCS.
func Quiet() {
	processors.Lock()
	defer processors.Unlock()
	if !processors.fixed && processors.busy == 0 {
		runtime.GOMAXPROCS(1)
	}
}

// Busy allows Go up to most processors until done is called. done may be called more than once.
func Busy() (done func()) {
	processors.Lock()
	defer processors.Unlock()
	if processors.busy++; processors.busy == 1 && !processors.fixed {
		runtime.GOMAXPROCS(min(most, runtime.NumCPU()))
	}
	return sync.OnceFunc(func() {
		processors.Lock()
		processors.busy--
		processors.Unlock()
		Quiet()
	})
}

// BusyServer is a server that is allowed more processors while it runs.
type BusyServer struct {
	server
	done func()
}

type server interface {
	Address() string
	Shutdown()
}

// NewBusyServer wraps a server, and shuts it down at Shutdown.
func NewBusyServer(s server) *BusyServer { return &BusyServer{s, Busy()} }

// Shutdown ends the server.
func (s *BusyServer) Shutdown() {
	s.server.Shutdown()
	s.done()
}
