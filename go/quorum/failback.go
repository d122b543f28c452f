package quorum

import (
	"fmt"
	"math/bits"
)

// failback sends the members of a job that is served by a later lighthouse of their list back to an earlier one that they can reach
// again, all at the same moment. If each member decided for itself, the first ones would be too few to be served there, and the others
// would continue without them: the job would be split, and its parts would move back and forth.
//
// So each member reports which earlier lighthouses it can reach (Reaches), and the serving lighthouse decides: once all members
// that are alive here can reach the same one, all are sent there. If a single member cannot reach it, the job stays here.
//
// They are sent in the middle of a step. The earlier lighthouse learns of their quorum from their greetings, before any of them asks for
// the next one.
//
// Invariants:
//
//  1. All members that are alive here are sent in one event, or none is. If only some were sent, they might be too few for a quorum there.
//  2. Their bonds are released before they are notified (bond.go, invariant 2), and their requests here are refused: a vote must not
//     count at two lighthouses.
//  3. No member is sent while a member that left is still needed, or while this lighthouse is waiting for a later quorum to be shown
//     (Machine.Step checks both).
//  4. All members that were sent are dropped here, which reports no failure: their peers must not abort the step. When a member of the
//     latest quorum comes back, the others are presumed alive, and fail after heartbeat_timeout_ms unless they come back, too (cameBack).
type failback struct {
	*core
	past *memory
	list *succession
	away bool // all members were sent to another lighthouse, and none of the latest quorum has come back
}

// Places is a set of places of lighthouses in a list, with one bit for each.
type Places uint64

// PlacesOf returns the set of some places.
func PlacesOf(places ...int) (p Places) {
	for _, i := range places {
		p |= 1 << i
	}
	return p
}

// Has reports whether a place is in the set.
func (p Places) Has(i int) bool { return p>>i&1 == 1 }

// First returns the smallest place of a set, which must not be empty.
func (p Places) First() int { return bits.TrailingZeros64(uint64(p)) }

// Before returns the set of all places before the given one.
func Before(place int) Places { return 1<<place - 1 }

// reaches records which earlier lighthouses a member can reach. Later ones are ignored: failback never leads to one.
func (f *failback) reaches(id string, places Places) { f.roster.reach(id, places&f.before()) }

// before returns the set of the places before this lighthouse's, empty if the job has no list.
func (f *failback) before() Places {
	if !f.list.listed() {
		return 0
	}
	return Before(f.list.seat.Place)
}

// tick sends all members to an earlier lighthouse, if there is one that all can reach. A presumed member counts as alive and has
// reported nothing yet, so that no member is sent before it has connected or failed.
func (f *failback) tick() {
	s := f.roster
	if n := s.counts.reachEarlier; n == 0 || n < s.counts.healthy {
		return
	}
	common := f.before()
	for e := s.pulses.Front(); e != nil; e = e.Next() {
		if r := e.Value.(*record); r.alive() {
			common &= r.reaches
		}
	}
	if common == 0 { // no lighthouse is reached by all: members would be sent to different ones
		return
	}
	to := Seat{common.First(), f.list.seat.Of}
	reason := fmt.Sprintf("every member here (%s) reaches the lighthouse that is %s of the list, and fails back to it", memberCount(s.counts.healthy), to)
	f.do(FailBack{to.Place, reason})
	f.list.releaseAll(f.now)
	f.outdate(anyRequest, reason)
	for e := s.pulses.Front(); e != nil; e = s.pulses.Front() {
		s.drop(e.Value.(*record), f.now)
	}
	f.away = true
}

// cameBack handles the return of a member of the latest quorum, because the other lighthouse does not answer after all. The other
// members are presumed alive again. Those that do not come back within heartbeat_timeout_ms fail, and this lighthouse reports it:
// their peers may be waiting for them in a step, and no other lighthouse would report the failures.
func (f *failback) cameBack(known int64) {
	if !f.away || known == 0 || known != f.past.latestID() {
		return
	}
	f.away = false
	for _, r := range f.past.members {
		f.roster.presume(r.id, f.now)
	}
}
