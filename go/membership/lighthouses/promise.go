package lighthouses

import (
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/torchftpb"
)

// A member with a list of several lighthouses binds itself to the one that serves it. By answering a stamp of this lighthouse, the member
// promises to ask no other one for the time of a bond, unless this lighthouse releases the member or the lighthouse's process ends. If a
// bound member fails, the lighthouse relies on the promise: the member has voted nowhere else, so its vote counts there (quorum/bond.go).
// Therefore a message carries a stamp only after the promise was made.

// promise is the state of a member's bond, and of its leaving.
type promise struct {
	birth time.Time
	until atomic.Int64 // when the promise ends, in nanoseconds after birth
	left  atomic.Int64 // 1 plus the place of the lighthouse to which the group has announced that it leaves for good; 0: none
	ends  atomic.Bool  // Close was called: no lighthouse is asked any more

	finished atomic.Bool // the training is complete
}

// bind promises to ask no other lighthouse for the time of a bond from now. It lasts longer if the host is
// suspended meanwhile: the member only asks the others later.
func (p *promise) bind(bond time.Duration) { p.until.Store(int64(time.Since(p.birth) + bond)) }

// bound reports whether a promise holds.
func (p *promise) bound() bool { return int64(time.Since(p.birth)) < p.until.Load() }

// boundUntil returns when the promise ends, or ended.
func (p *promise) boundUntil() time.Time { return p.birth.Add(time.Duration(p.until.Load())) }

// unbind ends the promise. The caller has made sure that no earlier stamp is answered after it: the answer would bind the member again.
func (p *promise) unbind() { p.until.Store(0) }

// leaves records the lighthouse to which the group announces that it leaves for good. Its vote counts there from then on. So the
// group sends no other lighthouse the announcement or a request for a quorum: the vote would count twice.
func (p *promise) leaves(place int) { p.left.CompareAndSwap(0, int64(place)+1) }

func (p *promise) leftElsewhere(place int) bool {
	left := p.left.Load()
	return left != 0 && left != int64(place)+1
}

var errLeft = status.Error(codes.FailedPrecondition, "the group has announced to another lighthouse of the list that it leaves")

// stamped handles a stamp of the lighthouse: it binds the member. The first stamp of a stream is answered at once, later ones with
// the next message.
func (s *memberStream) stamped(number uint64) {
	if number == 0 || s.bond <= 0 || s.unbound || s.member.leftElsewhere(s.place) {
		return
	}
	s.member.bind(s.bond)
	if s.stamp.Swap(number) == 0 {
		s.post(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Alive{Alive: true}})
	}
}

// unbind ends the promise, and ignores later stamps of this stream. Only receive calls it.
func (s *memberStream) unbind() {
	s.unbound = true
	s.member.unbind()
}

// waits reports whether the request with this number is pending.
func (s *memberStream) waits(number uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waiting[number] != nil
}
