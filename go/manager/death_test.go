package manager_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/manager"
)

const grace = 200 * time.Millisecond

// heard is the next failure that a rank hears of.
func heard(t *testing.T, g *fttest.Group, rank int) manager.Failure {
	t.Helper()
	select {
	case failure := <-g.Ranks[rank].Failures():
		return failure
	case <-time.After(time.Minute):
		require.Fail(t, "nothing was heard")
		return manager.Failure{}
	}
}

func TestADeathIsToldToAllAndNobodyWaitsForTheDead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		groups := []*fttest.Group{c.StartGroup("a", 2), c.StartGroup("b", 1), c.StartGroup("c", 1)}
		before := round(t, 0, groups...)
		first := groups[0].Quorum(0, 1, time.Minute) // one rank asks already, the other is in a collective still
		synctest.Wait()

		died := time.Now()
		groups[2].Server.Shutdown() // a killed process's connections break, too
		failure := heard(t, groups[0], 1)
		assert.InDelta(t, grace, time.Since(died), float64(atOnce))
		assert.Equal(t, before[0].QuorumID, failure.QuorumID)
		assert.Equal(t, "c", failure.ReplicaID)
		assert.Contains(t, failure.Reason, "its connection broke")
		assert.Equal(t, failure, heard(t, groups[0], 0))
		assert.Equal(t, failure, heard(t, groups[1], 0))

		after := answers{first, groups[0].Quorum(1, 1, time.Minute), groups[1].Quorum(0, 1, time.Minute)}.results(t)
		assert.Equal(t, []string{"a", "b"}, after[0].ReplicaIDs)
		assert.Less(t, time.Since(died), grace+10*time.Millisecond, "nobody waited for more than the grace")
	})
}

func TestASilentHostIsToldWhenItsHeartbeatIsTooOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		round(t, 0, a, b)
		silent := time.Now()
		b.Host(-1).Freeze()
		failure := heard(t, a, 0)
		assert.Equal(t, "b", failure.ReplicaID)
		assert.Contains(t, failure.Reason, "no sign of life")
		assert.InDelta(t, 5*time.Second, time.Since(silent), float64(200*time.Millisecond))
	})
}

// Cuts of all connections, once a second for ten minutes: each is over long before the grace.
func TestAFlappingNetworkIsNoDeath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		before := round(t, 0, a, b)
		for range 600 {
			a.Host(-1).Cut()
			b.Host(-1).Cut()
			time.Sleep(time.Second)
			synctest.Wait()
		}
		for _, g := range []*fttest.Group{a, b} {
			select {
			case failure := <-g.Ranks[0].Failures():
				assert.Fail(t, "a false death", "%+v", failure)
			default:
			}
		}
		after := round(t, 1, a, b)
		assert.Equal(t, before[0].QuorumID, after[0].QuorumID)
		assert.Zero(t, c.Log.Count("a member failed"))
	})
}
