package manager_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/membership/lighthouses"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/rankclient"
	"github.com/torchft/torchft/go/torchftpb"
)

// fake is a Membership whose answers the test sets.
type fake struct {
	fttest.NoMembership
	quorum func(ctx context.Context) (*quorum.Quorum, error)
	asked  atomic.Int64
	closed atomic.Bool
}

func (f *fake) Quorum(ctx context.Context, _ quorum.Member, _ int64) (*quorum.Quorum, error) {
	f.asked.Add(1)
	return f.quorum(ctx)
}
func (f *fake) Close() error { f.closed.Store(true); return nil }

func TestALighthouseErrorReachesEveryRankAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		for retries, want := range map[int64]int64{0: 1, 2: 3} {
			f := &fake{quorum: func(context.Context) (*quorum.Quorum, error) {
				return nil, status.Error(codes.PermissionDenied, "not you")
			}}
			g := c.StartGroup("a", 3, func(cfg *manager.ServerConfig) {
				cfg.Membership, cfg.QuorumRetries = f,
					retries
			})
			for _, answer := range g.QuorumOfAll(1, time.Minute) {
				got := <-answer
				assert.ErrorContains(t, got.Err, "not you")
				assert.False(t, rpc.IsTimeout(got.Err))
				assert.Less(t, got.Took, time.Second)
			}
			assert.Equal(t, want, f.asked.Load())
			g.Server.Shutdown()
			assert.True(t, f.closed.Load())
		}
	})
}

func TestAnUpstreamLighthouseCancelsAnExpiredCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("a", 1, func(cfg *manager.ServerConfig) {
			cfg.Membership = &fake{quorum: func(context.Context) (*quorum.Quorum, error) {
				return nil, status.Error(codes.Canceled, "Timeout expired")
			}}
		})
		assert.True(t, rpc.IsTimeout((<-g.Quorum(0, 1, time.Minute)).Err))
	})
}

func TestAPanicBecomesAnErrorAndTheServerContinues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		f := &fake{quorum: func(context.Context) (*quorum.Quorum, error) { panic("boom") }}
		g := c.StartGroup("a", 2, func(cfg *manager.ServerConfig) { cfg.Membership = f })
		for _, answer := range g.QuorumOfAll(1, time.Minute) {
			got := <-answer
			assert.Equal(t, codes.Internal, status.Code(got.Err))
			assert.ErrorContains(t, got.Err, "boom")
		}
		f.quorum = func(context.Context) (*quorum.Quorum, error) {
			return &quorum.Quorum{ID: 7, Members: []quorum.Member{{ReplicaID: "a", Step: 1}}}, nil
		}
		for _, r := range round(t, 1, g) {
			assert.EqualValues(t, 7, r.GetQuorumId())
		}
	})
}

func TestAQuorumCallNeedsADeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("a", 1)
		conn, err := rpc.Dial(t.Context(), rpc.Dialing{Network: c.Net.Host("x")}, "manager",
			g.Server.Address(), time.Second)
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close()) }()
		_, err = torchftpb.NewManagerServiceClient(conn).Quorum(context.Background(),
			&fttest.Request{})
		assert.Equal(t, codes.InvalidArgument, status.Code(err))
		assert.ErrorContains(t, err, "grpc-timeout")
	})
}

func TestRanksOutsideTheGroupAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("a", 2)
		for _, rank := range []int64{-1, 2} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			_, err := g.Ranks[0].Quorum(ctx, &fttest.Request{GroupRank: rank})
			assert.Equal(t, codes.InvalidArgument, status.Code(err))
			_, err = g.Ranks[0].ShouldCommit(ctx, rank, 1, true)
			assert.Equal(t, codes.InvalidArgument, status.Code(err))
			cancel()
		}
	})
}

