package lighthouse

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/replica"
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
	if s.cluster != nil {
		s.cluster.sweep(now)
	}
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

// sweep removes the states of ended jobs from the log of the cluster, once a day. A new leader waits for a day first: the members of all
// jobs that run have come to it by then.
func (c *cluster) sweep(now time.Time) {
	term := c.term.Load()
	if term != c.sweptIn {
		c.sweptIn, c.swept = term, now
	}
	if now.Sub(c.swept) < sweepEvery {
		return
	}
	c.swept = now
	for _, j := range c.server.allJobs() {
		j.renew()
	}
	rpc.Go(&c.server.tasks, c.server.log, "states of ended jobs", func() { c.removeOld(term, now) })
}

// renew proposes the state of a job that is in use with the present time.
func (j *job) renew() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.ended == nil && (j.kept.Highest > 0 || len(j.kept.Rendezvous.Groups) > 0) {
		j.keepState()
	}
}

func (c *cluster) removeOld(term uint64, now time.Time) {
	for name, text := range c.node.States() {
		s, err := decodeState(text, name)
		if err != nil || now.Sub(s.Used) <= keepFilesFor || !c.server.reserve(name) { // an error: a later version wrote it
			continue
		}
		err = c.node.Propose(term, name, nil)
		for errors.Is(err, replica.ErrUnknown) { // until then the job must not begin: its state may still be removed
			err = c.node.Propose(term, name, nil)
		}
		c.server.reserve("")
		if err != nil {
			return // this lighthouse does not lead any more
		}
		c.server.log.Info("torchft: the state of a job is removed from the log of the cluster: it was not used for long", "job", name, "used", s.Used)
	}
}

// reserve keeps a job that is not in use from beginning, until the next call. It returns false if the job is in use.
func (s *Server) reserve(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reserved = name
	if s.jobs[name] != nil {
		s.reserved = ""
	}
	return s.reserved != ""
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
