package manager

import (
	"sync"
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/round"
)

// Notice is what the lighthouse tells all members, before anybody runs into it.
type Notice struct {
	Kind      NoticeKind
	QuorumID  int64  // these are empty for ProgressAsked
	ReplicaID string // whom it is about
	Reason    string
}

// NoticeKind says what a Notice is about.
type NoticeKind int

const (
	MemberFailed  NoticeKind = iota // a member of the quorum has failed
	Stalled                         // a member of the quorum makes no progress while the others wait for it
	ProgressAsked                   // whoever hears it says what it does
	Drained                         // somebody wants this group to leave; ranks are told in their next quorum, and not by this
)

// NoticeSource is a Membership that learns of notices.
type NoticeSource interface {
	// Notices has a value for each; it is closed with the membership.
	Notices() <-chan Notice
}

// Witness is a Membership that wants to hear what its group notices. Its calls do not wait.
type Witness interface {
	// Suspect tells that a collective failed, and which member is suspected, empty if that is not known.
	Suspect(quorumID int64, replicaID string)
	// Incomplete tells that the group takes part in nothing until it asks again.
	Incomplete(reason string)
	// SayProgress answers ProgressAsked.
	SayProgress(p round.Progress)
	// Fenced reports whether the group was silent for so long that it may count as failed.
	Fenced() bool
}

// notices hands each notice to all who listen.
type notices struct {
	mu        sync.Mutex
	listeners map[chan Notice]struct{}
}

// backlog is how many notices a listener may lag behind. One that lags further loses some: it is stuck, and each of its
// collectives ends with a timeout as before.
const backlog = 64

func (n *notices) listen() (heard <-chan Notice, stop func()) {
	c := make(chan Notice, backlog)
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.listeners == nil {
		n.listeners = map[chan Notice]struct{}{}
	}
	n.listeners[c] = struct{}{}
	return c, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.listeners, c)
	}
}

func (n *notices) tell(notice Notice) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for c := range n.listeners {
		select {
		case c <- notice:
		default:
		}
	}
}

// answerTime is how long ranks may take to say what they do. The lighthouse waits for a second.
const answerTime = 500 * time.Millisecond

// hearNotices tells the ranks what the membership learns.
func (s *Server) hearNotices(source NoticeSource) {
	for {
		select {
		case notice, open := <-source.Notices():
			if !open {
				return
			}
			s.hear(notice)
		case <-s.ctx.Done():
			return
		}
	}
}

func (s *Server) hear(notice Notice) {
	switch notice.Kind {
	case MemberFailed:
		s.log.Info("torchft: a peer is gone", "quorum_id", notice.QuorumID, "member", notice.ReplicaID, "reason", notice.Reason)
		if notice.ReplicaID == s.cfg.ReplicaID {
			s.feed(round.Evicted{QuorumID: notice.QuorumID, Reason: notice.Reason})
		}
	case Stalled:
		s.log.Info("torchft: a member makes no progress", "quorum_id", notice.QuorumID, "member", notice.ReplicaID, "reason", notice.Reason)
	case Drained:
		s.log.Info("torchft: this group is asked to leave at the end of a step", "reason", notice.Reason)
		s.feed(round.Drained{})
		return
	case ProgressAsked:
		s.feed(round.ProgressAsked{})
		rpc.Go(&s.tasks, s.log, "progress", s.answerProgress)
	}
	s.notices.tell(notice)
}

// answerProgress waits until the ranks have said what they do, and tells the lighthouse.
func (s *Server) answerProgress() {
	witness, ok := s.membership.(Witness)
	if !ok {
		return
	}
	deadline := time.NewTimer(answerTime)
	defer deadline.Stop()
	look := time.NewTicker(answerTime / 20)
	defer look.Stop()
	for {
		s.mu.Lock()
		p, complete := s.machine.Progress(time.Now())
		s.mu.Unlock()
		if complete {
			witness.SayProgress(p)
			return
		}
		select {
		case <-look.C:
		case <-deadline.C:
			witness.SayProgress(p)
			return
		case <-s.ctx.Done():
			return
		}
	}
}

// suspect passes on that a rank lost a collective.
func (s *Server) suspect(quorumID int64, replicaID string) {
	if witness, ok := s.membership.(Witness); ok {
		witness.Suspect(quorumID, replicaID)
	}
}

func (s *Server) feed(event round.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.step(event)
	}
}
