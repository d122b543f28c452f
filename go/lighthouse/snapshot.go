package lighthouse

import (
	"sync"
	"time"

	"github.com/torchft/torchft/go/quorum"
)

const (
	// snapshotOfMember, times the number of members, is for how long one status answers all requests. A status takes the job's lock
	// for about 2 µs a member, so any number of pages and scripts takes at most 2 % of its time. In a small job it is always recent.
	snapshotOfMember = 100 * time.Microsecond
	// longestSnapshot bounds it; 10,000 members reach it.
	longestSnapshot = time.Second
)

// snapshot is the status that requests share. It is read-only.
type snapshot struct {
	mu     sync.Mutex // held also while a new status is taken, so that concurrent requests share it
	status quorum.Status
	until  time.Time
}

// shown is a status that is recent enough to display. Code that decides by it calls status instead.
func (j *job) shown() quorum.Status {
	s := &j.snapshot
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := time.Now(); !now.Before(s.until) {
		s.status = j.status()
		s.until = now.Add(min(longestSnapshot, time.Duration(len(s.status.Members))*snapshotOfMember))
	}
	return s.status
}
