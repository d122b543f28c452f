package lighthouse

import (
	"context"
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

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

// The machine repeatedly requests a probe of a missing voter. The voter's host gets one probe at a time, so probes do not queue up.
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
		assert.EqualValues(t, 2, network.dialed.Load(), "no further probe was queued")
		probe("a")
		synctest.Wait()
		assert.EqualValues(t, 3, network.dialed.Load(), "the previous probe has ended")
		time.Sleep(probeTimeout)
	})
}

// named is a network in which one name has several addresses, with the result of dialing each of them.
type named struct {
	rpc.Network
	addresses map[string]error
}

func (n named) Resolve(context.Context, string) (all []string, err error) {
	for address := range n.addresses {
		all = append(all, address)
	}
	return all, nil
}

func (n named) Dial(_ context.Context, address string) (net.Conn, error) {
	if err, known := n.addresses[address]; !known || err != nil {
		return nil, err
	}
	conn, _ := net.Pipe()
	return conn, nil
}

// A member's process has certainly ended only if every address of its host's name refuses the connection.
func TestAMemberHasEndedIfAllAddressesOfItsNameRefuse(t *testing.T) {
	refused := &net.OpError{Err: syscall.ECONNREFUSED}
	for name, test := range map[string]struct {
		addresses map[string]error
		healthy   bool
	}{
		"all refuse":          {map[string]error{"a:1": refused, "b:1": refused}, false},
		"one is up":           {map[string]error{"a:1": refused, "b:1": nil}, true},
		"one does not answer": {map[string]error{"a:1": refused, "b:1": context.DeadlineExceeded}, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j, _ := crowd(1)
				defer j.shutDown()
				j.server.cfg.Network, j.server.probing = named{addresses: test.addresses}, make(chan struct{}, maxProbes)
				past := quorum.Past{ID: time.Now().Add(time.Minute).UnixMilli(), Members: []quorum.Voter{{ReplicaID: "x", Address: "http://name:1"}}}
				require.NoError(t, j.feed(quorum.Recalled{Past: past}))
				synctest.Wait()
				healthy := false
				for _, m := range j.status().Members {
					healthy = healthy || m.ReplicaID == "x" && m.Healthy
				}
				assert.Equal(t, test.healthy, healthy)
			})
		})
	}
}
