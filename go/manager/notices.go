package manager

import (
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
)

// answerTime is how long ranks may take to answer ProgressAsked.
const answerTime = quorum.AnswerTime / 2

// handleNotices forwards the notices of the membership to the machine and the ranks.
func (s *Server) handleNotices(source membership.NoticeSource) {
	for {
		select {
		case notice, open := <-source.Notices():
			if !open {
				return
			}
			s.handleNotice(notice)
		case <-s.ctx.Done():
			return
		}
	}
}

func (s *Server) handleNotice(notice membership.Notice) {
	switch notice.Kind {
	case membership.MemberFailed:
		s.log.Info("torchft: a peer failed or ended", "quorum_id", notice.QuorumID, "member", notice.ReplicaID, "reason", notice.Reason)
		s.feed(round.MemberFailed{QuorumID: notice.QuorumID, ReplicaID: notice.ReplicaID, Reason: notice.Reason})
	case membership.Stalled:
		s.log.Info("torchft: a member makes no progress", "quorum_id", notice.QuorumID, "member", notice.ReplicaID, "reason", notice.Reason)
	case membership.Regressed: // no warning: each rank logs one
		s.log.Info("torchft: THE JOB REGRESSES", "quorum_id", notice.QuorumID, "reason", notice.Reason)
	case membership.Drained:
		s.log.Info("torchft: this group is asked to leave at the end of a step", "reason", notice.Reason)
		s.feed(round.Drained{})
		return
	case membership.Called:
		s.feed(round.Called{QuorumID: notice.QuorumID})
		return
	case membership.RoundKnown:
		s.feed(round.RoundKnown{QuorumID: notice.QuorumID, Step: notice.Step})
		return
	case membership.ProgressAsked:
		s.feed(round.ProgressAsked{})
		rpc.Go(&s.tasks, s.log, "progress", s.answerProgress)
	}
	s.notices.Notify(notice)
}

// answerProgress waits until the ranks have answered, or answerTime is over, and sends the lighthouse their progress.
func (s *Server) answerProgress() {
	witness, ok := s.membership.(membership.Witness)
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
			witness.ReportProgress(p)
			return
		}
		select {
		case <-look.C:
		case <-deadline.C:
			witness.ReportProgress(p)
			return
		case <-s.ctx.Done():
			return
		}
	}
}

// suspect reports to the lighthouse that a collective of a rank failed, and which member is suspected; empty if it is not known.
func (s *Server) suspect(quorumID int64, replicaID string) {
	if witness, ok := s.membership.(membership.Witness); ok {
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
