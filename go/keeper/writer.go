package keeper

import (
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
)

// writerPause is the pause before a writer that has ended is started again.
const writerPause = 10 * time.Second

// writer is the process that writes slots to disk, at low priority. It ends with the keeper.
type writer struct {
	tasks sync.WaitGroup

	mu      sync.Mutex
	process *os.Process // nil while none runs
	next    time.Time   // when one may be started
	wanted  bool
}

// follow starts the writer while a slot is due on disk. One that runs ends by itself when nothing is due.
func (w *writer) follow(cfg Config, wanted bool, log *slog.Logger, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wanted = wanted && len(cfg.Writer) > 0
	if !w.wanted || w.process != nil || now.Before(w.next) {
		return
	}
	w.next = now.Add(writerPause)
	started := make(chan struct{})
	rpc.Go(&w.tasks, log, "writer", func() {
		// The kernel ends the writer when the thread that started it ends: so this one stays until then.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		command := slices.Concat(cfg.Writer, []string{cfg.Root})
		process := exec.Command(command[0], command[1:]...) //nolint:noctx // it is killed in end
		process.Stdout, process.Stderr = os.Stderr, os.Stderr
		process.SysProcAttr = endsWithUs()
		err := process.Start()
		w.process = process.Process // mu is held in follow, which waits
		close(started)
		if err != nil {
			log.Warn("torchft: snapshots are not written to disk: the writer does not start", "error", err)
			return
		}
		yield(process.Process.Pid)
		err = process.Wait()
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.process = nil; w.wanted {
			log.Warn("torchft: the writer of snapshots has ended, and is started again", "error", err)
		}
	})
	<-started
}

// end kills the writer: what it has begun is not complete without its last rename.
func (w *writer) end() {
	w.mu.Lock()
	w.wanted = false
	if w.process != nil {
		_ = w.process.Kill() // fails only if it has ended
	}
	w.mu.Unlock()
	w.tasks.Wait()
}
