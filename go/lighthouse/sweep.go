package lighthouse

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
)

const (
	// A file of this age belongs to a job that has ended: each sweep renews the time of the files of jobs that are in use. If the job
	// begins again, its quorum ids are above the old ones, since the first one is taken from the clock. A damaged file is kept for as
	// long after it was found.
	keepFilesFor = 30 * 24 * time.Hour
	// A temporary file of this age is left from a write that was interrupted.
	keepTemporaryFor = time.Hour
	sweepEvery       = 24 * time.Hour
)

// sweeper removes the files that ended jobs and interrupted writes have left in the state directory.
type sweeper struct {
	last    time.Time
	running sync.Mutex
}

// sweep starts a sweep if one is due. It runs on a goroutine that nothing waits for, since the disk may hang.
func (s *Server) sweep(now time.Time) {
	if s.cfg.StateDir == "" || now.Sub(s.sweeper.last) < sweepEvery {
		return
	}
	s.sweeper.last = now
	var alone sync.WaitGroup
	rpc.Go(&alone, s.log, "old files in the state directory", func() {
		if s.sweeper.running.TryLock() { // otherwise the disk has not answered since the last sweep
			defer s.sweeper.running.Unlock()
			s.removeOld(now)
		}
	})
}

func (s *Server) removeOld(now time.Time) {
	entries, err := os.ReadDir(s.cfg.StateDir)
	if err != nil {
		s.log.Warn("torchft: the state directory cannot be read", "state_dir", s.cfg.StateDir, "error", err)
		return
	}
	for _, entry := range entries {
		info, err := entry.Info()
		if err != nil || !info.Mode().IsRegular() {
			continue
		}
		path := filepath.Join(s.cfg.StateDir, entry.Name())
		if job, state := strings.CutSuffix(entry.Name(), ".state"); state && s.find(job) != nil {
			_ = os.Chtimes(path, now, now) // if that fails, the next sweep tries again
		} else if age := now.Sub(info.ModTime()); age > keepFor(entry.Name()) {
			if err := os.Remove(path); err != nil {
				s.log.Warn("torchft: an old file in the state directory cannot be removed", "file", entry.Name(), "error", err)
				continue
			}
			s.log.Info("torchft: an old file is removed from the state directory", "file", entry.Name(), "age", age.Round(time.Hour))
		}
	}
}

// keepFor returns the age from which a file is removed.
func keepFor(file string) time.Duration {
	const forever = time.Duration(1<<63 - 1)
	switch {
	case strings.HasSuffix(file, ".state"), strings.HasSuffix(file, ".state.corrupt"):
		return keepFilesFor
	case strings.Contains(file, ".state.") && strings.HasSuffix(file, ".tmp"):
		return keepTemporaryFor
	default:
		return forever // the lock, or a file of somebody else
	}
}
