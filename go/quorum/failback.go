package quorum

import (
	"fmt"
	"math/bits"
)

// failback sends the members of a job that is served by a later lighthouse of their list back to an earlier one when they reach it
// again, all at the same moment. If each went at a time of its own, the first would be too few to be served there, the others would go
// on without them, and so the members would move to and fro in parts.
//
// So each member says which earlier lighthouses it reaches, and the lighthouse that serves decides: once all members that are alive
// here reach one of them, all are sent there. One member that does not reach it keeps the job here.
//
// They go at once, in the middle of a step. The other lighthouse learns of their quorum from their greetings, before any of them asks
// for the next one.
//
// Invariants:
//
//  1. All that are alive here are sent in one event, or none is. A part of them might be too few at the other lighthouse.
//  2. Their bonds are released before they are notified (bond.go, invariant 2), and what they asked here is refused: a vote that stays
//     here is none at the other lighthouse.
//  3. Nobody is sent while a member that left is still needed, or while this lighthouse is about to learn of a later quorum
//     (Machine.Step asks both subjects).
//  4. All that were sent count as failed here without a word to the others (drop). When one of the latest quorum comes back, the others
//     have the time to come, and those that do not have failed (cameBack).
type failback struct {
	*core
	past *memory
	list *succession
	away bool // all were sent to another lighthouse, and none of the latest quorum has come back
}

// Places are places of lighthouses in a list, a bit each.
type Places uint64

// PlacesOf is the set of some places.
func PlacesOf(places ...int) (p Places) {
	for _, i := range places {
		p |= 1 << i
	}
	return p
}

// Has reports whether a place is in it.
func (p Places) Has(i int) bool { return p>>i&1 == 1 }

// First is the smallest place. There must be one.
func (p Places) First() int { return bits.TrailingZeros64(uint64(p)) }

// Before are all places before one.
func Before(place int) Places { return 1<<place - 1 }

// reaches notes which lighthouses a member reaches. Only earlier ones count: failback goes by it, and leads to no later one.
func (f *failback) reaches(id string, places Places) { f.roster.reach(id, places&f.before()) }

// before are the places of the lighthouses that come before this one.
func (f *failback) before() Places {
	if !f.list.listed() {
		return 0
	}
	return Before(f.list.seat.Place)
}

// tick sends everybody to an earlier lighthouse that all reach. A presumed member counts as alive, and has not said what it reaches:
// so nobody is sent before it has come, or has failed.
func (f *failback) tick() {
	s := f.roster
	if n := s.counts.reachEarlier; n == 0 || n < s.counts.healthy {
		return
	}
	common := f.before()
	for e := s.pulses.Front(); e != nil; e = e.Next() {
		if r := e.Value.(*replica); r.alive() {
			common &= r.reaches
		}
	}
	if common == 0 { // each reaches another one, where it would be without the rest
		return
	}
	to := Seat{common.First(), f.list.seat.Of}
	reason := fmt.Sprintf("everybody here (%s) reaches the lighthouse that is %s of the list, and fails back to it", replicas(s.counts.healthy), to)
	f.do(FailBack{to.Place, reason})
	f.list.releaseAll(f.now)
	f.outdate(anyRequest, reason)
	for e := s.pulses.Front(); e != nil; e = s.pulses.Front() {
		s.drop(e.Value.(*replica), f.now)
	}
	f.away = true
}

// cameBack notes that a member of the latest quorum is here again, because the other lighthouse does not answer after all. The
// others have the time to come, too. Those that do not have failed: their peers may be in a step with them, and nobody else
// reports it to them.
func (f *failback) cameBack(known int64) {
	if !f.away || known == 0 || known != f.past.latestID() {
		return
	}
	f.away = false
	for _, r := range f.past.members {
		f.roster.presume(r.id, f.now)
	}
}
