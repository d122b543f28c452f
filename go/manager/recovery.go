package manager

import (
	"github.com/torchft/torchft/go/torchftpb"
)

// bytes is the progress of a heal.
type bytes struct{ received, total int64 }

// groupHeal has the progress of each healing rank; the group's progress is their sum. Ranks report it several
// times a second.
type groupHeal struct {
	ranks map[int64]bytes
	group bytes
}

func (h *groupHeal) add(groupRank int64, p bytes) {
	h.drop(groupRank)
	if h.ranks == nil {
		h.ranks = map[int64]bytes{}
	}
	h.ranks[groupRank] = p
	h.group.received += p.received
	h.group.total += p.total
}

func (h *groupHeal) drop(groupRank int64) {
	h.group.received -= h.ranks[groupRank].received
	h.group.total -= h.ranks[groupRank].total
	delete(h.ranks, groupRank)
}

// healing records the progress of a rank, and reports the progress of the group.
func (s *Server) healing(p *torchftpb.HealProgress) {
	if !s.has(p.GetGroupRank()) || p.GetReceived() < 0 || p.GetTotal() < p.GetReceived() {
		return
	}
	s.mu.Lock()
	s.heals.add(p.GetGroupRank(), bytes{p.GetReceived(), p.GetTotal()})
	group := &torchftpb.HealProgress{Received: s.heals.group.received, Total: s.heals.group.total}
	s.mu.Unlock()
	s.membership.Report(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Healing{Healing: group}})
}

// mostPhases bounds the memory that a rank's report can use.
const mostPhases = 16

// recovered counts the duration of a rank's recovery. The recovery of group rank 0 is reported to the
// lighthouse, for its page.
func (s *Server) recovered(r *torchftpb.Recovered) {
	if !s.has(r.GetGroupRank()) {
		return
	}
	r.Phases = r.GetPhases()[:min(len(r.GetPhases()), mostPhases)]
	s.meters.recovered(r)
	s.mu.Lock()
	if r.GetHealed() {
		s.heals.drop(r.GetGroupRank())
	}
	s.mu.Unlock()
	if r.GetGroupRank() == 0 {
		s.membership.Report(&torchftpb.MemberMessage{
			Message: &torchftpb.MemberMessage_Recovered{Recovered: r},
		})
	}
}

// counted adds to a counter. The rank gets no answer, so a refused count is logged, once.
func (s *Server) counted(c *torchftpb.Counted) {
	if !s.has(c.GetGroupRank()) {
		return
	}
	if err := ValidateCounted(c); err != nil {
		s.badCount.Do(func() {
			s.log.Warn("torchft: a count of a rank was refused", "group_rank", c.GetGroupRank(), "error", err)
		})
		return
	}
	s.meters.counts[c.GetName()].Add(float64(c.GetNumber()))
}
