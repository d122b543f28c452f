package lighthouses

import (
	"sync/atomic"
	"time"

	"github.com/torchft/torchft/go/internal/clock"
)

// silence measures how long a member has sent nothing, on any stream. The time in which its host was suspended counts, since it counts
// at the lighthouse. A new stream does not reset the silence until a message is sent on it: the lighthouse may have counted the member
// as failed meanwhile, and the other groups may have continued without it. A member that sends into a cut connection, or has greeted
// another lighthouse, is not fenced: a stricter fence would cost all groups a step whenever another lighthouse leads within a long step.
type silence struct {
	since  time.Time    // of clock.Now
	spoke  atomic.Int64 // when the last message was sent, in nanoseconds after since
	most   atomic.Int64 // the silence after which the lighthouse may count the member as failed; 0: unknown, or there is no stream
	fenced atomic.Bool  // the silence was longer than most, and the member has received no quorum since
}

// expectMessages records the silence after which the lighthouse counts the member as failed, and the longest interval between messages
// that it asks for; 0: it has told neither.
func (s *silence) expectMessages(timeout, interval time.Duration) {
	s.most.Store(int64(timeout - interval/2)) // half an interval allows for a message's delay
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

// mostUnanswered is how many heartbeats in a row one of several lighthouses may leave unanswered.
const mostUnanswered = 3

// hearing counts the intervals in which a lighthouse has sent nothing. It counts intervals, and does not look at a clock: after a pause of
// this process or of its host, one interval has passed, and messages that arrived meanwhile are read in the next one.
type hearing struct {
	heard int64 // number of messages at the last tick
	mute  int   // intervals since the last message
}

// tick ends an interval; heard is the number of messages so far. It reports whether the lighthouse counts as silent.
func (h *hearing) tick(heard int64) (silent bool) {
	if h.mute++; heard != h.heard {
		h.heard, h.mute = heard, 0
	}
	return h.mute >= mostUnanswered
}
