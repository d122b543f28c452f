package quorum

import (
	"fmt"
	"time"
)

// A member binds itself to the lighthouse that serves it: it asks no other one for a limited time. The lighthouse sends stamps on
// the member's stream, and the member's next message answers the newest one. For BondTime after it received the stamp, by its own
// clock, the member asks no other lighthouse, unless the lighthouse releases it earlier. The stamp was sent before it was received.
// So if a lighthouse learns, less than BondTime after it sent a stamp that was answered, that the member's process has ended, then
// the member has asked no other lighthouse since its stream began, and never will: its vote is given here.
//
// Invariants:
//
//  1. The end of a process is no vote once its bond has run out, by the monotonic clock or by the wall clock: one of them may
//     stand still while a host sleeps. (If both do, as in a virtual machine that is stopped and continued, the bond may be
//     taken for valid while the member is at another lighthouse; docs/correctness.md assumes that this does not happen.)
//  2. A lighthouse forgets the bond before it sends a member away: the member may ask another lighthouse at once. A stamp that
//     was sent before the release does not bind it again.
//  3. While a member knows a quorum that the lighthouse does not know, its end is no vote: the lighthouse would form a quorum that
//     does not come after it.
//  4. Bonds are not kept on disk: a lighthouse that starts has none. (So a member that learns of the end of its lighthouse's
//     process may leave at once.)

// BondTime is how long a member that answered a stamp asks no other lighthouse. It is also the longest delay of a failover to the
// next lighthouse, which must stay below 3 s when a host vanishes.
//
// A shorter bond breaks none of the invariants; it only leaves less time to learn of an end. The stamp that a process answered last
// is up to half of the bond old when the process ends (two and a half intervals between its messages, since the lighthouse sends no
// second stamp soon after another), and the lighthouse counts on nine tenths of the bond (bondHolds). So 1.08 s are left for the
// lighthouse to learn of the end, which takes milliseconds unless it is starved, or more hosts are silent at once than it probes at
// once (maxProbes, a second each). An end that is learned later is no vote, and the remaining members may have to wait.
const BondTime = 2700 * time.Millisecond

// StampsInBond is how often a bound member sends a message within BondTime.
const StampsInBond = 5

// bondHolds is how long the lighthouse counts on a bond: less than BondTime, since the clocks of two hosts differ in speed.
const bondHolds = BondTime - BondTime/10

// bonds records which members are bound to this lighthouse.
type bonds struct {
	bound map[string]bond
	ended map[string]struct{} // voters that ended, or left for good, while they were bound
	swept time.Time
}

type bond struct {
	stamp time.Time // when the newest answered stamp was sent; zero: none was answered
	let   time.Time // when the member was released last
	known int64     // quorum_id that its greeting showed
}

// greets records the quorum that a member knows when it begins a stream. If it comes from another lighthouse, an earlier bond to
// this one has ended.
func (b *bonds) greets(id string, known int64, fromElsewhere bool, now time.Time) {
	if fromElsewhere {
		b.release(id, now)
	}
	one := b.bound[id]
	one.known = known
	b.set(id, one)
}

// answered records the newest stamp that a member answered. A stamp that was sent before a release is ignored: its answer may have
// been delayed, and the member may be bound to another lighthouse by now.
func (b *bonds) answered(id string, stamp time.Time) {
	one, greeted := b.bound[id]
	if !greeted || !stamp.After(one.stamp) || !stamp.After(one.let) {
		return
	}
	one.stamp = stamp
	b.set(id, one)
}

// release ends a member's bond. It must come before the message that sends the member away: otherwise a vote could count here while
// the member asks elsewhere.
func (b *bonds) release(id string, now time.Time) {
	if one, bound := b.bound[id]; bound {
		one.stamp, one.let = time.Time{}, now
		b.bound[id] = one
	}
}

func (b *bonds) releaseAll(now time.Time) {
	for id := range b.bound {
		b.release(id, now)
	}
}

// promised reports whether a member answered a stamp, and knows no quorum after the latest one here. If such a member reports that
// it leaves or ends for good, that is a vote at any time: it has not asked elsewhere, and never will.
func (b *bonds) promised(id string, latest int64) bool {
	one := b.bound[id]
	return !one.stamp.IsZero() && one.known <= latest
}

// holds reports whether a member is bound now, so that it asks no other lighthouse.
func (b *bonds) holds(id string, latest int64, now time.Time) bool {
	return b.promised(id, latest) && elapsed(b.bound[id].stamp, now) < bondHolds
}

// elapsed returns the time since then by the monotonic clock or by the wall clock, whichever is longer.
func elapsed(then, now time.Time) time.Duration {
	return max(now.Sub(then), now.Round(0).Sub(then.Round(0)))
}

// end records that a member has ended, or left for good, while it was bound to this lighthouse. The bond is deleted, so that a
// second report of the same end, after the vote was spent, does not give the vote again.
func (b *bonds) end(id string) {
	delete(b.bound, id)
	if b.ended == nil {
		b.ended = map[string]struct{}{}
	}
	b.ended[id] = struct{}{}
}

// sweep forgets the bonds of members that are not here, once they have run out.
func (b *bonds) sweep(now time.Time, here func(id string) bool) {
	if now.Sub(b.swept) < BondTime {
		return
	}
	b.swept = now
	for id, one := range b.bound {
		if !here(id) && elapsed(one.stamp, now) > BondTime && elapsed(one.let, now) > BondTime {
			delete(b.bound, id)
		}
	}
}

func (b *bonds) set(id string, one bond) {
	if b.bound == nil {
		b.bound = map[string]bond{}
	}
	b.bound[id] = one
}

// streamless returns the reason to refuse a call of a member that has a list of lighthouses; empty if the call is accepted. The
// answer to a call carries no term. So a request that waits here could still be answered after the member went to another
// lighthouse, and the other lighthouse would not know that its quorums must have higher ids than this answer. At a lighthouse of a
// list, a call of any member that knows a quorum is refused: the term may have changed since.
//
// Our members make calls if something between them and the lighthouse answers UNIMPLEMENTED to streams. Such a call contains the
// length of the member's list: since there is no greeting, this lighthouse could not know otherwise that there are others. This
// does not help if a member has a list of one lighthouse while others have more; all groups of a job must have the same list.
// Upstream members do not send the number, and are accepted: they ask one lighthouse only.
func (s *succession) streamless(e Asked) string {
	var list string
	switch {
	case e.Recallable:
		return ""
	case e.Lighthouses > 1:
		list = fmt.Sprintf("its list has %d lighthouses", e.Lighthouses)
	case s.listed() && e.KnownQuorumID > 0:
		list = fmt.Sprintf("this lighthouse is %s for other groups", s.seat)
	default:
		return ""
	}
	return fmt.Sprintf("member %s makes calls in place of a stream, and %s: two lighthouses might serve the job at once. "+
		"Let streams (torchft.MemberService/Attend) through to every lighthouse, or give all groups one lighthouse in TORCHFT_LIGHTHOUSE",
		e.Member.ReplicaID, list)
}
