package lighthouse

import (
	"math"
	"time"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// What groups tell of their recoveries, for people. Nothing is decided by it, so the machine does not know it.

// heal is how far a group is that takes over the state of another.
type heal struct{ received, total int64 }

const (
	// mostHeals are remembered at once.
	mostHeals = 10_000
	// mostPhases of a recovery, and the longest name of one.
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

// recovered remembers what a recovery cost. All that are left tell of a failure; the first of them is enough.
func (j *job) recovered(replicaID string, r *torchftpb.Recovered) {
	e := dashboard.Event{Time: time.Now(), Kind: dashboard.Healed, Who: replicaID, Step: r.GetStep(), Bytes: max(0, r.GetBytes())}
	for _, p := range r.GetPhases()[:min(len(r.GetPhases()), mostPhases)] {
		if s := p.GetSeconds(); s >= 0 && !math.IsInf(s, 1) { // not NaN either: JSON has neither
			e.Phases = append(e.Phases, dashboard.Phase{Name: p.GetPhase()[:min(len(p.GetPhase()), longestPhase)], Seconds: s})
		}
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case r.GetHealed():
		delete(j.heals, replicaID)
		j.log.Info("torchft: a member healed", "member", replicaID, "step", e.Step, "bytes", e.Bytes, "seconds", seconds(e.Phases))
	case r.GetQuorumId() == j.blamed:
		return
	default:
		j.blamed = r.GetQuorumId()
		e.Kind, e.QuorumID, e.StepsLost = dashboard.Recovered, r.GetQuorumId(), max(0, r.GetStepsLost())
		j.log.Info("torchft: the others go on after a failure", "quorum_id", e.QuorumID, "step", e.Step, "steps_lost", e.StepsLost, "seconds", seconds(e.Phases))
	}
	j.board.Record(e)
}

// seconds is what all phases took, to the millisecond.
func seconds(phases []dashboard.Phase) (all float64) {
	for _, p := range phases {
		if p.Name != "total" {
			all += p.Seconds
		}
	}
	return math.Round(1000*all) / 1000
}

// addHeals adds what groups said to what the machine knows. The caller holds mu.
func (j *job) addHeals(status quorum.Status) {
	for i := range status.Members {
		m := &status.Members[i]
		if h, heals := j.heals[m.ReplicaID]; heals && m.Healthy {
			m.Healing, m.HealReceived, m.HealTotal = true, h.received, h.total
		}
	}
}
