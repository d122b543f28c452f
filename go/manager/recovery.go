package manager

import (
	"github.com/torchft/torchft/go/torchftpb"
)

// What ranks tell of heals, and of failures of their peers, once these are over. It goes to the metrics of this server and
// to the lighthouse, for people to see; nothing depends on it.

// HealProgress is how far the state of a peer has arrived, at a rank or, towards the lighthouse, at all of the group.
type HealProgress struct {
	GroupRank       int64
	Received, Total int64 // bytes
}

// Recovered is what a heal, or the failure of a peer, cost one rank.
type Recovered struct {
	GroupRank int64
	Healed    bool  // else: a peer failed, and this group has committed a step since
	QuorumID  int64 // that failed; 0 for a heal
	Step      int64 // that it is at now
	Bytes     int64 // of the state that came
	StepsLost int64
	Phases    []PhaseTime // in their order
}

// PhaseTime is what a phase of a recovery took.
type PhaseTime struct {
	Phase   string
	Seconds float64
}

// Reporter is a Membership that shows people how its group recovers. Its calls do not wait.
type Reporter interface {
	SayHealing(p HealProgress)
	SayRecovered(r Recovered)
}

func (m *member) SayHealing(p HealProgress) {
	m.say(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Healing{Healing: p.proto()}})
}

func (m *member) SayRecovered(r Recovered) {
	m.say(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Recovered{Recovered: r.proto()}})
}

// groupHeal is what has arrived at the ranks that heal, and the sum of it: each rank tells several times a second.
type groupHeal struct {
	ranks map[int64]HealProgress
	group HealProgress
}

func (h *groupHeal) add(p HealProgress) {
	h.drop(p.GroupRank)
	if h.ranks == nil {
		h.ranks = map[int64]HealProgress{}
	}
	h.ranks[p.GroupRank] = p
	h.group.Received += p.Received
	h.group.Total += p.Total
}

func (h *groupHeal) drop(groupRank int64) {
	h.group.Received -= h.ranks[groupRank].Received
	h.group.Total -= h.ranks[groupRank].Total
	delete(h.ranks, groupRank)
}

// healing notes what has arrived at a rank, and tells of the whole group.
func (s *Server) healing(p HealProgress) {
	if p.GroupRank < 0 || p.GroupRank >= s.cfg.WorldSize || p.Received < 0 || p.Total < p.Received {
		return
	}
	s.mu.Lock()
	s.heals.add(p)
	group := s.heals.group
	s.mu.Unlock()
	if reporter, ok := s.membership.(Reporter); ok {
		reporter.SayHealing(group)
	}
}

// recovered counts what a recovery cost a rank. One rank of the group tells the lighthouse.
func (s *Server) recovered(r Recovered) {
	if r.GroupRank < 0 || r.GroupRank >= s.cfg.WorldSize {
		return
	}
	s.meters.recovered(r)
	s.mu.Lock()
	if r.Healed {
		s.heals.drop(r.GroupRank)
	}
	s.mu.Unlock()
	if reporter, ok := s.membership.(Reporter); ok && r.GroupRank == 0 {
		reporter.SayRecovered(r)
	}
}

// counted adds what a rank counted. It has no answer: the log says once what was refused.
func (s *Server) counted(c Counted) {
	if c.GroupRank < 0 || c.GroupRank >= s.cfg.WorldSize {
		return
	}
	if err := c.Validate(); err != nil {
		s.badCount.Do(func() {
			s.log.Warn("torchft: a rank counts what is not known", "group_rank", c.GroupRank, "error", err)
		})
		return
	}
	s.meters.counts[c.Name].Add(float64(c.Number))
}

func (p HealProgress) proto() *torchftpb.HealProgress {
	return &torchftpb.HealProgress{GroupRank: p.GroupRank, Received: p.Received, Total: p.Total}
}

func healProgressFromProto(p *torchftpb.HealProgress) HealProgress {
	return HealProgress{GroupRank: p.GetGroupRank(), Received: p.GetReceived(), Total: p.GetTotal()}
}

func (r Recovered) proto() *torchftpb.Recovered {
	p := &torchftpb.Recovered{
		GroupRank: r.GroupRank, Healed: r.Healed, QuorumId: r.QuorumID, Step: r.Step, Bytes: r.Bytes, StepsLost: r.StepsLost,
	}
	for _, phase := range r.Phases {
		p.Phases = append(p.Phases, &torchftpb.PhaseTime{Phase: phase.Phase, Seconds: phase.Seconds})
	}
	return p
}

func recoveredFromProto(p *torchftpb.Recovered) Recovered {
	r := Recovered{
		GroupRank: p.GetGroupRank(), Healed: p.GetHealed(), QuorumID: p.GetQuorumId(), Step: p.GetStep(), Bytes: p.GetBytes(),
		StepsLost: p.GetStepsLost(),
	}
	for _, phase := range p.GetPhases()[:min(len(p.GetPhases()), mostPhases)] {
		r.Phases = append(r.Phases, PhaseTime{phase.GetPhase(), phase.GetSeconds()})
	}
	return r
}

// mostPhases bounds what a rank can make a server remember.
const mostPhases = 16
