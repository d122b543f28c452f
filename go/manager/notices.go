package manager

import (
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/membership"
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

func (s *Server) handleNotice(notice membership.Notice) {
	switch notice.Kind {
	case membership.MemberFailed:
		s.log.Info("torchft: a peer failed or ended", "quorum_id", notice.QuorumID,
			"member", notice.ReplicaID, "reason", notice.Reason)
		s.feed(round.MemberFailed{QuorumID: notice.QuorumID, ReplicaID: notice.ReplicaID,
			Reason: notice.Reason})
	case membership.Stalled:
		s.log.Info("torchft: a member makes no progress", "quorum_id", notice.QuorumID,
			"member", notice.ReplicaID, "reason", notice.Reason)
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

// answerProgress waits until the ranks have answered, or answerTime is over, and sends the lighthouse their
// progress.
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
				Step: p.Step, GroupRank: p.Rank, Phase: p.Phase, ForUs: p.For.Microseconds(), Waits: p.Waits,
			}},
		})
		return
	}
}

func (s *Server) feed(event round.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.step(event)
	}
}
