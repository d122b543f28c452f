package heal

import (
	"log/slog"
	"runtime"
	"syscall"
)

// servingNice is how much lower the priority of helping is than that of the process: where both want one processor, the
// training of the source gets nine tenths of it. Relative, because how the job stands to others is not ours to say.
const servingNice = 10

// lowerPriority makes what this goroutine does from here on yield to everything else in the process. The thread that it
// runs on is its own until it ends, and ends with it.
func lowerPriority() {
	runtime.LockOSThread()
	if err := syscall.Setpriority(syscall.PRIO_PROCESS, 0, min(19, nice(0)+servingNice)); err != nil {
		slog.Debug("checkpoint server: the priority stays as it is", "error", err)
	}
}

// nice is that of a thread; 0: of this one.
func nice(thread int) int {
	biased, err := syscall.Getpriority(syscall.PRIO_PROCESS, thread) // 20 less nice, so that it is no error number
	if err != nil {
		return 0
	}
	return 20 - biased
}
