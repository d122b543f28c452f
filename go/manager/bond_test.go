package manager_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"google.golang.org/grpc"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

func kill(g *fttest.Group) {
	g.Host(-1).Kill()
	g.Server.Shutdown()
}

// If any set of groups is killed, the others continue within a second, even at a lighthouse of a list.
func TestKilledGroupsAreNotMissedAtALighthouseOfAList(t *testing.T) {
	for n := 2; n <= 5; n++ {
		for mask := 1; mask < 1<<n-1; mask += 1 + n*n/16*4 { // with many groups, only some sets
			t.Run(fmt.Sprintf("%0*b of %d", n, mask, n), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					_, second, groups := twoLighthouses(t, []string{"a", "b", "d", "e", "f"}[:n]...)
					round(t, 1, groups...)
					time.Sleep(time.Duration(mask) * 700 * time.Millisecond) // at different times between two stamps
					var alive []*fttest.Group
					for i, g := range groups {
						if mask>>i&1 == 1 {
							kill(g)
						} else {
							alive = append(alive, g)
						}
					}
					start := time.Now()
					require.Len(t, round(t, 2, alive...)[0].ReplicaIDs, len(alive))
					require.Less(t, time.Since(start), time.Second)
					round(t, 3, alive...)
					assert.Zero(t, second.Status().Healthy)
				})
			})
		}
	}
}

func TestOneGroupAfterTheOtherIsKilledAtALighthouseOfAList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, _, groups := twoLighthouses(t, "a", "b", "d", "e", "f")
		step := int64(1)
		for len(groups) > 1 {
			round(t, step, groups...)
			time.Sleep(3 * time.Second)
			kill(groups[0])
			groups = groups[1:]
			start := time.Now()
			round(t, step+1, groups...)
			require.Less(t, time.Since(start), time.Second)
			step += 2
		}
		// The remaining group gets a quorum alone at the same lighthouse.
		round(t, step, groups...)
	})
}

// A group that was cut off when it ended may have been at another lighthouse before. The other group waits, the status names the
// missing vote, and the group continues after an operator has waived that vote.
func TestAGroupWaitsForAnEndThatIsNotKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, second, groups := twoLighthouses(t, "a", "b")
		a, b := groups[0], groups[1]
		round(t, 1, a, b)
		c.Net.Block("a", "lighthouse")
		c.Net.Block("a", "second")
		time.Sleep(10 * time.Second)
		kill(a)
		c.Net.Unblock("a", "lighthouse")
		c.Net.Unblock("a", "second")
		asked := b.Quorum(0, 2, 5*time.Minute)
		time.Sleep(time.Minute)
		require.Empty(t, asked, "a may be at another lighthouse")
		at := c.Lighthouse
		if second.Status().Waiters > 0 {
			at = second
		}
		for len(at.Status().MissingVotes) == 0 { // the group asks one lighthouse after the other
			time.Sleep(time.Second)
		}
		assert.Equal(t, []string{"a"}, at.Status().MissingVotes)
		assert.Contains(t, at.Status().Reason, "another lighthouse might serve a")
		require.NoError(t, at.Waive("", "a", "a test"))
		got := <-asked
		require.NoError(t, got.Err)
		assert.Equal(t, []string{"b"}, got.Value.ReplicaIDs)
		assert.Positive(t, c.Log.Count("A VOTE IS WAIVED"))
	})
}

// The bond to a lighthouse ends when its process has ended, or when it releases the member. Otherwise members fail over when the
// bond of their last stamp has run out: within 3 s, whenever the lighthouse failed between two stamps.
func TestHowLongAFailoverTakes(t *testing.T) {
	for name, test := range map[string]struct {
		away func(c *fttest.Cluster)
		most time.Duration
	}{
		"killed":    {func(c *fttest.Cluster) { c.Net.Host("lighthouse").Kill(); c.Lighthouse.Shutdown() }, 1500 * time.Millisecond},
		"shut down": {func(c *fttest.Cluster) { c.Lighthouse.Shutdown() }, 1500 * time.Millisecond},
		"cut off":   {func(c *fttest.Cluster) { c.Net.Block("a", "lighthouse"); c.Net.Block("b", "lighthouse") }, 3 * time.Second},
		"vanished": {func(c *fttest.Cluster) {
			c.Net.Host("lighthouse").Freeze()
			time.AfterFunc(1800*time.Millisecond, func() { c.Net.Block("a", "lighthouse"); c.Net.Block("b", "lighthouse") }) // the kernel closes the connections
		}, 3 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			const phases = 4
			for phase := range phases {
				synctest.Test(t, func(t *testing.T) {
					c, _, groups := twoLighthouses(t, "a", "b")
					round(t, 1, groups...)
					time.Sleep(3*time.Second + time.Duration(phase)*quorum.BondTime/quorum.StampsInBond/phases)
					test.away(c)
					start := time.Now()
					round(t, 2, groups...)
					t.Logf("%s: %s", name, time.Since(start))
					assert.Less(t, time.Since(start), test.most)
				})
			}
		})
	}
}

// A member that received its quorum by a call has received no term. It greets the next lighthouse with the term of its quorum, and
// that lighthouse recalls the quorum, and continues after it.
func TestAMemberThatGotItsQuorumByACallGreetsWithItsTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		second := c.LighthouseOn("second", 1)
		t.Cleanup(second.Shutdown)
		upstream := &upstreamLighthouse{}
		const term = 5
		upstream.quorums.Store(term<<42 + 1000)
		stop := serve(t, c, func(g *grpc.Server) { torchftpb.RegisterLighthouseServiceServer(g, upstream) })
		a := c.StartGroup("a", 1, listed)
		id := round(t, 1, a)[0].QuorumID
		require.EqualValues(t, term, quorum.TermOf(id))
		stop()
		c.Net.Host("lighthouse").Kill()
		assert.Greater(t, round(t, 2, a)[0].QuorumID, id)
		assert.Equal(t, 1, second.Status().Healthy)
	})
}
