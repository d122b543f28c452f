package servers

import (
	"slices"
	"testing"

	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/sim"
)

// operate waives groups whose votes are missing, as an operator does that knows: they have ended, no group that lives and no
// other lighthouse knows of a later quorum than the latest of this one, and its members that live wait here. Each is waived
// at one lighthouse in one of its lives. What a lighthouse has of a branch that was left behind counts no more.
func (j *job) operate() {
	if len(j.hosts) == 1 {
		return
	}
	var latest *lighthouseHost
	var s quorum.Status // of the latest
	serves := map[*lighthouse.Server]bool{}
	for _, h := range j.hosts {
		h.life.Lock()
		defer h.life.Unlock()
		if h.server == nil {
			continue
		}
		serves[h.server] = true
		status, abandoned := h.server.Status(), false
		j.note(func(judge *sim.Judge) { abandoned = judge.Abandoned(status.QuorumID) })
		if !abandoned && (latest == nil || status.QuorumID > s.QuorumID) {
			latest, s = h, status
		}
	}
	if latest == nil || len(s.MissingVotes) == 0 {
		return
	}
	var ended []string
	j.note(func(judge *sim.Judge) {
		for _, m := range s.Members {
			if m.InQuorum && !m.Waiting && judge.Lives(m.ReplicaID) {
				return
			}
		}
		if judge.Known() > s.QuorumID {
			return
		}
		ended = slices.DeleteFunc(slices.Clone(s.MissingVotes), func(id string) bool {
			at := j.waived[id]
			return judge.Lives(id) || at != nil && at != latest.server && serves[at]
		})
		if len(ended) > 0 {
			judge.Waives(ended, latest.index, s.QuorumID)
		}
	})
	for _, id := range ended {
		j.waived[id] = latest.server
		_ = latest.server.Waive("", id, "an operator") // the vote may not be missing any more
	}
}

// A job that goes on at the first lighthouse, by an operator's word, while the lighthouse of its last quorum is away; and then the
// hosts of all its groups vanish. The other lighthouse is back by then, with an id that is higher than those of the branch that
// went on. The operator has to waive the groups of that branch.
func TestAnOperatorStaysWithTheBranchThatGoesOn(t *testing.T) {
	s := draw(28, 60)
	crash := slices.IndexFunc(s.Faults, func(f sim.Fault) bool { return f.Kind == sim.Crash })
	s.Faults[crash].Kind = sim.Vanish
	hold(t, s)
}
