package manager

import (
	"fmt"
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
	"github.com/torchft/torchft/go/torchftpb"
)

// answerTime is how long ranks may take to answer ProgressAsked.
const answerTime = quorum.AnswerTime / 2

// handleNotices forwards the notices of the membership to the machine and the ranks.
func (s *Server) handleNotices() {
	for {
		select {
		case notice := <-s.membership.Notices():
			s.handleNotice(notice)
		case <-s.ctx.Done():
			return
		}
	}
}

func (s *Server) handleNotice(n *torchftpb.Notice) {
	id, reason := n.GetQuorumId(), n.GetReason()
	switch n.GetKind() {
	case torchftpb.Notice_MEMBER_FAILED:
		s.log.Info("torchft: a peer failed or ended", "quorum_id", id, "member", n.GetReplicaId(),
			"reason", reason)
		s.feed(round.MemberFailed{QuorumID: id, ReplicaID: n.GetReplicaId(), Reason: reason})
	case torchftpb.Notice_STALLED:
		s.log.Info("torchft: a member makes no progress", "quorum_id", id, "member", n.GetReplicaId(),
			"reason", reason)
	case torchftpb.Notice_REGRESSED: // no warning: each rank logs one
		s.log.Info("torchft: THE JOB REGRESSES", "quorum_id", id, "reason", reason)
	case torchftpb.Notice_JUDGED, torchftpb.Notice_STOPPED: // each rank says so
	case torchftpb.Notice_PROGRESS_ASKED:
		s.feed(round.ProgressAsked{})
		rpc.Go(&s.tasks, s.log, "progress", s.answerProgress)
	case torchftpb.Notice_DRAINED:
		s.log.Info("torchft: this group is asked to leave at the end of a step", "reason", reason)
		s.feed(round.Drained{})
		return
	case torchftpb.Notice_EVICTED:
		rpc.Go(&s.tasks, s.log, "eviction", s.evicted)
		return
	case torchftpb.Notice_CALLED:
		s.feed(round.Called{QuorumID: id})
		return
	case torchftpb.Notice_ROUND_KNOWN:
		s.feed(round.RoundKnown{QuorumID: id, Step: n.GetStep()})
		return
	default:
		return
	}
	s.notices.Notify(n)
}

// evictedGrace is how long after its eviction a group may go on without progress. It made none for as long
// before, or longer.
const evictedGrace = 30 * time.Second

// evicted ends the process if a rank makes no progress after the eviction of the group: otherwise the group
// would hold its devices for ever. Its launcher may start it again.
func (s *Server) evicted() {
	s.log.Warn("torchft: this group is evicted, since it makes no progress while the others wait for it")
	began := time.Now()
	for {
		select {
		case <-time.After(evictedGrace):
		case <-s.ctx.Done():
			return
		}
		s.mu.Lock()
		p, _ := s.machine.Progress(time.Now())
		s.mu.Unlock()
		if p.Waits || p.For < time.Since(began) {
			return // it has gone on since
		}
		if p.For >= p.Phase.LeastLimit() {
			s.end(fmt.Sprintf("this group was evicted, and rank %d has made no progress for %s: %s", p.Rank,
				p.For.Round(time.Second), p.What))
			return
		}
	}
}

// answerProgress waits for the ranks' answers, for answerTime, and sends the lighthouse their progress.
func (s *Server) answerProgress() {
	deadline := time.After(answerTime)
	look := time.Tick(answerTime / 20)
	for {
		s.mu.Lock()
		p, complete := s.machine.Progress(time.Now())
		s.mu.Unlock()
		if !complete {
			select {
			case <-look:
				continue
			case <-deadline:
			case <-s.ctx.Done():
				return
			}
		}
		s.membership.Report(&torchftpb.MemberMessage{
			Message: &torchftpb.MemberMessage_Progress{Progress: &torchftpb.GroupProgress{
				Step: p.Step, GroupRank: p.Rank, What: p.What, ForUs: p.For.Microseconds(), Waits: p.Waits,
				Phase: torchftpb.Phase(p.Phase),
			}},
		})
		return
	}
}

// doing returns what a heartbeat says of the group.
func (s *Server) doing() quorum.Doing {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, _ := s.machine.Progress(time.Now())
	return quorum.Doing{Phase: p.Phase, For: p.For, Pace: s.machine.Pace()}
}

func (s *Server) feed(event round.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.step(event)
	}
}
