package lighthouse

import (
	"sync"
	"time"

	"github.com/torchft/torchft/go/quorum"
)

const (
	// snapshotOfMember is for how long, for each member, a status is shown to all who look: to take one costs some 2 µs of the
	// job's lock for each, so any number of pages and scripts takes 2 % of it. Of a small job everybody sees what just happened.
	snapshotOfMember = 100 * time.Microsecond
	// longestSnapshot is reached with 10,000 members.
	longestSnapshot = time.Second
)

// snapshot is the status that was shown last. Nobody may change it.
type snapshot struct {
	mu     sync.Mutex // also held while a new one is taken: all who come meanwhile get that one
	status quorum.Status
	until  time.Time
}

// shown is a status that is fresh enough to look at. Those who act on it call status.
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
