package servers

import (
	"slices"
	"testing"

	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/sim"
)

// operate waives the votes of missing groups at the lighthouse with the latest quorum; quorums of an abandoned branch do not count.
// Like a careful operator, it does so only if the groups have ended, no live group knows a later quorum, and all live members of
// the quorum have a pending request there. A group that was waived at another server is not waived again while that server runs.
func (j *job) operate() {
	if len(j.hosts) == 1 {
		return
	}
	var latest *lighthouseHost
	var s quorum.Status // of the lighthouse with the latest quorum
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
		_ = latest.server.Waive("", id, "an operator") // an error means that the vote is not missing any more
	}
}

// After a waiver, a job continues at the first lighthouse while the lighthouse of its last quorum is down. Then the hosts of all of
// its groups vanish. By then the other lighthouse is back, with a higher id than the branch that continued. The operator has to
// waive the groups of the branch that continued, not those of the abandoned one.
func TestAnOperatorStaysWithTheBranchThatContinued(t *testing.T) {
	s := draw(28, 60)
	crash := slices.IndexFunc(s.Faults, func(f sim.Fault) bool { return f.Kind == sim.Crash })
	s.Faults[crash].Kind = sim.Vanish
	hold(t, s)
}
