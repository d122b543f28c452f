package lighthouse

import (
	"time"

	"github.com/torchft/torchft/go/quorum"
)

// In a job with a list of lighthouses, the lighthouse sends stamps to a member, and the member answers the newest one with its next
// message. With the answer it binds itself to this lighthouse for a while (quorum/bond.go).

// mostStamps bounds the unanswered stamps of a stream.
const mostStamps = 8

// stamps are the stamps of a stream. The job's lock guards them.
type stamps struct {
	interval time.Duration // the longest time between two messages of the member
	number   uint64        // of the newest stamp
	sent     [mostStamps]time.Time
	answered uint64 // number of the newest stamp that was answered
}

// next returns the number of a new stamp. The recorded time must not be later than the time at which the stamp is sent
// (quorum/bond.go).
func (s *stamps) next(now time.Time) uint64 {
	s.number++
	s.sent[s.number%mostStamps] = now
	return s.number
}

// answer records which stamp was answered, and returns when it was sent. It returns false if that stamp or a later one had been
// answered before, or if its time is no longer known.
func (s *stamps) answer(number uint64) (sent time.Time, news bool) {
	if number <= s.answered || number > s.number || number+mostStamps <= s.number {
		return time.Time{}, false
	}
	s.answered = number
	return s.sent[number%mostStamps], true
}

// due reports whether another stamp is due.
func (s *stamps) due(now time.Time) bool {
	return s.number > 0 && now.Sub(s.sent[s.number%mostStamps]) >= s.interval/2
}

// answered handles the stamp that a message of a member answers, and sends the next one if it is due.
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
