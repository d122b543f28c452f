package heal

import (
	"log/slog"
	"runtime"

	"golang.org/x/sys/unix"
)

// Serving a checkpoint must not slow down the training of the source. A background stream (SCHED_IDLE) runs
// on idle processors only, and is preempted as soon as anything else can run; with a nice level alone it
// would keep its time slice of some milliseconds. One stream of each target keeps the smallest possible share
// (nice 19, about a hundredth of a busy processor): otherwise a heal would never end on a host without an
// idle processor. All streams of an additional source are in the background, since the target also has its
// assigned source.

// background makes this goroutine run on idle processors only. Its thread is locked to it and ends with it,
// so the priority affects no other goroutine.
func background() { setPriority(unix.SchedAttr{Policy: unix.SCHED_IDLE}) }

// leastShare gives this goroutine the smallest share of a busy processor. Its thread ends with it, too.
func leastShare() { setPriority(unix.SchedAttr{Policy: unix.SCHED_NORMAL, Nice: leastNice}) }

const leastNice = 19

func setPriority(attr unix.SchedAttr) {
	runtime.LockOSThread() // never unlocked: Go ends the thread with the goroutine
	attr.Size = unix.SizeofSchedAttr
	if err := unix.SchedSetAttr(0, &attr, 0); err != nil {
		slog.Debug("checkpoint server: the priority of a stream's thread could not be lowered", "error", err)
	}
}
