package membership

import "sync"

// Notice is a report of the lighthouse to the members, which saves them from waiting for a timeout.
type Notice struct {
	Kind      NoticeKind
	QuorumID  int64  // this field and the following ones are empty for ProgressAsked
	ReplicaID string // the member it is about; empty for Regressed
	Reason    string
	// of RoundKnown, and of MemberFailed: the member has done its part of the steps before this one
	Step int64
}

// NoticeKind is the kind of a Notice.
type NoticeKind int

const (
	MemberFailed  NoticeKind = iota // a member of the quorum has failed
	Stalled                         // a member of the quorum makes no progress while the others wait for it
	ProgressAsked                   // each rank is asked for its progress
	Regressed                       // the quorum is below the step that the job had reached
	// this group is asked to leave; its ranks learn that from their next quorum
	Drained
	// the quorum after this one is called: the group tells where it stops (MemberMessage.stopped)
	Called
	RoundKnown // the first step that needs another quorum
)

// Broadcast sends each notice to all listeners.
type Broadcast struct {
	mu        sync.Mutex
	listeners map[chan Notice]struct{}
}

// backlog is how many notices are queued for a listener. If a listener is stuck, further notices are dropped
// for it: its collectives then end by their timeouts.
const backlog = 64

// Listen returns a channel of all notices from now on, and a function that ends the subscription.
func (b *Broadcast) Listen() (notices <-chan Notice, stop func()) {
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

// Notify sends a notice to each listener. It does not block.
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
