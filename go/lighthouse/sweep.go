package lighthouse

import (
	"errors"
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/replica"
)

const (
	// A state of this age belongs to a job that has ended: each sweep renews the states of jobs that are in
	// use. If the job begins again, its quorum ids are above the old ones, since the first one is taken from
	// the clock. A damaged file is kept for as long after it was found.
	keepFilesFor = 30 * 24 * time.Hour
	sweepEvery   = 24 * time.Hour
)

// sweep removes the states of ended jobs, once a day. A new leader, or a lighthouse that has started, waits
// for a day first: the members of all jobs that run have come to it by then.
func (s *Server) sweep(now time.Time) {
	if s.store == nil {
		return
	}
	term := s.term()
	if s.swept.IsZero() || term != s.sweptIn {
		s.sweptIn, s.swept = term, now
	}
	if now.Sub(s.swept) < sweepEvery {
		return
	}
	s.swept = now
	for _, j := range s.allJobs() {
		j.renew()
	}
	rpc.Go(&s.tasks, s.log, "states of ended jobs", func() { s.removeOld(term, now) })
}

// renew proposes the state of a job that is in use with the present time.
func (j *job) renew() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.ended == nil && (j.kept.Highest > 0 || len(j.kept.Rendezvous.Groups) > 0) {
		j.keepState()
	}
}

func (s *Server) removeOld(term uint64, now time.Time) {
	for name, text := range s.store.States() {
		old, err := decodeState(text, name)
		if err != nil || now.Sub(old.Used) <= keepFilesFor || !s.reserve(name) {
			// an error: a later version wrote it
			continue
		}
		err = s.store.Propose(term, name, nil)
		for errors.Is(err, replica.ErrUnknown) {
			// until then the job must not begin: its state may still be removed
			err = s.store.Propose(term, name, nil)
		}
		s.reserve("")
		if err != nil { // this lighthouse does not lead any more, or its disk fails
			s.log.Info("torchft: the states of ended jobs are not removed", "error", err)
			return
		}
		s.log.Info("torchft: the state of a job is removed: it was not used for long", "job", name,
			"used", old.Used)
	}
}

// reserve keeps an unused job from beginning, until the next call. It returns false if the job is in use.
func (s *Server) reserve(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reserved = name
	if s.jobs[name] != nil {
		s.reserved = ""
	}
	return s.reserved != ""
}
