package lighthouse

import (
	"sync"
	"time"

	"github.com/torchft/torchft/go/dashboard"
)

const (
	// sharedPerMember, multiplied by the number of members, is how long one status is used for all requests.
	// Making a status holds the job's lock for about 2 µs per member. So any number of pages and scripts
	// takes at most 2 % of the lock's time.
	sharedPerMember = 100 * time.Microsecond
	// longestShared bounds that time. With 10,000 members it is reached.
	longestShared = time.Second
)

// shared is the status that requests share. The status is read-only.
type shared struct {
	mu     sync.Mutex // also held while a new status is made, so that concurrent requests share it
	status dashboard.Status
	until  time.Time
}

// shown returns a status that is recent enough to display. Code that makes decisions calls status instead.
func (j *job) shown() dashboard.Status {
	s := &j.shared
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := time.Now(); !now.Before(s.until) {
		s.status = j.status()
		s.until = now.Add(min(longestShared, time.Duration(len(s.status.Members))*sharedPerMember))
	}
	return s.status
}
