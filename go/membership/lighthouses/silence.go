package lighthouses

import (
	"sync/atomic"
	"time"

	"github.com/torchft/torchft/go/internal/clock"
)

// silence measures how long a member has sent nothing, on any stream. The time in which its host was suspended counts, since it counts
// at the lighthouse. A new stream does not reset the silence until a message is sent on it: the lighthouse may have counted the member
// as failed meanwhile, and the other groups may have continued without it. A member that sends into a cut connection, or has greeted
// another lighthouse, is not fenced: a stricter fence would cost all groups a step in each failover within a long step.
type silence struct {
	since  time.Time    // of clock.Now
	spoke  atomic.Int64 // when the last message was sent, in nanoseconds after since
	most   atomic.Int64 // the silence after which the lighthouse may count the member as failed; 0: unknown, or there is no stream
	fenced atomic.Bool  // the silence was longer than most, and the member has received no quorum since
}

// alivesInTimeout is the lighthouse's heartbeat timeout divided by the interval between heartbeats that it asks for.
const alivesInTimeout = 3

// expectMessages records the longest interval between messages that the lighthouse asks for; 0: it asks for none.
func (s *silence) expectMessages(interval time.Duration) {
	s.most.Store(int64(interval * (2*alivesInTimeout - 1) / 2)) // the timeout less half an interval, which allows for a message's delay
}

// silent returns the time since the last message.
func (s *silence) silent() time.Duration {
	return clock.Now().Sub(s.since) - time.Duration(s.spoke.Load())
}

// noteSilence fences the member if the silence is too long. It returns the time since s.since.
func (s *silence) noteSilence() (now time.Duration) {
	now = clock.Now().Sub(s.since)
	if most := s.most.Load(); most > 0 && int64(now)-s.spoke.Load() > most {
		s.fenced.Store(true)
	}
	return now
}

// speaks records the time of a message that is sent now.
func (s *silence) speaks() {
	s.spoke.Store(int64(s.noteSilence()))
}
