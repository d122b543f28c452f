package manager_test

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/membership/lighthouses"
	"github.com/torchft/torchft/go/torchftpb"
)

// drain asks the lighthouse to drain a group.
func drain(t *testing.T, c *fttest.Cluster, replicaID string) int {
	t.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
		return c.Net.Host("lighthouse").Dial(ctx, addr)
	}}
	defer transport.CloseIdleConnections()
	body, err := json.Marshal(map[string]string{"replica_id": replicaID})
	require.NoError(t, err)
	resp, err := (&http.Client{Transport: transport}).Post(fttest.LighthouseAddr+"/api/v1/drain",
		"application/json", bytes.NewReader(body))
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return resp.StatusCode
}

// history returns the lighthouse's history of the job.
func history(t *testing.T, c *fttest.Cluster) []map[string]any {
	t.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
		return c.Net.Host("lighthouse").Dial(ctx, addr)
	}}
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport}).Get(fttest.LighthouseAddr + "/api/v1/history")
	require.NoError(t, err)
	defer func() { require.NoError(t, resp.Body.Close()) }()
	var history struct{ Events []map[string]any }
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&history))
	return history.Events
}

func leave(g *fttest.Group, rank int, timeout time.Duration) <-chan fttest.Answer[bool] {
	return fttest.Start(func() (bool, error) {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		return true, g.Ranks[rank].Leave(ctx)
	})
}

// noFailure fails if a failure was reported to a rank.
func noFailure(t *testing.T, g *fttest.Group, rank int) {
	t.Helper()
	for {
		select {
		case notice := <-g.Ranks[rank].Notices():
			require.NotEqual(t, torchftpb.Notice_MEMBER_FAILED, notice.GetKind(), "%+v", notice)
		default:
			return
		}
	}
}

func TestADrainedGroupLeavesAndNoGroupLosesAStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b, d := c.StartGroup("a", 2), c.StartGroup("b", 2), c.StartGroup("d", 2)
		round(t, 0, a, b, d)
		// One rank of a has already asked when the drain comes: both ranks learn of it with the same quorum.
		early := a.Quorum(0, 1, time.Minute)
		synctest.Wait()
		require.Equal(t, http.StatusOK, drain(t, c, "a"))
		synctest.Wait()
		all := append(answers{early, a.Quorum(1, 1, time.Minute)}, b.QuorumOfAll(1, time.Minute)...)
		for i, result := range append(all, d.QuorumOfAll(1, time.Minute)...).results(t) {
			assert.Equal(t, i < 2, result.Draining)
			assert.Equal(t, []string{"a", "b", "d"}, result.GetReplicaIds(), "a takes part in one more step")
		}
		for _, vote := range []<-chan fttest.Answer[bool]{a.Vote(0, 1, true, time.Minute),
			a.Vote(1, 1, true, time.Minute)} {
			require.True(t, (<-vote).Value)
		}

		// a stays until its peers have completed the step; the next quorum does not wait for a.
		left := []<-chan fttest.Answer[bool]{leave(a, 0, time.Minute), leave(a, 1, time.Minute)}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		assert.Empty(t, left[0])
		first := b.Quorum(0, 2, time.Minute)
		asked := time.Now()
		after := append(answers{first, b.Quorum(1, 2, time.Minute)},
			d.QuorumOfAll(2, time.Minute)...).results(t)
		assert.Equal(t, []string{"b", "d"}, after[0].GetReplicaIds())
		assert.Less(t, time.Since(asked), 10*time.Millisecond)
		for _, answer := range left {
			got := <-answer
			require.NoError(t, got.Err)
			assert.Less(t, got.Took, 10*time.Second+10*time.Millisecond)
		}

		a.Server.Shutdown()
		time.Sleep(10 * time.Second)
		noFailure(t, b, 0)
		noFailure(t, d, 0)
		assert.Zero(t, c.Log.Count("a member failed"), c.Log.String())
		assert.Positive(t, c.Log.Count("a left as asked (drain)"), c.Log.String())
		assert.Equal(t, after[0].GetQuorumId(), round(t, 3, b, d)[0].GetQuorumId())
	})
}

