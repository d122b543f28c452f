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

// agreeing returns three lighthouses that form a cluster, and groups that know all of them.
func agreeing(t *testing.T, names ...string) (*fttest.Agreeing, []*fttest.Group) {
	l := fttest.NewAgreeing(t, 1)
	var groups []*fttest.Group
	for _, name := range names {
		groups = append(groups, l.StartGroup(name, 1, func(cfg *manager.ServerConfig) { cfg.LighthouseAddr = fttest.AgreeingAddrs }))
	}
	return l, groups
}

// A leader that fails costs no step, and no new connection between the groups: the quorum keeps its id.
func TestALeaderThatFailsCostsNoStep(t *testing.T) {
	for name, one := range map[string]struct {
		fail   func(l *fttest.Agreeing, leader string)
		within time.Duration
	}{
		"killed":   {func(l *fttest.Agreeing, leader string) { l.Kill(leader) }, 1500 * time.Millisecond},
		"vanished": {func(l *fttest.Agreeing, leader string) { l.Net.Host(leader).Vanish() }, 3 * time.Second},
		"stopped":  {func(l *fttest.Agreeing, leader string) { l.Net.Pause(leader) }, 3 * time.Second},
		"cut off from the other lighthouses": {func(l *fttest.Agreeing, leader string) {
			for _, host := range fttest.AgreeingHosts {
				if host != leader {
					l.Net.Block(leader, host)
				}
			}
		}, 3 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, groups := agreeing(t, "a", "b", "d")
				before := round(t, 1, groups...)[0]
				assert.Equal(t, before.QuorumID, round(t, 2, groups...)[0].QuorumID)

				leader, start := l.Leader(), time.Now()
				one.fail(l, leader)
				after := round(t, 3, groups...)[0]
				t.Logf("the next quorum came after %s", time.Since(start))
				assert.Less(t, time.Since(start), one.within)
				assert.Equal(t, before.QuorumID, after.QuorumID)
				assert.Equal(t, []string{"a", "b", "d"}, after.ReplicaIDs)
				assert.Equal(t, before.QuorumID, round(t, 4, groups...)[0].QuorumID)
			})
		})
	}
}

// The next leader knows the last quorum from the log: a member that has ended meanwhile is waited for, as by a leader that knew it.
func TestANewLeaderContinuesFromTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, groups := agreeing(t, "a", "b")
		before := round(t, 7, groups...)[0]
		l.Kill(l.Leader())
		groups[1].Host(-1).Kill()
		groups[1].Server.Shutdown()
		start := time.Now()
		got := <-groups[0].Quorum(0, 8, time.Minute)
		require.NoError(t, got.Err)
		assert.Equal(t, []string{"a"}, got.Value.ReplicaIDs)
		assert.Greater(t, got.Value.QuorumID, before.QuorumID)
		assert.Greater(t, time.Since(start), 4*time.Second, "b has the heartbeat timeout to come")
	})
}

// Without a majority the job waits, says why, and goes on when the majority is back.
func TestWithoutAMajorityTheJobWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, groups := agreeing(t, "a", "b")
		before := round(t, 1, groups...)[0]
		leader, back := l.Leader(), ""
		for _, host := range fttest.AgreeingHosts {
			if host != leader {
				l.Kill(host)
				back = host
			}
		}
		time.Sleep(time.Second) // the leader may serve until its lease ends
		var asked answers
		for _, g := range groups {
			asked = append(asked, g.QuorumOfAll(2, time.Minute)...)
		}
		select {
		case a := <-asked[0]:
			t.Fatalf("an answer without a majority: %v", a)
		case <-time.After(10 * time.Second):
		}
		assert.Contains(t, l.Log.String(), "no lighthouse of the cluster leads")
		l.Start(back)
		for _, got := range asked.results(t) {
			assert.Equal(t, before.QuorumID, got.QuorumID)
		}
	})
}

// All lighthouses are replaced by new processes, one after the other, while the groups train.
func TestARollingRestartCostsNoStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, groups := agreeing(t, "a", "b", "d")
		before := round(t, 1, groups...)[0]
		step := int64(2)
		for _, host := range fttest.AgreeingHosts {
			l.Kill(host)
			for range 5 {
				assert.Equal(t, before.QuorumID, round(t, step, groups...)[0].QuorumID)
				step++
			}
			l.Start(host)
			time.Sleep(2 * time.Second)
		}
	})
}
