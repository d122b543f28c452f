package lighthouse_test

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
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/testmain"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/membership/lighthouses"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

func TestMain(m *testing.M) { testmain.Run(m) }

// dial connects a client on a new host to the cluster's lighthouse.
func dial(t *testing.T, c *fttest.Cluster, host string) *lighthouses.Client {
	t.Helper()
	client, err := lighthouses.Dial(t.Context(), fttest.LighthouseAddr, time.Second,
		rpc.Dialing{Network: c.Net.Host(host)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	return client
}

type result = fttest.Answer[*quorum.Quorum]

func ask(client *lighthouses.Client, m quorum.Member, timeout time.Duration) <-chan result {
	return fttest.Start(func() (*quorum.Quorum, error) {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		return client.Quorum(ctx, m, 0)
	})
}

func TestEveryoneGetsTheSameQuorum(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const groups = 50
		c := fttest.NewCluster(t, groups)
		client := dial(t, c, "x")
		var answers []<-chan result
		for i := range groups {
			answers = append(answers, ask(client, quorum.Member{
				ReplicaID: fmt.Sprintf("g%02d", i), Address: "http://a:1", StoreAddress: "s:1",
				Step: int64(i), WorldSize: 8,
				Data: `{"a": 1}`, CommitFailures: 3, Handles: []string{"h0", "h1"},
			}, time.Minute))
		}
		first := <-answers[0]
		require.NoError(t, first.Err)
		require.Len(t, first.Value.Members, groups)
		assert.Equal(t, quorum.Member{
			ReplicaID: "g07", Address: "http://a:1", StoreAddress: "s:1", Step: 7, WorldSize: 8,
			Data: `{"a": 1}`, CommitFailures: 3, Handles: []string{"h0", "h1"},
		}, first.Value.Members[7])
		for _, answer := range answers[1:] {
			got := <-answer
			require.NoError(t, got.Err)
			assert.Equal(t, first.Value, got.Value)
		}
	})
}

func TestUnknownFieldsOfAMemberAreHandedOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		conn, err := rpc.Dial(t.Context(), rpc.Dialing{Network: c.Net.Host("x")}, "lighthouse",
			fttest.LighthouseAddr, time.Second)
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close()) }()
		newer := &torchftpb.QuorumMember{ReplicaId: "newer"}
		unknown := protowire.AppendString(protowire.AppendTag(nil, 2026, protowire.BytesType),
			"from a later version")
		newer.ProtoReflect().SetUnknown(unknown)
		resp, err := torchftpb.NewLighthouseServiceClient(conn).Quorum(t.Context(),
			&torchftpb.LighthouseQuorumRequest{Requester: newer})
		require.NoError(t, err)
		require.Len(t, resp.Quorum.Participants, 1)
		assert.Equal(t, unknown, []byte(resp.Quorum.Participants[0].ProtoReflect().GetUnknown()))
	})
}

func TestARequestOlderThanTheLatestIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		conn, err := rpc.Dial(t.Context(), rpc.Dialing{Network: c.Net.Host("x")}, "lighthouse",
			fttest.LighthouseAddr, time.Second)
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close()) }()
		ask := func(number uint64) error {
			_, err := torchftpb.NewLighthouseServiceClient(conn).Quorum(t.Context(),
				&torchftpb.LighthouseQuorumRequest{Requester: &torchftpb.QuorumMember{ReplicaId: "a"},
					RequestNumber: number})
			return err
		}
		require.NoError(t, ask(2))
		err = ask(1)
		assert.Equal(t, codes.Aborted, status.Code(err))
		assert.ErrorContains(t, err, "a newer request of a came before this one")
		require.NoError(t, ask(3))
		require.NoError(t, ask(0), "an upstream member does not number its requests")
	})
}

func TestShutdownEndsEveryWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 3)
		a, b := ask(dial(t, c, "a"), quorum.Member{ReplicaID: "a"}, time.Minute),
			ask(dial(t, c, "b"), quorum.Member{ReplicaID: "b"}, time.Minute)
		synctest.Wait()
		assert.Equal(t, 2, c.Lighthouse.Status().Waiters)
		start := time.Now()
		c.Lighthouse.Shutdown()
		for _, answer := range []<-chan result{a, b} {
			got := <-answer
			assert.Equal(t, codes.Unavailable, status.Code(got.Err))
			assert.ErrorContains(t, got.Err, "shutting down")
		}
		assert.Zero(t, time.Since(start))
	})
}

