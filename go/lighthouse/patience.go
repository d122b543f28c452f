package lighthouse

import "time"

// logAfter is how long there must be no quorum before the log says why. In each step of a healthy job
// somebody waits for somebody else for a moment; that is no news.
const logAfter = 5 * time.Second

// patience remembers since when requests wait, and the reason that the machine last gave.
type patience struct {
	since  time.Time
	reason string // empty after a quorum
}

func (p *patience) waits(reason string, now time.Time) { *p = patience{now, reason} }
func (p *patience) served()                            { *p = patience{} }

// over reports, once, that the wait has been long enough to log.
func (p *patience) over(now time.Time) bool {
	if p.since.IsZero() || now.Sub(p.since) < logAfter {
		return false
	}
	p.since = time.Time{}
	return true
}

func (s *Server) logPatience(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.patient.over(now) {
		return
	}
	if status := s.machine.Describe(now); status.Waiters > 0 {
		s.log.Info("torchft: no quorum yet", "reason", status.Reason, "healthy", status.Healthy, "waiting", status.Candidates)
	}
}
