package lighthouse

import (
	"time"

	"github.com/torchft/torchft/go/dashboard"
)

// logAfter is for how long requests must have waited without a quorum before the log says why. In each step of a healthy job the
// first groups wait for the last one for a moment; that is not logged.
const logAfter = 5 * time.Second

// waiting is since when requests wait for a quorum, and why.
type waiting struct {
	since  time.Time
	reason string // as it was at that time; empty after a quorum
	at     time.Time
}

func (w *waiting) begins(reason string, now time.Time) { *w = waiting{now, reason, now} }
func (w *waiting) served()                             { *w = waiting{} }

// reason is why there is no quorum, at most a tick old. Each takes time proportional to the number of groups, and the calls of all
// groups may time out at the same moment: they share one. The caller holds mu.
func (j *job) reason(now time.Time) string {
	if w := &j.waiting; w.reason == "" || now.Sub(w.at) >= j.cfg.QuorumTick {
		w.reason, w.at = j.describe(now).Reason, now
	}
	return j.waiting.reason
}

// over reports, once, that the wait has been long enough to log.
func (w *waiting) over(now time.Time) bool {
	if w.since.IsZero() || now.Sub(w.since) < logAfter {
		return false
	}
	w.since = time.Time{}
	return true
}

func (j *job) logWaiting(now time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.waiting.over(now) {
		return
	}
	if status := j.describe(now); status.Waiters > 0 {
		j.log.Info("torchft: no quorum yet", "reason", status.Reason, "healthy", status.Healthy, "waiting", status.Candidates)
		j.board.Record(dashboard.Event{Time: now, Kind: dashboard.NoQuorum, Reason: status.Reason})
	}
}
