package heal

import (
	"log/slog"
	"runtime"

	"golang.org/x/sys/unix"
)

// Serving can come after the training of its source. A stream in the background (SCHED_IDLE) runs on processors that are
// idle, and is put off the moment that anything else wants to run; a nice level alone would let it finish its slice of
// milliseconds. So that a heal also ends on a host that has no idle processor, one stream of each target keeps the least
// share that there is (nice 19, about a hundredth of a processor that others use fully). Who helps keeps none: its target
// has another source.

// background lets this goroutine run only where a processor is idle. The thread that it runs on is its own until it ends,
// and ends with it.
func background() { yield(unix.SchedAttr{Policy: unix.SCHED_IDLE}) }

// leastShare leaves this goroutine the least share. Its thread ends with it, too.
func leastShare() { yield(unix.SchedAttr{Policy: unix.SCHED_NORMAL, Nice: leastNice}) }

const leastNice = 19

func yield(attr unix.SchedAttr) {
	runtime.LockOSThread()
	attr.Size = unix.SizeofSchedAttr
	if err := unix.SchedSetAttr(0, &attr, 0); err != nil {
		slog.Debug("checkpoint server: the priority stays as it is", "error", err)
	}
}
