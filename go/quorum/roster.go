package quorum

import (
	"container/list"
	"slices"
	"time"
)

// replica is what the lighthouse knows about one replica_id. It is kept while the replica is alive, waits,
// or is a member of the previous quorum, and no longer.
type replica struct {
	id       string
	lastBeat time.Time
	pulse    *list.Element // its place in roster.pulses; nil once its heartbeat is too old

	requests []request // that wait, the newest last; several when a retry overtook what it replaces

	joined time.Time     // since when it is a candidate
	place  *list.Element // its place in roster.queue; nil while it is no candidate

	previous bool // member of the previous quorum
}

type request struct {
	waiter WaiterID
	member Member
}

func (r *replica) alive() bool     { return r.pulse != nil }
func (r *replica) waiting() bool   { return len(r.requests) > 0 }
func (r *replica) candidate() bool { return r.alive() && r.waiting() }

// member is what the newest request says. The replica must wait.
func (r *replica) member() *Member { return &r.requests[len(r.requests)-1].member }

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

// ask lets a waiter wait for its member. Waiters of one replica_id share one membership.
func (s *roster) ask(w WaiterID, m Member, now time.Time) {
	r := s.beat(m.ReplicaID, now)
	s.waiters[w] = r
	s.update(r, now, func() { r.requests = append(r.requests, request{w, m}) })
}

// giveUp forgets a waiter. Without any, its member is no candidate any more.
func (s *roster) giveUp(w WaiterID, now time.Time) {
	r := s.waiters[w]
	if r == nil {
		return // answered meanwhile
	}
	delete(s.waiters, w)
	s.update(r, now, func() {
		r.requests = slices.DeleteFunc(r.requests, func(q request) bool { return q.waiter == w })
	})
}

// answer ends the wait of a member, and adds those who waited to a list.
func (s *roster) answer(waiters []WaiterID, r *replica, now time.Time) []WaiterID {
	for _, q := range r.requests {
		delete(s.waiters, q.waiter)
		waiters = append(waiters, q.waiter)
	}
	s.update(r, now, func() { r.requests = nil })
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
	if r.member().ShrinkOnly {
		t.shrinkers += by
	}
}
