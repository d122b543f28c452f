package lighthouse

import (
	"fmt"
	"time"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/torchftpb"
)

const (
	// mostStacks is of how many ranks the stacks are recorded in stacksEvery: the history has room for a
	// thousand events, and all ranks of a large group report theirs at once. Each rank writes its own to its
	// log as well.
	mostStacks  = 32
	stacksEvery = time.Minute
)

// stacked counts the stacks that were recorded since a time.
type stacked struct {
	since time.Time
	n     int
}

// admits reports whether there is room for another one.
func (s *stacked) admits(now time.Time) bool {
	if now.Sub(s.since) >= stacksEvery {
		*s = stacked{since: now}
	}
	s.n++
	return s.n <= mostStacks
}

// stacks records where the threads of a rank are, whose group makes no progress while others wait for it.
func (j *job) stacks(replicaID string, s *torchftpb.RankStacks) {
	now := time.Now()
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.stacked.admits(now) {
		return
	}
	reason := fmt.Sprintf("rank %d", s.GetGroupRank())
	if c := s.GetCollective(); c != "" {
		reason += ": " + shortened(c)
	}
	j.log.Warn("torchft: a rank of a member without progress has reported its stacks", "member", replicaID,
		"rank", s.GetGroupRank(), "collective", shortened(s.GetCollective()))
	j.board.Record(dashboard.Event{Time: now, Kind: dashboard.Stacks, Who: replicaID, Reason: reason,
		Stacks: s.GetStacks()})
}
