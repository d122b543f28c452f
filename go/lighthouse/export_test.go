package lighthouse

import (
	"net/http"
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
)

// BreakMachine makes uses of the default job's machine panic, as a bug in it would, until mend is called or a
// new one has begun.
func (s *Server) BreakMachine() (mend func()) {
	j := s.defaultJob()
	j.mu.Lock()
	defer j.mu.Unlock()
	sound := j.machine
	j.machine = nil
	return func() {
		j.mu.Lock()
		defer j.mu.Unlock()
		if j.machine == nil {
			j.machine = sound
		}
	}
}

// Streams returns the number of streams of members in the default job.
func (s *Server) Streams() int {
	j := s.defaultJob()
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.streams.open
}

func (s *Server) defaultJob() *job {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.jobs[rpc.DefaultJob]
}

// ForgetJobs forgets idle jobs, as the timer does.
func (s *Server) ForgetJobs(now time.Time) { s.forgetJobs(now) }

// Renew renews the states of the jobs in use, and RemoveOld removes those of other jobs, in the store.
func (s *Server) Renew() {
	for _, j := range s.allJobs() {
		j.renew()
	}
}

func (s *Server) RemoveOld(now time.Time) { s.removeOld(s.term(), now) }

// States returns the states in the store, by job.
func (s *Server) States() map[string][]byte { return s.store.States() }

// Handler serves the server's HTTP routes. A panic reaches the caller.
func (s *Server) Handler() http.Handler { return s.handler() }

// Connect returns an error if nothing listens at an address. The lighthouse uses it to check a suspected
// member without a stream.
func (s *Server) Connect(address string) error { return s.defaultJob().connect(address) }
