package lighthouse

import (
	"time"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
)

// logAfter is how long requests must have been pending before the reason is logged. In each step of a healthy
// job some members wait for others for a moment, which is not logged.
const logAfter = 5 * time.Second

// waitLog records since when requests are pending, and why.
type waitLog struct {
	since  time.Time // zero once the wait was logged
	reason string    // why there was no quorum; empty after a quorum
	at     time.Time // when reason was determined
}

// reason returns why there is no quorum; the answer is at most a tick old. It is cached because its cost
// grows with the number of groups, and the requests of all groups may reach their deadlines at the same
// moment. The caller holds mu.
func (j *job) reason(now time.Time) string {
	if w := &j.waitLog; w.reason == "" || now.Sub(w.at) >= j.cfg.QuorumTick {
		w.reason, w.at = j.describe(now).Reason, now
	}
	return j.waitLog.reason
}

// reasonFor returns why there is no quorum with a member, and quorum.Held if it is a standby. A panic costs
// only what is said of a standby. The caller holds mu.
func (j *job) reasonFor(replicaID string) (reason string, refusal quorum.Refusal) {
	var err error
	defer func() {
		if err != nil || reason == "" {
			reason, refusal = j.reason(time.Now()), ""
		}
	}()
	defer rpc.Recovered(j.log, "the state of a standby", &err)
	return j.machine.StandsBy(replicaID), quorum.Held
}

// logWait logs, once, that requests have been pending for long.
func (j *job) logWait(now time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.waitLog.since.IsZero() || now.Sub(j.waitLog.since) < logAfter {
		return
	}
	j.waitLog.since = time.Time{}
	if status := j.describe(now); status.Waiters > 0 {
		j.log.Info("torchft: no quorum yet", "reason", status.Reason, "healthy", status.Healthy,
			"waiting", status.Candidates)
		j.board.Record(dashboard.Event{Time: now, Kind: dashboard.NoQuorum, Reason: status.Reason})
	}
}
