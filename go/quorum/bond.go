package quorum

import (
	"fmt"
	"time"
)

// A member binds itself to the lighthouse that serves it. The lighthouse sends stamps on the member's stream, and what the
// member says next answers the newest: it asks no other lighthouse before BondTime has passed since it received the stamp, on
// its own clock, or the lighthouse has let it go. The stamp was sent before it was received. So a lighthouse that learns, less
// than BondTime after it sent a stamp that was answered, that the member's process has ended, knows that the member asked
// nobody else since its stream began, and never will: its vote is given here.
//
// Invariants:
//
//  1. What was learned is never used for a bond that has run out, by the monotonic clock or by the wall clock: one of them
//     may stand still while a host sleeps. (Where both do, as in a virtual machine that is stopped and goes on, nothing helps.)
//  2. A lighthouse that lets a member go has forgotten the bond before: it may have left by the time that it is gone. A stamp
//     from before that binds nobody.
//  3. A member binds itself only with all that it knows: while it knows of a quorum that the lighthouse does not, its end is
//     no vote.
//  4. Bonds are not kept on disk: a lighthouse that starts has none. (So whoever finds that the process of its lighthouse is
//     gone may leave at once.)

// BondTime is for how long a member that answered a stamp asks no other lighthouse. A member whose lighthouse is away goes to
// the next one after that much at the latest; the end of a process is learned in milliseconds.
const BondTime = 5 * time.Second

// bondHolds is how much of it counts here: the clocks of two hosts do not run equally fast.
const bondHolds = BondTime - BondTime/10

// bonds are those of a lighthouse.
type bonds struct {
	bound map[string]bond
	ended map[string]struct{} // voters that ended, or left for good, while they were bound
	swept time.Time
}

type bond struct {
	stamp time.Time // when the newest one was sent that was answered; zero: none was
	let   time.Time // when the member was let go last
	known int64     // quorum_id that its greeting showed
}

// greets notes what a member knows that begins a stream. If it comes from another lighthouse, what it promised before is
// void.
func (b *bonds) greets(id string, known int64, fromElsewhere bool, now time.Time) {
	if fromElsewhere {
		b.release(id, now)
	}
	one := b.bound[id]
	one.known = known
	b.set(id, one)
}

// answered notes which stamp a member answered last.
func (b *bonds) answered(id string, stamp time.Time) {
	one, greeted := b.bound[id]
	if !greeted || !stamp.After(one.stamp) || !stamp.After(one.let) {
		return
	}
	one.stamp = stamp
	b.set(id, one)
}

// release lets a member go. What tells it so must not be sent before.
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

// promised reports whether a member answered a stamp, and knows no quorum after the latest one here. Of one that says that
// it leaves, or ends, for good, that is enough.
func (b *bonds) promised(id string, latest int64) bool {
	one := b.bound[id]
	return !one.stamp.IsZero() && one.known <= latest
}

// holds reports whether a member asks nobody else now.
func (b *bonds) holds(id string, latest int64, now time.Time) bool {
	return b.promised(id, latest) && elapsed(b.bound[id].stamp, now) < bondHolds
}

// elapsed is the larger of what the monotonic clock and the wall clock say.
func elapsed(then, now time.Time) time.Duration {
	return max(now.Sub(then), now.Round(0).Sub(then.Round(0)))
}

// end notes that a member has ended, or left for good, bound to this lighthouse. The bond is used up: a second word of that end, when
// the vote has been spent, is none.
func (b *bonds) end(id string) {
	delete(b.bound, id)
	if b.ended == nil {
		b.ended = map[string]struct{}{}
	}
	b.ended[id] = struct{}{}
}

// sweep forgets members of which nothing was heard for long.
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

// streamless says why a call is refused of a member whose lighthouse is one of a list; empty if it is not. A call tells it no
// term: what it asked here may wait when it goes to another lighthouse, and that one would not know that its quorums come
// later. Also one that greeted before makes no calls: the term may be another one since.
//
// Our members make calls where something between them and the lighthouse answers UNIMPLEMENTED to streams. They say how many
// lighthouses they know: with none that greets, this one could not know that there are others. A list of one, where others
// have more, is no safer by what it says. Upstream members say nothing, and are let in: they ask one lighthouse only.
func (m *Machine) streamless(e Asked) string {
	var list string
	switch {
	case e.Tells:
		return ""
	case e.Lighthouses > 1:
		list = fmt.Sprintf("its list has %d lighthouses", e.Lighthouses)
	case m.list.listed() && e.KnownQuorumID > 0:
		list = fmt.Sprintf("this lighthouse is %s for other groups", m.list.seat)
	default:
		return ""
	}
	return fmt.Sprintf("replica %s makes calls in place of a stream, and %s: two lighthouses might serve the job at once. "+
		"Let streams (torchft.MemberService/Attend) through to every lighthouse, or give all groups one lighthouse in TORCHFT_LIGHTHOUSE",
		e.Member.ReplicaID, list)
}
