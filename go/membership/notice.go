package membership

import "sync"

// Notice is a report of the lighthouse to all members, which saves them a timeout.
type Notice struct {
	Kind      NoticeKind
	QuorumID  int64  // these are empty for ProgressAsked
	ReplicaID string // the member it is about
	Reason    string
	Elsewhere bool // another lighthouse than the one that formed the quorum reports it
}

// NoticeKind says what a Notice is about.
type NoticeKind int

const (
	MemberFailed  NoticeKind = iota // a member of the quorum has failed
	Stalled                         // a member of the quorum makes no progress while the others wait for it
	ProgressAsked                   // each rank is asked what it does
	Drained                         // this group is asked to leave; ranks learn it from their next quorum, and not by this
)

// Broadcast hands each notice to all listeners.
type Broadcast struct {
	mu        sync.Mutex
	listeners map[chan Notice]struct{}
}

// backlog is how many notices a listener may lag behind. One that lags further loses some: it is stuck, and each of its
// collectives ends with a timeout as before.
const backlog = 64

// Listen begins to hear notices. stop ends it.
func (b *Broadcast) Listen() (heard <-chan Notice, stop func()) {
	c := make(chan Notice, backlog)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.listeners == nil {
		b.listeners = map[chan Notice]struct{}{}
	}
	b.listeners[c] = struct{}{}
	return c, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.listeners, c)
	}
}

// Notify gives a notice to each listener. It does not block.
func (b *Broadcast) Notify(notice Notice) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.listeners {
		select {
		case c <- notice:
		default:
		}
	}
}