func TestARankDrainsItsGroupAndNoGroupLosesAStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 2), c.StartGroup("b", 2)
		round(t, 0, a, b)
		// The signal reaches rank 1. It does not reach rank 0, which asks first and has the server in its
		// process.
		wishes := &fttest.Request{GroupRank: 1, Step: 1, Drain: true}
		all := answers{a.Quorum(0, 1, time.Minute), a.QuorumWith(wishes, time.Minute)}
		for i, result := range append(all, b.QuorumOfAll(1, time.Minute)...).results(t) {
			assert.Equal(t, i < 2, result.Draining)
			assert.Equal(t, []string{"a", "b"}, result.GetReplicaIds(), "a takes part in this step")
		}
		for _, vote := range []<-chan fttest.Answer[bool]{a.Vote(0, 1, true, time.Minute),
			a.Vote(1, 1, true, time.Minute)} {
			require.True(t, (<-vote).Value)
		}
		left := []<-chan fttest.Answer[bool]{leave(a, 0, time.Minute), leave(a, 1, time.Minute)}
		assert.Equal(t, []string{"b"}, round(t, 2, b)[0].GetReplicaIds())
		for _, answer := range left {
			require.NoError(t, (<-answer).Err)
		}
		a.Server.Shutdown()
		time.Sleep(10 * time.Second)
		noFailure(t, b, 0)
		assert.Zero(t, c.Log.Count("a member failed"), c.Log.String())
	})
}

// A restarted lighthouse does not know that the group has left. The group announces it again, so that its end
// is no failure.
func TestALeaveIsRetriedUntilTheLighthouseIsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		round(t, 0, a, b)
		c.Net.Host("lighthouse").Kill()
		c.Lighthouse.Shutdown()
		left := leave(a, 0, time.Minute)
		time.Sleep(20 * time.Second)
		synctest.Wait()
		require.Empty(t, left, "the announcement is retried")

		c.StartLighthouse(1)
		assert.Equal(t, []string{"b"}, round(t, 1, b)[0].GetReplicaIds())
		got := <-left
		require.NoError(t, got.Err)
		assert.Less(t, got.Took, 25*time.Second)
		a.Server.Shutdown()
		time.Sleep(10 * time.Second)
		noFailure(t, b, 0)
		assert.Zero(t, c.Log.Count("a member failed"), c.Log.String())
	})
}

// A group announces once on each stream that it leaves: if the stream breaks before the answer, the group
// repeats the announcement on the next one.
func TestALeaveIsRepeatedOnTheNextConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		round(t, 0, a, b)
		left := leave(a, 0, time.Minute)
		time.Sleep(time.Second) // b is still in the step
		c.Net.Interrupt("a", "lighthouse", 100*time.Millisecond)
		time.Sleep(time.Second)
		synctest.Wait()
		require.Empty(t, left)
		assert.Equal(t, []string{"b"}, round(t, 1, b)[0].GetReplicaIds())
		require.NoError(t, (<-left).Err)
		a.Server.Shutdown()
		time.Sleep(10 * time.Second)
		noFailure(t, b, 0)
		assert.Zero(t, c.Log.Count("a member failed"), c.Log.String())
	})
}

func TestALeaveEndsAtItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := c.StartGroup("a", 1)
		round(t, 0, a)
		c.Net.Host("lighthouse").Kill()
		c.Lighthouse.Shutdown()
		got := <-leave(a, 0, 5*time.Second)
		require.Error(t, got.Err)
		assert.InDelta(t, 5*time.Second, got.Took, float64(10*time.Millisecond))
	})
}

func TestTheEndOfARunIsNoFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		round(t, 0, a, b)

		began := time.Now()
		a.Server.Shutdown()
		assert.Less(t, time.Since(began), 10*time.Millisecond)
		// Without the notice, b would wait in a collective until its timeout if a had ended too early.
		notice := nextFailure(t, b, 0)
		assert.Equal(t, "a", notice.GetReplicaId())
		assert.Equal(t, "its manager server was shut down", notice.GetReason())
		assert.InDelta(t, grace, time.Since(began), float64(10*time.Millisecond))

		assert.Zero(t, c.Log.Count("a member failed"), c.Log.String())
		assert.Equal(t, 1, c.Log.Count("a member ended"), c.Log.String())
		var kinds []any
		for _, event := range history(t, c) {
			kinds = append(kinds, event["kind"])
		}
		assert.Contains(t, kinds, "ended")
		assert.NotContains(t, kinds, "failed")
	})
}

func TestAGroupEndsWhileItsLighthouseHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := c.StartGroup("a", 1)
		round(t, 0, a)
		c.Net.Host("lighthouse").Freeze()
		began := time.Now()
		a.Server.Shutdown()
		assert.Less(t, time.Since(began), time.Second)
	})
}

func TestTheLastGroupOfAJobIsDrained(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := c.StartGroup("a", 1)
		round(t, 0, a)
		require.Equal(t, http.StatusOK, drain(t, c, "a"))
		synctest.Wait()
		assert.True(t, round(t, 1, a)[0].Draining)
		got := <-leave(a, 0, time.Minute)
		require.NoError(t, got.Err)
		assert.Less(t, got.Took, time.Second)
	})
}

func TestLeavingEndsAtItsDeadlineWhenAPeerStaysInTheStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		round(t, 0, a, b)
		got := <-leave(a, 0, 3*time.Second)
		require.ErrorContains(t, got.Err, "leave")
		assert.InDelta(t, 3*time.Second, got.Took, float64(100*time.Millisecond))
		noFailure(t, b, 0)
	})
}

func TestLeavingEndsWithTheLighthouse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		round(t, 0, a, b)
		left := leave(a, 0, time.Minute)
		synctest.Wait()
		c.Lighthouse.Shutdown()
		assert.Error(t, (<-left).Err)
	})
}

func TestADrainDuringABrokenStreamIsReceivedOnTheNextOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := c.StartGroup("a", 1)
		round(t, 0, a)
		require.Equal(t, http.StatusOK, drain(t, c, "a"))
		a.Host(-1).Cut() // messages on the way are lost
		time.Sleep(time.Second)
		assert.True(t, round(t, 1, a)[0].Draining)
	})
}

func TestMembersThatCannotBeDrained(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		assert.Equal(t, http.StatusNotFound, drain(t, c, "unknown"))
		client, err := lighthouses.Dial(t.Context(), fttest.LighthouseAddr, time.Second,
			rpc.Dialing{Network: c.Net.Host("old")})
		require.NoError(t, err)
		defer func() { _ = client.Close() }()
		require.NoError(t, client.Heartbeat(t.Context(), "old")) // by a call, like an upstream group
		assert.Equal(t, http.StatusConflict, drain(t, c, "old"))
	})
}

// If the lighthouse is unreachable for a moment, a group that leaves waits for it, so that its end is no
// failure.
func TestLeavingIsRetriedUntilItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		groups := []*fttest.Group{c.StartGroup("a", 1), c.StartGroup("b", 1)}
		round(t, 1, groups...)
		c.Net.Host("lighthouse").Kill()
		c.Lighthouse.Shutdown()
		start := time.Now()
		late := <-leave(groups[0], 0, 3*time.Second)
		require.ErrorContains(t, late.Err, "leave")
		assert.InDelta(t, 3, time.Since(start).Seconds(), 0.5,
			"the announcement is retried until its deadline")

		left := leave(groups[0], 0, time.Minute)
		time.Sleep(2 * time.Second)
		c.StartLighthouse(1)
		round(t, 2, groups[1])
		require.NoError(t, (<-left).Err)
	})
}