func TestAFrozenPeerDoesNotDelayShutdown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 3)
		waiting := ask(dial(t, c, "a"), quorum.Member{ReplicaID: "a"}, 10*time.Second)
		synctest.Wait()
		c.Net.Host("a").Freeze()
		start := time.Now()
		c.Lighthouse.Shutdown()
		assert.LessOrEqual(t, time.Since(start), time.Second)
		require.Error(t, (<-waiting).Err)
	})
}

func TestAWithdrawnRequestIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		ghost, a, b := dial(t, c, "ghost"), dial(t, c, "a"), dial(t, c, "b")
		expired := <-ask(ghost, quorum.Member{ReplicaID: "ghost"}, time.Second)
		assert.True(t, rpc.IsTimeout(expired.Err))
		cut := ask(dial(t, c, "cut"), quorum.Member{ReplicaID: "cut"}, time.Minute)
		synctest.Wait()
		c.Net.Host("cut").Cut()
		require.Error(t, (<-cut).Err)
		synctest.Wait()
		assert.Zero(t, c.Lighthouse.Status().Waiters)

		// longer than the heartbeat timeout, and each request counted as a heartbeat
		time.Sleep(6 * time.Second)
		first, second := ask(a, quorum.Member{ReplicaID: "a"}, time.Minute),
			ask(b, quorum.Member{ReplicaID: "b"}, time.Minute)
		for _, answer := range []<-chan result{first, second} {
			got := <-answer
			require.NoError(t, got.Err)
			assert.Len(t, got.Value.Members, 2)
		}
	})
}

func TestHeartbeatsOfEndedGroupsAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		client := dial(t, c, "x")
		for i := range 100 { // a group that is restarted many times, each time under a new name
			require.NoError(t, client.Heartbeat(t.Context(), fmt.Sprintf("a:%d", i)))
			time.Sleep(time.Minute)
		}
		assert.LessOrEqual(t, len(c.Lighthouse.Status().Members), 1)
	})
}

func TestIDsGrowAcrossARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		client := dial(t, c, "x")
		last := int64(0)
		for range 3 {
			for range 3 {
				got := <-ask(client, quorum.Member{ReplicaID: "a", CommitFailures: 1}, time.Minute)
				require.NoError(t, got.Err)
				assert.Greater(t, got.Value.ID, last)
				last = got.Value.ID
			}
			c.Lighthouse.Shutdown()
			time.Sleep(time.Second)
			c.StartLighthouse(1)
			time.Sleep(2 * time.Second) // the client reconnects
		}
	})
}

func TestARequestWithoutAUsableNameIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		client := dial(t, c, "x")
		_, err := client.Quorum(t.Context(), quorum.Member{}, 0)
		assert.Equal(t, codes.InvalidArgument, status.Code(err))
		assert.Equal(t, codes.InvalidArgument, status.Code(client.Heartbeat(t.Context(), "")))

		long := strings.Repeat("x", rpc.MaxReplicaID+1)
		_, err = client.Quorum(t.Context(), quorum.Member{ReplicaID: long}, 0)
		assert.Equal(t, codes.InvalidArgument, status.Code(err))
		assert.ErrorContains(t, err, "replica_id has 1025 bytes: allowed are 1024")
		assert.Equal(t, codes.InvalidArgument, status.Code(client.Heartbeat(t.Context(), long)))
		assert.Empty(t, c.Lighthouse.Status().Members)
		assert.NoError(t, client.Heartbeat(t.Context(), long[1:]))
	})
}

func TestALongWaitIsLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		client := dial(t, c, "a")
		answer := ask(client, quorum.Member{ReplicaID: "a"}, time.Minute)
		time.Sleep(4 * time.Second)
		assert.Zero(t, c.Log.Count("no quorum yet"))
		for range 50 {
			require.NoError(t, client.Heartbeat(t.Context(), "a"))
			time.Sleep(time.Second)
		}
		require.Error(t, (<-answer).Err)
		assert.Equal(t, 1, c.Log.Count("no quorum yet"), "%s", c.Log)
	})
}

func TestAPortInUse(t *testing.T) {
	cfg := lighthouse.DefaultConfig()
	cfg.Bind, cfg.MinReplicas, cfg.Logger, cfg.Hostname = "127.0.0.1:0", 1, fttest.Quiet, "127.0.0.1"
	first, err := lighthouse.New(cfg)
	require.NoError(t, err)
	defer first.Shutdown()
	cfg.Bind = first.Address()[len("http://"):]
	_, err = lighthouse.New(cfg)
	assert.ErrorContains(t, err, `bind is "`+cfg.Bind+`": the port is in use`)
}
