package lighthouse_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/membership/lighthouses"
	"github.com/torchft/torchft/go/quorum"
)

// ofRun returns a group that asks the lighthouses of a cluster, or the only one.
func ofRun(t *testing.T, c *fttest.Cluster, addresses, id, run string) *lighthouses.Member {
	t.Helper()
	m, err := lighthouses.Join(t.Context(), addresses, id, 5*time.Second,
		rpc.Dialing{Network: c.Net.Host(id), Run: run})
	require.NoError(t, err)
	t.Cleanup(func() { _ = m.Close() })
	return m
}

func asks(t *testing.T, m *lighthouses.Member, id string, step int64) error {
	t.Helper()
	_, err := m.Quorum(t.Context(), quorum.Member{ReplicaID: id, Address: "http://" + id, Step: step}, 0)
	return err
}

// The log of the cluster has the end of a run: the next leader tells it a group that comes back. The next run
// trains, and so does a group that names none.
func TestAGroupThatComesBackAfterTheEndIsToldByTheNextLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fttest.NewAgreeing(t, 1)
		a := ofRun(t, &l.Cluster, fttest.AgreeingAddrs, "a", "first")
		require.NoError(t, asks(t, a, "a", 7))
		a.Finish(8)
		require.NoError(t, a.Close())
		time.Sleep(time.Second)
		l.Kill(l.Leader())
		l.Leader()

		for range 2 { // it may be started again
			err := asks(t, ofRun(t, &l.Cluster, fttest.AgreeingAddrs, "b", "first"), "b", 0)
			assert.Equal(t, codes.FailedPrecondition, status.Code(err))
			assert.ErrorContains(t, err,
				"the training has ended: it was complete at step 8, before b came back")
			assert.Equal(t, quorum.Ended, wire.RefusalOf(err))
		}
		for id, run := range map[string]string{"c": "second", "d": ""} {
			m := ofRun(t, &l.Cluster, fttest.AgreeingAddrs, id, run)
			require.NoError(t, asks(t, m, id, 0))
			require.NoError(t, m.Close())
			time.Sleep(6 * time.Second) // until it counts as failed
		}
	})
}

// A group that asks while the last group ends gets its answer when that group has ended.
func TestAGroupThatComesBackBeforeTheLastOneHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := ofRun(t, c, fttest.LighthouseAddr, "a", "r")
		require.NoError(t, asks(t, a, "a", 7))
		b := ofRun(t, c, fttest.LighthouseAddr, "b", "r")
		told := make(chan error)
		go func() { told <- asks(t, b, "b", 0) }()
		time.Sleep(time.Second)
		a.Finish(8)
		require.NoError(t, a.Close())
		assert.ErrorContains(t, <-told, "the training has ended: it was complete at step 8")
	})
}
