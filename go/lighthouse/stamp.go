package lighthouse

import (
	"time"

	"github.com/torchft/torchft/go/quorum"
)

// Where there are several lighthouses, a member is sent stamps, and answers the newest with whatever it says next: it binds
// itself to this lighthouse for a while (quorum/bond.go).

// mostStamps are on their way on one stream.
const mostStamps = 8

// stamps are those of a stream. The job's lock guards them.
type stamps struct {
	interval time.Duration // in which the member says something
	number   uint64        // of the newest
	sent     [mostStamps]time.Time
	answered uint64 // the newest that was
}

// next makes a stamp. It must not be sent before.
func (s *stamps) next(now time.Time) uint64 {
	s.number++
	s.sent[s.number%mostStamps] = now
	return s.number
}

// answer notes which stamp came back, and returns when it was sent; false if that is no news, or not known any more.
func (s *stamps) answer(number uint64) (sent time.Time, news bool) {
	if number <= s.answered || number > s.number || number+mostStamps <= s.number {
		return time.Time{}, false
	}
	s.answered = number
	return s.sent[number%mostStamps], true
}

// due reports whether it is time for another one.
func (s *stamps) due(now time.Time) bool {
	return s.number > 0 && now.Sub(s.sent[s.number%mostStamps]) >= s.interval/2
}

// answered takes the stamp that a member answers with what it said, and sends the next one.
func (s *stream) answered(number uint64) error {
	job := s.job
	job.mu.Lock()
	defer job.mu.Unlock()
	if s.stale || job.closed {
		return nil
	}
	now := time.Now()
	if s.stamps.due(now) {
		s.post(outgoing{stamp: s.stamps.next(now)})
	}
	if sent, news := s.stamps.answer(number); news {
		return job.step(quorum.Bound{ReplicaID: s.replicaID, Since: sent})
	}
	return nil
}