func TestKillNeedsThisHostOrTheToken(t *testing.T) {
	for _, tc := range []struct {
		name, configured, sent, from string
		want                         codes.Code
		wantError                    string
	}{
		{"from elsewhere", "", "", "x", codes.PermissionDenied, "it comes from another host"},
		{"from elsewhere, with any token", "", "secret", "x", codes.PermissionDenied,
			"it comes from another host"},
		{"from this host", "", "", "a", codes.OK, ""},
		{"missing", "secret", "", "x", codes.Unauthenticated, "wants the job's token"},
		{"missing, from this host", "secret", "", "a", codes.Unauthenticated, "wants the job's token"},
		{"wrong", "secret", "guess", "x", codes.Unauthenticated, "not the job's"},
		{"right", "secret", "secret", "x", codes.OK, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			configured, sent := security(t, tc.configured), security(t, tc.sent)
			synctest.Test(t, func(t *testing.T) {
				c := fttest.NewCluster(t, 1)
				exited := make(chan int, 1)
				g := c.StartGroup("a", 1, func(cfg *manager.ServerConfig) {
					cfg.Security, cfg.Exit = configured, func(code int) { exited <- code }
				})
				conn, err := rpc.Dial(t.Context(), rpc.Dialing{Security: sent, Network: c.Net.Host(tc.from)},
					"manager", g.Server.Address(), time.Second)
				require.NoError(t, err)
				defer func() { require.NoError(t, conn.Close()) }()
				_, err = torchftpb.NewManagerServiceClient(conn).Kill(t.Context(),
					&torchftpb.KillRequest{Msg: "test"})
				assert.Equal(t, tc.want, status.Code(err), "%v", err)
				if tc.want != codes.OK {
					assert.ErrorContains(t, err, tc.wantError)
				}
				time.Sleep(time.Second)
				assert.Len(t, exited, map[bool]int{true: 1}[tc.want == codes.OK])
			})
		})
	}
}

// security returns settings with this token, or without security if the token is empty.
func security(t *testing.T, token string) auth.Security {
	if token == "" {
		return auth.Security{}
	}
	return auth.Security{TokenFile: fttest.File(t, token)}
}

func TestValidate(t *testing.T) {
	c := &fttest.Cluster{T: t, Net: fttest.NewNetwork(), Log: &fttest.Log{}}
	require.NoError(t, c.ServerConfig("a", 1).Validate())
	for setting, change := range map[string]func(*manager.ServerConfig){
		`replica_id is ""`:                    func(c *manager.ServerConfig) { c.ReplicaID = "" },
		`replica_id has 1025 bytes: allowed`:  func(c *manager.ServerConfig) { c.ReplicaID = strings.Repeat("a", 1025) },
		`token_file (TORCHFT_TOKEN_FILE) is`:  func(c *manager.ServerConfig) { c.Security.TokenFile = "/missing" },
		`replica_id is "\xff"`:                func(c *manager.ServerConfig) { c.ReplicaID = "\xff" },
		`store_addr is "\xff"`:                func(c *manager.ServerConfig) { c.StoreAddr = "\xff" },
		`lighthouse address is "localhost:1"`: func(c *manager.ServerConfig) { c.LighthouseAddr = "localhost:1" },
		`hostname is ""`:                      func(c *manager.ServerConfig) { c.Hostname = "" },
		`hostname is "http://h"`:              func(c *manager.ServerConfig) { c.Hostname = "http://h" },
		`bind is "nowhere"`:                   func(c *manager.ServerConfig) { c.Bind = "nowhere" },
		`world_size is 0: it must be`:         func(c *manager.ServerConfig) { c.WorldSize = 0 },
		`world_size is 1099511627776: it `:    func(c *manager.ServerConfig) { c.WorldSize = 1 << 40 },
		`heartbeat_interval is 0s`:            func(c *manager.ServerConfig) { c.HeartbeatInterval = 0 },
		`connect_timeout is -1s: it must be`:  func(c *manager.ServerConfig) { c.ConnectTimeout = -time.Second },
		`quorum_retries is -1: it must be at`: func(c *manager.ServerConfig) { c.QuorumRetries = -1 },
	} {
		cfg := c.ServerConfig("a", 1)
		change(&cfg)
		_, err := fttest.NewManager(t.Context(), cfg)
		assert.ErrorContains(t, err, setting)
	}
}

