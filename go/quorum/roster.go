package quorum

import (
	"container/list"
	"time"
)

// replica is what the lighthouse knows about one replica_id. It is kept while the replica is alive, waits,
// or is a member of the previous quorum, and no longer.
type replica struct {
	id       string
	lastBeat time.Time
	pulse    *list.Element // its place in roster.pulses; nil once its heartbeat is too old

	waiters []WaiterID // more than one when a retry overtook the request it replaces
	member  Member     // as the newest request says

	joined time.Time     // since when it is a candidate
	place  *list.Element // its place in roster.queue; nil while it is no candidate

	previous bool // member of the previous quorum
}

func (r *replica) alive() bool     { return r.pulse != nil }
func (r *replica) waiting() bool   { return len(r.waiters) > 0 }
func (r *replica) candidate() bool { return r.alive() && r.waiting() }

// roster keeps the replicas and counts them. Every change goes through update, so the counts are right
// without ever being counted again.
type roster struct {
	timeout  time.Duration // of heartbeats
	replicas map[string]*replica
	waiters  map[WaiterID]*replica
	pulses   *list.List // of *replica that are alive, the oldest heartbeat first
	queue    *list.List // of *replica that are candidates, the first to join first
	counts   tally      // all but waited
}

func newRoster(heartbeatTimeout time.Duration) *roster {
	return &roster{
		timeout:  heartbeatTimeout,
		replicas: map[string]*replica{},
		waiters:  map[WaiterID]*replica{},
		pulses:   list.New(),
		queue:    list.New(),
	}
}

// tally is the input of a decision at a time.
func (s *roster) tally(now time.Time) tally {
	t := s.counts
	if first := s.queue.Front(); first != nil {
		t.waited = now.Sub(first.Value.(*replica).joined)
	}
	return t
}

// expire takes the heartbeats out that are too old. Each is looked at once, not once an event.
func (s *roster) expire(now time.Time) {
	for e := s.pulses.Front(); e != nil; e = s.pulses.Front() {
		r := e.Value.(*replica)
		if now.Sub(r.lastBeat) < s.timeout {
			return
		}
		s.update(r, now, func() {
			s.pulses.Remove(r.pulse)
			r.pulse = nil
		})
	}
}

// beat notes a sign of life.
func (s *roster) beat(id string, now time.Time) *replica {
	r := s.replicas[id]
	if r == nil {
		r = &replica{id: id}
		s.replicas[id] = r
	}
	r.lastBeat = now
	if r.alive() {
		s.pulses.MoveToBack(r.pulse)
		return r
	}
	s.update(r, now, func() { r.pulse = s.pulses.PushBack(r) })
	return r
}

// ask lets a waiter wait for its member. A second waiter of one replica_id shares its membership, and what
// the newer one says is what the others are told.
func (s *roster) ask(w WaiterID, m Member, now time.Time) {
	r := s.beat(m.ReplicaID, now)
	s.waiters[w] = r
	s.update(r, now, func() {
		r.member = m
		r.waiters = append(r.waiters, w)
	})
}

// giveUp forgets a waiter. Without any, its member is no candidate any more.
func (s *roster) giveUp(w WaiterID, now time.Time) {
	r := s.waiters[w]
	if r == nil {
		return // answered meanwhile
	}
	delete(s.waiters, w)
	s.update(r, now, func() {
		for i, other := range r.waiters {
			if other == w {
				r.waiters = append(r.waiters[:i:i], r.waiters[i+1:]...)
				break
			}
		}
	})
}

// answer ends the wait of a member and returns who waited.
func (s *roster) answer(r *replica, now time.Time) []WaiterID {
	waiters := r.waiters
	for _, w := range waiters {
		delete(s.waiters, w)
	}
	s.update(r, now, func() {
		r.waiters = nil
		r.member = Member{}
	})
	return waiters
}

// joinAgain restarts the clock of the candidates that were left out of a quorum.
func (s *roster) joinAgain(now time.Time) {
	for e := s.queue.Front(); e != nil; e = e.Next() {
		e.Value.(*replica).joined = now
	}
}

// setPrevious marks who is in the latest quorum.
func (s *roster) setPrevious(r *replica, previous bool, now time.Time) {
	s.update(r, now, func() { r.previous = previous })
}

// update changes one replica and keeps the counts, the queue and the map in step with it.
func (s *roster) update(r *replica, now time.Time, change func()) {
	was := r.candidate()
	s.count(r, -1)
	change()
	s.count(r, +1)

	switch is := r.candidate(); {
	case is && !was:
		r.joined = now
		r.place = s.queue.PushBack(r)
	case was && !is:
		s.queue.Remove(r.place)
		r.place = nil
	}
	if !r.alive() && !r.waiting() && !r.previous {
		delete(s.replicas, r.id)
	}
}

func (s *roster) count(r *replica, by int) {
	t := &s.counts
	if r.alive() {
		t.healthy += by
	}
	if r.previous {
		t.previous += by
	}
	if !r.candidate() {
		return
	}
	t.candidates += by
	if r.previous {
		t.previousCandidates += by
	}
	if r.member.ShrinkOnly {
		t.shrinkers += by
	}
}
