package lighthouse

import (
	"time"

	"github.com/torchft/torchft/go/dashboard"
)

// logAfter is how long there must be no quorum before the log says why. In each step of a healthy job
// somebody waits for somebody else for a moment; that is no news.
const logAfter = 5 * time.Second

// patience remembers since when requests wait, and why.
type patience struct {
	since  time.Time
	reason string // as it was at that time; empty after a quorum
	at     time.Time
}

func (p *patience) waits(reason string, now time.Time) { *p = patience{now, reason, now} }
func (p *patience) served()                            { *p = patience{} }

// reason is why there is no quorum, at most a tick old. It costs as much as there are groups, and all of them
// may give up at the same moment: one asks for all. The caller holds mu.
func (j *job) reason(now time.Time) string {
	if p := &j.patient; p.reason == "" || now.Sub(p.at) >= j.cfg.QuorumTick {
		p.reason, p.at = j.describe(now).Reason, now
	}
	return j.patient.reason
}

// over reports, once, that the wait has been long enough to log.
func (p *patience) over(now time.Time) bool {
	if p.since.IsZero() || now.Sub(p.since) < logAfter {
		return false
	}
	p.since = time.Time{}
	return true
}

func (j *job) logPatience(now time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.patient.over(now) {
		return
	}
	if status := j.describe(now); status.Waiters > 0 {
		j.log.Info("torchft: no quorum yet", "reason", status.Reason, "healthy", status.Healthy, "waiting", status.Candidates)
		j.board.Record(dashboard.Event{Time: now, Kind: dashboard.NoQuorum, Reason: status.Reason})
	}
}
