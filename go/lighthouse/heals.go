package lighthouse

import (
	"fmt"
	"math"
	"time"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// This file records what groups report for people, in the log and on the dashboard. No decision depends on
// these reports, so they are not passed to the machine.

// heal is the progress of a heal, in bytes.
type heal struct{ received, total int64 }

const (
	// mostHeals bounds how many heals are recorded.
	mostHeals = 10_000
	// mostPhases and longestPhase bound the number of phases of a recovery and the length of their names: a
	// client chooses both.
	mostPhases   = 16
	longestPhase = 40
	// mostStacks is of how many ranks the stacks are recorded in a minute: the history has room for a
	// thousand events, and all ranks of a large group report theirs at once. Each rank writes its own to its
	// log as well.
	mostStacks = 32
)

func (j *job) healing(replicaID string, p *torchftpb.HealProgress) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if _, known := j.heals[replicaID]; !known && len(j.heals) >= mostHeals {
		return
	}
	if j.heals == nil {
		j.heals = map[string]heal{}
	}
	j.heals[replicaID] = heal{max(0, p.GetReceived()), max(0, p.GetTotal())}
}

// recovered records the cost of a recovery. All survivors report it; only the first report is recorded.
func (j *job) recovered(replicaID string, r *torchftpb.Recovered) {
	e := dashboard.Event{Time: time.Now(), Kind: dashboard.Healed, Who: replicaID, Step: r.GetStep(),
		Bytes: max(0, r.GetBytes())}
	for _, p := range r.GetPhases()[:min(len(r.GetPhases()), mostPhases)] {
		if s := p.GetSeconds(); s >= 0 && !math.IsInf(s, 1) {
			// JSON has no infinity, and no NaN, for which s >= 0 is false
			e.Phases = append(e.Phases, dashboard.Phase{Name: p.GetPhase()[:min(len(p.GetPhase()),
				longestPhase)], Seconds: s})
		}
	}
	seconds := math.Round(1000*e.Took()) / 1000
	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case r.GetHealed():
		delete(j.heals, replicaID)
		j.log.Info("torchft: a member healed", "member", replicaID, "step", e.Step, "bytes", e.Bytes,
			"seconds", seconds)
	case r.GetQuorumId() == j.blamed:
		return
	default:
		j.blamed = r.GetQuorumId()
		e.Kind, e.QuorumID, e.StepsLost = dashboard.Recovered, r.GetQuorumId(), max(0, r.GetStepsLost())
		j.log.Info("torchft: the other groups continue after a failure", "quorum_id", e.QuorumID,
			"step", e.Step, "steps_lost", e.StepsLost, "seconds", seconds)
	}
	j.board.Record(e)
}

// withHeals adds the reported heals to the members of the machine's status. The caller holds mu.
func (j *job) withHeals(members []quorum.MemberStatus) []dashboard.Member {
	with := make([]dashboard.Member, len(members))
	for i, m := range members {
		with[i].MemberStatus = m
		if h, heals := j.heals[m.ReplicaID]; heals && m.Healthy {
			with[i].Healing, with[i].HealReceived, with[i].HealTotal = true, h.received, h.total
		}
	}
	return with
}

// stacks records where the threads of a rank are, whose group makes no progress while others wait for it.
func (j *job) stacks(replicaID string, s *torchftpb.RankStacks) {
	now := time.Now()
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.stacked.admit(mostStacks, now) {
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

// corrupted logs and records groups whose gradients of the same unit differ, once: all groups report it.
func (j *job) corrupted(c *torchftpb.Corrupted) {
	names, reason := dashboard.Names(c.GetReplicaIds()), shortened(c.GetReason())
	for i, name := range names {
		names[i] = shortened(name)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.once(reason) {
		return
	}
	j.log.Error("torchft: A GRADIENT IS CORRUPTED", "members", names, "reason", reason)
	j.board.Record(dashboard.Event{Time: time.Now(), Kind: dashboard.Corrupted, Left: names, Reason: reason})
}
