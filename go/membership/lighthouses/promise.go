package lighthouses

import (
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/torchftpb"
)

// A member of several lighthouses binds itself to the one that serves it: it answers the stamps of that one, and asks no
// other before the time is over that the newest of them binds it, unless it was let go, or the process of that lighthouse has
// ended. The lighthouse relies on it when the member ends (quorum/bond.go). So whatever is sent with a stamp is sent after
// the promise was made.

// promise is what a member has promised.
type promise struct {
	birth time.Time
	until atomic.Int64 // since birth, until when it asks no other lighthouse
	left  atomic.Int64 // place, from 1, of the lighthouse that was told that the group leaves for good; 0: none
	ends  atomic.Bool  // the group asks nobody any more

	finished atomic.Bool // its training has ended on purpose
}

// bind makes a promise.
func (p *promise) bind(bond time.Duration) { p.until.Store(int64(time.Since(p.birth) + bond)) }

// bound reports whether one holds.
func (p *promise) bound() bool { return int64(time.Since(p.birth)) < p.until.Load() }

// boundUntil is when the promise ends. It may be over.
func (p *promise) boundUntil() time.Time { return p.birth.Add(time.Duration(p.until.Load())) }

// letGo ends it. Whoever calls it has seen to it that no stamp is answered any more that was sent before.
func (p *promise) letGo() { p.until.Store(0) }

// leaves notes at which lighthouse the group says that it leaves for good. Its vote is there, and must be nowhere else.
func (p *promise) leaves(place int) { p.left.CompareAndSwap(0, int64(place)+1) }

func (p *promise) leftElsewhere(place int) bool {
	left := p.left.Load()
	return left != 0 && left != int64(place)+1
}

var errLeft = status.Error(codes.FailedPrecondition, "the group has told another lighthouse of the list that it leaves")

// stamped promises what a stamp asks for, and answers the first one at once: others go with what is said anyway.
func (s *memberStream) stamped(number uint64) {
	if number == 0 || s.bond <= 0 || s.let || s.member.leftElsewhere(s.place) {
		return
	}
	s.member.bind(s.bond)
	if s.stamp.Swap(number) == 0 {
		go s.send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Alive{Alive: true}})
	}
}

// letGo: no stamp binds the member any more, not on this stream. Only receive calls it.
func (s *memberStream) letGo() {
	s.let = true
	s.member.letGo()
}

// waits reports whether an ask has not been answered.
func (s *memberStream) waits(number uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waiting[number] != nil
}