func TestNoLighthouse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &fttest.Cluster{T: t, Net: fttest.NewNetwork(), Log: &fttest.Log{}}
		cfg := c.ServerConfig("a", 1)
		cfg.ConnectTimeout = 2 * time.Second
		start := time.Now()
		_, err := fttest.NewManager(t.Context(), cfg)
		assert.ErrorContains(t, err,
			"could not connect to lighthouse at http://lighthouse:29510: timed out after 2s: ")
		assert.ErrorContains(t, err, "connection refused")
		assert.False(t, rpc.IsTimeout(err))
		assert.Equal(t, 2*time.Second, time.Since(start))
	})
}

func TestTheLighthouseMayStartAfterTheManagerServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &fttest.Cluster{T: t, Net: fttest.NewNetwork(), Log: &fttest.Log{}}
		group := fttest.Start(func() (*fttest.Group, error) { return c.StartGroup("a", 1), nil })
		time.Sleep(5 * time.Second)
		c.StartLighthouse(1)
		defer func() { c.Lighthouse.Shutdown() }()
		got := <-group
		assert.Less(t, got.Took, 6500*time.Millisecond)
	})
}

// Two clients of a server in the same process, over real sockets: one calls the server directly, like group
// rank 0 in production, and the other one must use the network.
func TestTheShortcutInOneProcess(t *testing.T) {
	started := startLighthouse(t, 1)
	failing := &reporter{failures: make(chan *torchftpb.Notice)}
	lighthouse, err := lighthouses.Dial(t.Context(), started.Address(), 10*time.Second, rpc.Dialing{})
	require.NoError(t, err)
	defer func() { require.NoError(t, lighthouse.Close()) }()
	failing.quorum = func(ctx context.Context) (*quorum.Quorum, error) {
		return lighthouse.Quorum(ctx, quorum.Member{ReplicaID: "a", WorldSize: 2}, 0)
	}
	cfg := realConfig(started.Address(), "a", 2)
	cfg.Membership = failing
	server, err := fttest.NewManager(t.Context(), cfg)
	require.NoError(t, err)
	defer server.Shutdown()
	near, err := rankclient.Dial(t.Context(), server.Address(), 20*time.Second, rpc.Dialing{})
	require.NoError(t, err)
	far, err := rankclient.Dial(t.Context(), server.Address(), 20*time.Second,
		rpc.Dialing{Network: fttest.OtherTCP})
	require.NoError(t, err)
	defer func() { require.NoError(t, far.Close()) }()

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	sibling := fttest.Start(func() (bool, error) {
		r, err := far.Quorum(ctx, &fttest.Request{GroupRank: 1})
		return r.ReplicaWorldSize == 1, err
	})
	r, err := near.Quorum(ctx, &fttest.Request{GroupRank: 0})
	require.NoError(t, err)
	assert.Equal(t, []string{"a"}, r.GetReplicaIds())
	require.NoError(t, (<-sibling).Err)

	failed := &torchftpb.Notice{Kind: torchftpb.Notice_MEMBER_FAILED, QuorumId: r.GetQuorumId(), ReplicaId: "b",
		Reason: "it ended"}
	failing.failures <- failed
	assert.True(t, proto.Equal(failed, <-near.Notices()))
	assert.True(t, proto.Equal(failed, <-far.Notices()))

	_, err = near.Quorum(context.Background(), &fttest.Request{GroupRank: 0})
	assert.Equal(t, codes.InvalidArgument, status.Code(err),
		"a call in the process is refused by the same rule as one over the network")

	// longer than the vote takes to arrive
	expired, stop := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer stop()
	_, err = near.ShouldCommit(expired, 0, 1, true)
	assert.True(t, rpc.IsTimeout(err), "%v", err)
	assert.ErrorContains(t, err, "ranks 1")

	vote := fttest.Start(func() (bool, error) { return fttest.Commits(far.ShouldCommit(ctx, 1, 1, true)) })
	require.Eventually(t, server.AllRanksWait, time.Minute, time.Millisecond)
	require.NoError(t, near.Close())
	assert.Equal(t, codes.Aborted, status.Code((<-vote).Err), "a closed client counts as a failed rank")
	_, err = near.ShouldCommit(ctx, 0, 1, true)
	assert.ErrorContains(t, err, "closed")

	other, err := rankclient.Dial(t.Context(), server.Address(), 20*time.Second, rpc.Dialing{})
	require.NoError(t, err)
	defer func() { require.NoError(t, other.Close()) }()
	server.Shutdown()
	_, err = other.ShouldCommit(ctx, 0, 1, true)
	assert.Equal(t, codes.Unavailable, status.Code(err))
	_, err = rankclient.Dial(t.Context(), server.Address(), 50*time.Millisecond, rpc.Dialing{})
	assert.ErrorContains(t, err, "could not connect to manager at "+server.Address())
}

