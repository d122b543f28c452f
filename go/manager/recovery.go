package manager

import (
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/rankclient"
)

// groupHeal has the progress of each healing rank; the group's progress is their sum. Ranks report it several times a second.
type groupHeal struct {
	ranks map[int64]membership.HealProgress
	group membership.HealProgress
}

func (h *groupHeal) add(p membership.HealProgress) {
	h.drop(p.GroupRank)
	if h.ranks == nil {
		h.ranks = map[int64]membership.HealProgress{}
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

// healing records the progress of a rank, and reports the progress of the group.
func (s *Server) healing(p membership.HealProgress) {
	if p.GroupRank < 0 || p.GroupRank >= s.cfg.WorldSize || p.Received < 0 || p.Total < p.Received {
		return
	}
	s.mu.Lock()
	s.heals.add(p)
	group := s.heals.group
	s.mu.Unlock()
	if reporter, ok := s.membership.(membership.Reporter); ok {
		reporter.ReportHealing(group)
	}
}

// recovered counts the duration of a rank's recovery. The recovery of group rank 0 is reported to the lighthouse, for its page.
func (s *Server) recovered(r membership.Recovered) {
	if r.GroupRank < 0 || r.GroupRank >= s.cfg.WorldSize {
		return
	}
	s.meters.recovered(r)
	s.mu.Lock()
	if r.Healed {
		s.heals.drop(r.GroupRank)
	}
	s.mu.Unlock()
	if reporter, ok := s.membership.(membership.Reporter); ok && r.GroupRank == 0 {
		reporter.ReportRecovered(r)
	}
}

// counted adds to a counter. The rank gets no answer, so a refused count is logged, once.
func (s *Server) counted(c rankclient.Counted) {
	if c.GroupRank < 0 || c.GroupRank >= s.cfg.WorldSize {
		return
	}
	if err := c.Validate(); err != nil {
		s.badCount.Do(func() {
			s.log.Warn("torchft: a count of a rank was refused", "group_rank", c.GroupRank, "error", err)
		})
		return
	}
	s.meters.counts[c.Name].Add(float64(c.Number))
}
