package lighthouses

import (
	"sync/atomic"
	"time"
)

// silence is how long a member has said nothing, on whatever stream. A new stream alone does not end it before something
// is said there: the lighthouse may have taken the member for failed meanwhile, and the others may have gone on.
type silence struct {
	since  time.Time
	spoke  atomic.Int64 // when something was said last, in nanoseconds after since
	most   atomic.Int64 // for how long a lighthouse bears with it; 0: it is not known, or calls are made in place of a stream
	fenced atomic.Bool  // it was longer, and the member has been in no quorum since
}

// alivesInTimeout is how many of the intervals that a lighthouse asks for make up its heartbeat timeout.
const alivesInTimeout = 3

// heardEvery notes in which interval the lighthouse wants to hear something, 0 if it does not say.
func (s *silence) heardEvery(interval time.Duration) {
	s.most.Store(int64(interval * (2*alivesInTimeout - 1) / 2)) // about as long as it bears with
}

// silent is how long it has lasted.
func (s *silence) silent() time.Duration { return time.Since(s.since) - time.Duration(s.spoke.Load()) }

// noteSilence notes if that is too long.
func (s *silence) noteSilence() {
	if most := s.most.Load(); most > 0 && s.silent() > time.Duration(most) {
		s.fenced.Store(true)
	}
}

// speaks notes that something is said now.
func (s *silence) speaks() {
	s.noteSilence()
	s.spoke.Store(int64(time.Since(s.since)))
}