func startLighthouse(t testing.TB, minReplicas int) *lighthouse.Server {
	t.Helper()
	cfg := lighthouse.DefaultConfig()
	cfg.Bind, cfg.Hostname, cfg.MinReplicas, cfg.Logger = "[::]:0", "127.0.0.1", minReplicas, fttest.Quiet
	server, err := lighthouse.New(cfg)
	require.NoError(t, err)
	t.Cleanup(server.Shutdown)
	return server
}

func realConfig(lighthouseAddr, replicaID string, worldSize int64) manager.ServerConfig {
	return manager.ServerConfig{
		ReplicaID: replicaID, LighthouseAddr: lighthouseAddr, Hostname: "127.0.0.1", Bind: "[::]:0",
		StoreAddr: "store:1",
		WorldSize: worldSize, HeartbeatInterval: 100 * time.Millisecond, ConnectTimeout: 10 * time.Second,
		Logger: fttest.Quiet,
	}
}

func TestAPortInUse(t *testing.T) {
	lh := startLighthouse(t, 1)
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, lis.Close()) }()
	cfg := realConfig(lh.Address(), "a", 1)
	cfg.Bind = lis.Addr().String()
	_, err = fttest.NewManager(t.Context(), cfg)
	assert.ErrorContains(t, err, `bind is "`+cfg.Bind+`": the port is in use`)
}

func TestGarbageDoesNotEndTheServer(t *testing.T) {
	lh := startLighthouse(t, 1)
	server, err := fttest.NewManager(t.Context(), realConfig(lh.Address(), "a", 1))
	require.NoError(t, err)
	defer server.Shutdown()
	fttest.SendGarbage(t, server.Address())
	client, err := rankclient.Dial(t.Context(), server.Address(), 20*time.Second,
		rpc.Dialing{Network: fttest.OtherTCP})
	require.NoError(t, err)
	defer func() { require.NoError(t, client.Close()) }()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err = client.Quorum(ctx, &fttest.Request{})
	require.NoError(t, err)
}

func TestErrorsKeepTheirClass(t *testing.T) {
	err := rpc.Wrap("quorum", "manager at http://m:1", status.Error(codes.DeadlineExceeded, "too late"))
	assert.True(t, rpc.IsTimeout(err))
	assert.EqualError(t, err, "quorum call to manager at http://m:1 timed out: too late (DeadlineExceeded)")
	assert.True(t, rpc.IsTimeout(context.DeadlineExceeded))
	assert.False(t, rpc.IsTimeout(errors.New("x")))
	assert.NoError(t, rpc.Wrap("quorum", "x", nil))
}
