package manager_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/membership/lighthouses"
	"github.com/torchft/torchft/go/quorum"
)

func dialLighthouse(t *testing.T, c *fttest.Cluster, host string) *lighthouses.Client {
	t.Helper()
	client, err := lighthouses.Dial(t.Context(), fttest.LighthouseAddr, time.Second,
		rpc.Dialing{Network: c.Net.Host(host)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	return client
}

// call asks by a unary call, like an upstream manager.
func call(client *lighthouses.Client, m quorum.Member) <-chan fttest.Answer[*quorum.Quorum] {
	return fttest.Start(func() (*quorum.Quorum, error) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		return client.Quorum(ctx, m, 0)
	})
}

func TestAGroupOfAnotherSizeIsRefusedAndTheOthersContinue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a, b := c.StartGroup("a", 2), c.StartGroup("b", 2)
		before := round(t, 1, a, b)[0].GetQuorumId()

		wrong := c.StartGroup("c", 3)
		for step := range int64(3) {
			for _, asked := range wrong.QuorumOfAll(0, time.Minute) {
				got := <-asked
				assert.ErrorContains(t, got.Err, "world_size of member c is 3, that of member a, which is "+
					"in the job, is 2: all groups of a job must have equally many ranks")
				assert.Less(t, got.Took, atOnce)
			}
			start := time.Now()
			for _, r := range round(t, 2+step, a, b) {
				assert.Equal(t, before, r.GetQuorumId(), "the other members are not affected")
				assert.Equal(t, []string{"a", "b"}, r.GetReplicaIds())
			}
			assert.Less(t, time.Since(start), atOnce, "the others do not wait for the refused group")
		}
		assert.Equal(t, 1, c.Log.Count("a member is refused"), "said once, not at each request")
		var refused []any
		for _, event := range history(t, c) {
			if event["kind"] == "refused" {
				refused = append(refused, event["left"])
			}
		}
		assert.Equal(t, []any{[]any{"c"}}, refused)
		wrong.Server.Shutdown()

		right := c.StartGroup("d", 2)
		joins := answers(right.QuorumOfAll(0, time.Minute))
		synctest.Wait()
		for _, r := range append(joins, append(a.QuorumOfAll(5, time.Minute),
			b.QuorumOfAll(5, time.Minute)...)...).results(t) {
			assert.Equal(t, []string{"a", "b", "d"}, r.GetReplicaIds())
		}
	})
}

// An upstream lighthouse accepts every size, and ours accepts every size of an upstream group. Ranks that
// have a peer reduce with it.
func TestAnUpstreamGroupOfAnotherSizeIsAccepted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a := c.StartGroup("a", 3)
		var ours answers
		for rank := range int64(3) {
			ours = append(ours, a.QuorumWith(&fttest.Request{GroupRank: rank,
				ReconfigureHandle: fmt.Sprint("a", rank)}, time.Minute))
		}
		synctest.Wait()
		upstream := call(dialLighthouse(t, c, "p"),
			quorum.Member{ReplicaID: "p", StoreAddress: "p:1", WorldSize: 2, Handles: []string{"p0", "p1"}})
		for rank, r := range ours.results(t) {
			assert.Equal(t, []string{"a", "p"}, r.GetReplicaIds())
			if rank < 2 {
				assert.Equal(t, []string{fmt.Sprint("a", rank), fmt.Sprint("p", rank)}, r.GetReconfigureHandles())
			} else {
				assert.Empty(t, r.GetReconfigureHandles())
				assert.Equal(t, []string{"p"}, r.GetReplicasWithoutHandles(), "the groups without this rank")
			}
		}
		require.NoError(t, (<-upstream).Err)
	})
}

// A group that was restarted from an older checkpoint under its old name asks for an earlier step than
// before.
func TestAStepThatGoesBackwards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		round(t, 7, a, b)
		got := append(answers(a.QuorumOfAll(8, time.Minute)), b.QuorumOfAll(3, time.Minute)...).results(t)
		for i, r := range got {
			assert.EqualValues(t, 8, r.MaxStep)
			assert.Equal(t, i == 1, r.Heal, "only the group that is behind heals")
		}
		got = append(answers(a.QuorumOfAll(2, time.Minute)), b.QuorumOfAll(2, time.Minute)...).results(t)
		for _, r := range got {
			assert.EqualValues(t, 2, r.MaxStep, "all continue at that step")
			assert.False(t, r.Heal)
		}
	})
}

