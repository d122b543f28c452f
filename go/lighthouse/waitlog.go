package lighthouse

import (
	"time"

	"github.com/torchft/torchft/go/dashboard"
)

// logAfter is how long there must be no quorum before the log says why. In each step of a healthy job
// some member waits for another one for a moment: that is not worth a line.
const logAfter = 5 * time.Second

// waitLog remembers since when requests wait, and why.
type waitLog struct {
	since  time.Time
	reason string // as it was at that time; empty after a quorum
	at     time.Time
}

func (w *waitLog) waits(reason string, now time.Time) { *w = waitLog{now, reason, now} }
func (w *waitLog) served()                            { *w = waitLog{} }

// reason is why there is no quorum, at most a tick old. It costs as much as there are groups, and all of them
// may end their requests at the same moment: one asks for all. The caller holds mu.
func (j *job) reason(now time.Time) string {
	if w := &j.waitLog; w.reason == "" || now.Sub(w.at) >= j.cfg.QuorumTick {
		w.reason, w.at = j.describe(now).Reason, now
	}
	return j.waitLog.reason
}

// over reports, once, that the wait has been long enough to log.
func (w *waitLog) over(now time.Time) bool {
	if w.since.IsZero() || now.Sub(w.since) < logAfter {
		return false
	}
	w.since = time.Time{}
	return true
}

func (j *job) logWait(now time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.waitLog.over(now) {
		return
	}
	if status := j.describe(now); status.Waiters > 0 {
		j.log.Info("torchft: no quorum yet", "reason", status.Reason, "healthy", status.Healthy, "waiting", status.Candidates)
		j.board.Record(dashboard.Event{Time: now, Kind: dashboard.NoQuorum, Reason: status.Reason})
	}
}
