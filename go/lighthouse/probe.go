package lighthouse

import (
	"context"
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
)

const (
	// maxProbes bounds how many probes run at once.
	maxProbes = 32
	// probeTimeout is how long a host may take to answer. If the process has ended, its host refuses at once.
	probeTimeout = time.Second
)

// probe finds out whether the process at a member's address has ended. The proof is that each address of its host's name refuses a
// connection: if an address does not answer, the process may be alive. The machine repeats the request until the member is known to
// have ended or to be alive. A member has at most one probe at a time, so that silent hosts cause no queue. The caller holds mu.
func (j *job) probe(v quorum.Probe) {
	address, err := rpc.ParseAddress("address", v.Address)
	if err != nil || j.probed[v.ReplicaID] {
		return
	}
	j.probed[v.ReplicaID] = true
	s := j.server
	rpc.Go(&s.tasks, j.log, "probe", func() {
		defer func() {
			j.mu.Lock()
			defer j.mu.Unlock()
			delete(j.probed, v.ReplicaID)
		}()
		select {
		case s.probing <- struct{}{}:
			defer func() { <-s.probing }()
		case <-s.stop:
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
		defer cancel()
		if rpc.Refuses(ctx, s.cfg.Network, address.HostPort) {
			_ = j.feed(quorum.Ended{ReplicaID: v.ReplicaID}) // step has logged an error
		}
	})
}
