package lighthouse

import (
	"math"
	"time"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// This file records the reports of groups about their recoveries, for the log and the dashboard. No decision
// depends on these reports, so they are not passed to the machine.

// heal is the progress of a heal, in bytes.
type heal struct{ received, total int64 }

const (
	// mostHeals bounds how many heals are recorded.
	mostHeals = 10_000
	// mostPhases and longestPhase bound the number of phases of a recovery and the length of their names: a
	// client chooses both.
	mostPhases   = 16
	longestPhase = 40
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
