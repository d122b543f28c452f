package ops

import (
	"os"
	"runtime"
	"sync"
)

// Go's part in a training process waits on sockets and computes next to nothing: one processor is enough for it. With
// more, each event wakes threads that look for work and find none; on a machine that trains, that is a third of the
// core's processor time. What really computes, or moves much data, asks for more while it does.

const most = 4

var processors = struct {
	sync.Mutex
	fixed bool // by the user
	busy  int
}{fixed: os.Getenv("GOMAXPROCS") != ""}

// Quiet leaves Go one processor, unless the user chose with GOMAXPROCS.
func Quiet() {
	processors.Lock()
	defer processors.Unlock()
	if !processors.fixed && processors.busy == 0 {
		runtime.GOMAXPROCS(1)
	}
}

// Busy gives Go more processors until done is called, which may be done more than once.
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

// BusyServer is a server that has more processors for as long as it runs.
type BusyServer struct {
	server
	done func()
}

type server interface {
	Address() string
	Shutdown()
}

// NewBusyServer takes a server over.
func NewBusyServer(s server) *BusyServer { return &BusyServer{s, Busy()} }

// Shutdown ends the server.
func (s *BusyServer) Shutdown() {
	s.server.Shutdown()
	s.done()
}
