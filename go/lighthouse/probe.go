package lighthouse

import (
	"context"
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
)

const (
	// maxProbes are on their way at once.
	maxProbes = 32
	// probeTimeout is how long a host may take to answer: whoever is gone is refused at once.
	probeTimeout = time.Second
)

// probe asks a member's host whether the process at its address is gone. That is certain only if the host says so: it
// refuses the connection, at every address that its name has. The machine asks again while it has no answer: of a member
// there is one probe at a time, so that none queue for hosts that do not answer. The caller holds mu.
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
			_ = j.feed(quorum.Ended{ReplicaID: v.ReplicaID}) // an error is of the machine, and logged
		}
	})
}
