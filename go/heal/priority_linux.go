package heal

import (
	"log/slog"
	"runtime"
	"syscall"
)

// servingNice leaves the processors to the training of the source, which has a tenth of its weight to spare.
const servingNice = 10

// lowerPriority makes what this goroutine does from here on yield to everything else in the process. The thread that it
// runs on is its own until it ends, and ends with it.
func lowerPriority() {
	runtime.LockOSThread()
	if err := syscall.Setpriority(syscall.PRIO_PROCESS, 0, servingNice); err != nil { // 0: of this thread
		slog.Debug("checkpoint server: the priority stays as it is", "error", err)
	}
}