// The data of one member is sent to all: with much data, an answer is larger than the largest request.
func TestMuchDataReachesAllMembers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 4)
		much := strings.Repeat("x", 3<<20)
		var calls []<-chan fttest.Answer[*quorum.Quorum]
		for _, id := range []string{"x", "y"} {
			calls = append(calls, call(dialLighthouse(t, c, id),
				quorum.Member{ReplicaID: id, WorldSize: 1, Data: much, Handles: []string{id}}))
		}
		var ours answers
		for _, id := range []string{"a", "b"} {
			ours = append(ours, c.StartGroup(id, 1).QuorumWith(&fttest.Request{ReconfigureHandle: id + much},
				time.Minute))
		}
		for _, asked := range calls {
			got := <-asked
			require.NoError(t, got.Err)
			require.Len(t, got.Value.Members, 4)
			assert.True(t, got.Value.Members[3].Data == much,
				"the data of the member arrive as they were sent")
		}
		for _, r := range ours.results(t) {
			require.Len(t, r.GetReconfigureHandles(), 4)
			assert.True(t, r.GetReconfigureHandles()[1] == "b"+much)
			assert.Equal(t, "y", r.GetReconfigureHandles()[3])
		}
	})
}

func TestTooMuchDataIsReportedAndHarmsNoOtherMember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := c.StartGroup("a", 2)
		before := round(t, 1, a)[0].GetQuorumId()
		got := <-call(dialLighthouse(t, c, "x"),
			quorum.Member{ReplicaID: "x", Data: strings.Repeat("x", 5<<20)})
		assert.Equal(t, codes.InvalidArgument, status.Code(got.Err))
		assert.ErrorContains(t, got.Err, "5242880 of them its data and 0 its reconfigure handles: a "+
			"lighthouse accepts at most 4194304 bytes")

		big := c.StartGroup("big", 2)
		for range 2 { // more than once
			var asked answers
			for rank := range int64(2) {
				asked = append(asked, big.QuorumWith(&fttest.Request{GroupRank: rank,
					ReconfigureHandle: strings.Repeat("x", 3<<20)}, time.Minute))
			}
			for _, asked := range asked {
				got := <-asked
				assert.Equal(t, codes.InvalidArgument, status.Code(got.Err), "%v", got.Err)
				assert.ErrorContains(t, got.Err,
					"6291456 its reconfigure handles: a lighthouse accepts at most 4194304 bytes")
				assert.Less(t, got.Took, time.Second)
			}
		}
		big.Server.Shutdown()
		time.Sleep(time.Second)
		assert.Equal(t, before, round(t, 2, a)[0].GetQuorumId())
	})
}

// Two processes with the same replica_id, at two addresses: the newer one trains, and the older one gets an
// error with the reason. It makes no difference whether the older one has a pending request or is in the
// middle of a step when the newer one asks.
func TestOfTwoGroupsWithOneNameTheNewerTrains(t *testing.T) {
	for name, waits := range map[string]bool{"the older one waits": true, "the older one trains": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := fttest.NewCluster(t, 2)
				older, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
				before := round(t, 1, older, b)[0].GetQuorumId()
				var refused <-chan fttest.Answer[*fttest.Result]
				if waits {
					refused = older.Quorum(0, 2, time.Minute)
				}
				time.Sleep(time.Second)
				newer := c.StartGroup("elsewhere", 1, func(cfg *manager.ServerConfig) { cfg.ReplicaID = "a" })
				asked := newer.Quorum(0, 0, time.Minute)
				synctest.Wait()
				if !waits {
					refused = older.Quorum(0, 2, time.Minute)
				}
				got := <-refused
				assert.ErrorContains(t, got.Err, `asks as member a: replica ids must be unique`)
				assert.ErrorContains(t, got.Err, newer.Server.Address())

				require.NoError(t, (<-b.Quorum(0, 2, time.Minute)).Err)
				joined := <-asked
				require.NoError(t, joined.Err)
				assert.Greater(t, joined.Value.GetQuorumId(), before, "the peers connect to the newer one")
				assert.True(t, joined.Value.Heal)
				for step := range int64(3) { // the older one stays refused
					got := <-older.Quorum(0, 2, time.Minute)
					assert.ErrorContains(t, got.Err, "replica ids must be unique")
					for _, r := range round(t, 3+step, newer, b) {
						assert.Equal(t, []string{"a", "b"}, r.GetReplicaIds())
					}
				}
			})
		})
	}
}
