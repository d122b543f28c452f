package manager

import (
	"sync"
)

// Failure is the end of a member of a quorum, as the lighthouse tells it before anybody runs into it.
type Failure struct {
	QuorumID  int64
	ReplicaID string
	Reason    string
}

// FailureSource is a Membership that learns of failures.
type FailureSource interface {
	// Failures has a value for each; it is closed with the membership.
	Failures() <-chan Failure
}

// failures hands each failure to all who listen.
type failures struct {
	mu        sync.Mutex
	listeners map[chan Failure]struct{}
}

// backlog is how many failures a listener may lag behind. One that lags further loses some: it is stuck, and each of its
// collectives ends with a timeout as before.
const backlog = 64

func (f *failures) listen() (heard <-chan Failure, stop func()) {
	c := make(chan Failure, backlog)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.listeners == nil {
		f.listeners = map[chan Failure]struct{}{}
	}
	f.listeners[c] = struct{}{}
	return c, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.listeners, c)
	}
}

func (f *failures) tell(failure Failure) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.listeners {
		select {
		case c <- failure:
		default:
		}
	}
}

// hearFailures tells the ranks what the membership learns.
func (s *Server) hearFailures(source FailureSource) {
	for {
		select {
		case failure, open := <-source.Failures():
			if !open {
				return
			}
			s.log.Info("torchft: a member failed", "quorum_id", failure.QuorumID, "member", failure.ReplicaID, "reason", failure.Reason)
			s.failures.tell(failure)
		case <-s.ctx.Done():
			return
		}
	}
}
