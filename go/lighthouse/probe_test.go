package lighthouse

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
)

// mute is a network whose hosts do not answer.
type mute struct {
	rpc.Network
	dialed atomic.Int64
}

func (m *mute) Dial(ctx context.Context, _ string) (net.Conn, error) {
	m.dialed.Add(1)
	<-ctx.Done()
	return nil, ctx.Err()
}

// The machine asks again and again for a voter that is missing. Its host gets one probe at a time, so nothing queues.
func TestAVoterIsProbedOnceAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j, _ := crowd(1)
		defer j.shutDown()
		network := &mute{}
		j.server.cfg.Network, j.server.probing = network, make(chan struct{}, maxProbes)
		probe := func(ids ...string) {
			j.mu.Lock()
			defer j.mu.Unlock()
			for _, id := range ids {
				j.probe(quorum.Probe{ReplicaID: id, Address: "http://" + id + ":1"})
			}
		}
		for range 100 {
			probe("a", "b")
		}
		synctest.Wait()
		assert.EqualValues(t, 2, network.dialed.Load())
		time.Sleep(probeTimeout)
		synctest.Wait()
		assert.EqualValues(t, 2, network.dialed.Load(), "none waited")
		probe("a")
		synctest.Wait()
		assert.EqualValues(t, 3, network.dialed.Load(), "the probe before is over")
		time.Sleep(probeTimeout)
	})
}
