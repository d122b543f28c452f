// Package pyapi is what Python sees of the Go core: package-level functions over int64, bool, string and
// float64, each returning (T, error). Structs, slices, callbacks and bare errors do not cross the boundary,
// because gopy's code for them leaks or crashes.
//
// A function whose name ends in Start begins an operation and returns its number; csrc/wait.c waits for the
// result, so that Ctrl-C ends every call that can wait. Objects are integer handles (package ops), rich
// results JSON text. Durations are microseconds, the resolution of Python's timedelta.
package pyapi

import (
	"os"
	"runtime"
	"time"

	"github.com/torchft/torchft/go/pyapi/ops"
)

// maxProcs bounds Go's threads in a training process: the core waits on sockets and computes next to
// nothing, and hosts with many cores would get a thread for each.
const maxProcs = 4

func init() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(min(maxProcs, runtime.GOMAXPROCS(0)))
	}
}

func micros(us int64) time.Duration { return time.Duration(us) * time.Microsecond }

// Address returns where the server behind a handle listens.
func Address(handle int64) (address string, err error) {
	defer ops.Guard(&err)
	server, err := ops.Get[interface{ Address() string }](handle)
	if err != nil {
		return "", err
	}
	return server.Address(), nil
}

// Release ends what a handle stands for. It returns false if that was done already.
func Release(handle int64) (released bool, err error) {
	defer ops.Guard(&err)
	object := ops.Remove(handle)
	ops.Close(object)
	return object != nil, nil
}

// Handles returns the number of live handles, operations in progress included.
func Handles() (count int64, err error) {
	defer ops.Guard(&err)
	return int64(ops.Count()), nil
}
