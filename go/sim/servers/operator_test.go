package servers

import (
	"slices"

	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/sim"
)

// operate gives up groups whose votes are missing, as an operator does that knows: they have ended, no group that lives and no
// other lighthouse knows of a later quorum than the latest of this one, and its members that live wait here. Each is given up
// at one lighthouse in one of its lives.
func (j *job) operate() {
	if len(j.hosts) == 1 {
		return
	}
	status := make([]quorum.Status, len(j.hosts))
	serves := map[*lighthouse.Server]bool{}
	latest := -1
	for i, h := range j.hosts {
		h.life.Lock()
		defer h.life.Unlock()
		if h.server == nil {
			continue
		}
		serves[h.server] = true
		status[i] = h.server.Status()
		if latest < 0 || status[i].QuorumID > status[latest].QuorumID {
			latest = i
		}
	}
	if latest < 0 || len(status[latest].MissingVotes) == 0 {
		return
	}
	var ended []string
	j.tell(func(judge *sim.Judge) {
		s := &status[latest]
		for _, m := range s.Members {
			if m.InQuorum && !m.Waiting && judge.Lives(m.ReplicaID) {
				return
			}
		}
		if judge.Known() > s.QuorumID {
			return
		}
		ended = slices.DeleteFunc(slices.Clone(s.MissingVotes), judge.Lives)
		if len(ended) > 0 {
			judge.GivesUp(ended, latest)
		}
	})
	server := j.hosts[latest].server
	for _, id := range ended {
		if at := j.givenUp[id]; at == nil || at == server || !serves[at] {
			j.givenUp[id] = server
			_ = server.GiveUp("", id, "an operator") // the vote may not be missing any more
		}
	}
}
