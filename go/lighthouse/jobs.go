package lighthouse

import (
	"context"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
)

// forgetAfter is how long a job without members is kept: long enough to restart all of them. After that, its
// last quorum is still on disk, or in the log of the cluster, and known to its members.
const forgetAfter = 10 * time.Minute

// forgetNameAfter is how long a job that never had a quorum is kept: an invented name must not count in
// max_jobs and in the metrics for longer than its members count as alive.
func (c Config) forgetNameAfter() time.Duration { return c.HeartbeatTimeout }

// use returns the job that a call names, a new one if needed. The caller calls done when the call ends.
func (s *Server) use(ctx context.Context) (*job, error) {
	name, err := rpc.JobOf(ctx)
	if err != nil {
		return nil, err
	}
	return s.enter(name)
}

func (s *Server) enter(name string) (*job, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errShutdown
	}
	if s.cluster != nil && s.cluster.term.Load() == 0 {
		return nil, s.cluster.notLeading()
	}
	j := s.jobs[name]
	if j == nil {
		if name == s.reserved {
			return nil, status.Errorf(codes.Unavailable, "the old state of job %q is being removed", name)
		}
		if len(s.jobs) >= s.cfg.MaxJobs {
			return nil, status.Errorf(codes.ResourceExhausted,
				"job %q is one too many: this lighthouse serves %d (max_jobs)", name, s.cfg.MaxJobs)
		}
		j = newJob(s, name)
		s.jobs[name] = j
	}
	if j.users >= s.cfg.MaxCallsPerJob {
		return nil, status.Errorf(codes.ResourceExhausted,
			"job %q has %d streams and calls open, which is the limit (max_calls_per_job)", name, j.users)
	}
	j.users++
	return j, nil
}

func (j *job) done() {
	s := j.server
	s.mu.Lock()
	defer s.mu.Unlock()
	j.users--
	j.since = time.Now()
}

func (s *Server) allJobs() []*job {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.jobs))
}

// forgetJobs removes jobs that have not been used for a while, except the default job.
func (s *Server) forgetJobs(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return // Shutdown ends all of them
	}
	for name, j := range s.jobs {
		after := forgetAfter
		if !j.served {
			after = s.cfg.forgetNameAfter()
		}
		if name == rpc.DefaultJob || j.users > 0 || now.Sub(j.since) < after {
			continue
		}
		delete(s.jobs, name)
		j.close(errShutdown)
		s.log.Info("torchft: a job is forgotten: it has no members", "job", name)
	}
}

// Jobs returns the names of all jobs, in order.
func (s *Server) Jobs() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.jobs))
}

// StatusOf returns the status of a job; false if there is no such job.
func (s *Server) StatusOf(name string) (dashboard.Status, bool) {
	j := s.find(name)
	if j == nil {
		return dashboard.Status{}, false
	}
	return j.status(), true
}

// find returns a job by its name, nil if there is none.
func (s *Server) find(name string) *job {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.jobs[name]
}

// JobOverview is the summary of a job.
type JobOverview struct {
	Job      string `json:"job"`
	QuorumID int64  `json:"quorum_id"` // of the latest quorum, 0 before the first
	Groups   int    `json:"groups"`    // in that quorum
	Healthy  int    `json:"healthy"`
	MaxStep  int64  `json:"max_step"`
}

// Overview summarizes all jobs, in the order of their names.
func (s *Server) Overview() []JobOverview {
	jobs := []JobOverview{}
	for _, name := range s.Jobs() {
		if j := s.find(name); j != nil {
			st := j.shown()
			jobs = append(jobs, JobOverview{name, st.QuorumID, len(st.Quorum), st.Healthy, st.MaxStep})
		}
	}
	return jobs
}

func (j *job) tick(now time.Time) {
	if j.feed(quorum.Tick{}) != nil {
		return
	}
	j.mu.Lock()
	var alive, served bool
	_ = j.safely(func() { alive, served = j.machine.InUse() }) // it has logged an error
	alive = alive || j.rendezvous.Nodes() > 0
	j.mu.Unlock()
	j.server.mu.Lock()
	defer j.server.mu.Unlock()
	if alive {
		j.since = now
	}
	j.served = j.served || served
}
