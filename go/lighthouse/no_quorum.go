package lighthouse

import (
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
)

// why has the reason why there is no quorum.
type why struct {
	reason string    // empty after a quorum
	at     time.Time // when it was determined
}

// reason returns why there is no quorum; the answer is at most a tick old. It is cached because its cost
// grows with the number of groups, and the requests of all groups may reach their deadlines at the same
// moment. The caller holds mu.
func (j *job) reason(now time.Time) string {
	if j.why.reason == "" || now.Sub(j.why.at) >= j.cfg.QuorumTick {
		j.why = why{j.describe(now).Reason, now}
	}
	return j.why.reason
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
