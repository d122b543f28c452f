package manager_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/rankclient"
	"github.com/torchft/torchft/go/torchftpb"
)

// upstreamManager has no sessions, like an upstream manager server.
type upstreamManager struct {
	torchftpb.UnimplementedManagerServiceServer
}

func (upstreamManager) CheckpointMetadata(
	context.Context, *torchftpb.CheckpointMetadataRequest,
) (*torchftpb.CheckpointMetadataResponse, error) {
	return &torchftpb.CheckpointMetadataResponse{CheckpointMetadata: "http://upstream:2"}, nil
}

// A group may heal from one of upstream. Its ranks train with a server of this package.
func TestAServerWithoutSessionsGivesItsMetadata(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := fttest.NewNetwork()
		defer net.Host("upstream").Serve(t, ":1",
			func(g *grpc.Server) { torchftpb.RegisterManagerServiceServer(g, upstreamManager{}) })()
		client, err := rankclient.Dial(t.Context(), "http://upstream:1", time.Second,
			rpc.Dialing{Network: net.Host("rank")})
		require.NoError(t, err)
		defer func() { require.NoError(t, client.Close()) }()

		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		metadata, err := client.CheckpointMetadata(ctx, 0)
		require.NoError(t, err)
		assert.Equal(t, "http://upstream:2", metadata)
		_, err = client.Quorum(ctx, &fttest.Request{})
		assert.Equal(t, codes.Unimplemented, status.Code(err))
	})
}

func TestASessionReconnectsWhenItsConnectionBreaks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("a", 1)
		for step := range int64(3) {
			require.NoError(t, (<-g.Quorum(0, step, time.Minute)).Err)
			g.Host(0).Cut()
			synctest.Wait()
			time.Sleep(time.Second) // gRPC connects again
			require.NoError(t, (<-g.Vote(0, step, true, time.Minute)).Err)
		}
	})
}

func TestACallInProgressEndsWithItsConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("a", 2)
		vote := g.Vote(1, 0, true, time.Minute)
		synctest.Wait()
		g.Host(-1).Kill()
		got := <-vote
		assert.Equal(t, codes.Unavailable, status.Code(got.Err))
		assert.Less(t, got.Took, atOnce)
	})
}

func TestARankThatCancelsIsNoVoter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("a", 3)
		ctx, cancel := context.WithCancel(t.Context())
		vote := fttest.Start(func() (bool, error) {
			return fttest.Commits(g.Ranks[0].ShouldCommit(ctx, 0, 5, true))
		})
		sibling := g.Vote(1, 5, true, time.Minute)
		synctest.Wait()
		cancel()
		assert.True(t, rpc.IsTimeout((<-vote).Err))
		got := <-sibling
		assert.ErrorContains(t, got.Err, "rank 0 no longer waits: its call was cancelled")
		assert.Less(t, got.Took, atOnce,
			"the server has received the cancellation, long before the call's own deadline")
	})
}

func TestInvalidRequestsOfASession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("a", 1)
		stream := rawSession(t, c, g)
		fails := func(call uint64, code codes.Code) {
			t.Helper()
			resp, err := stream.Recv()
			require.NoError(t, err)
			assert.Equal(t, call, resp.GetCall())
			assert.Equal(t, uint32(code), resp.GetFailure().GetCode(), resp.GetFailure().GetMessage())
		}
		require.NoError(t, stream.Send(&torchftpb.RankRequest{Call: 1, TimeoutUs: 1e6}))
		fails(1, codes.Unimplemented)
		require.NoError(t, stream.Send(&torchftpb.RankRequest{Call: 2,
			Request: &torchftpb.RankRequest_ShouldCommit{}}))
		fails(2, codes.InvalidArgument) // the call has no timeout
		require.NoError(t, stream.Send(&torchftpb.RankRequest{Call: 99,
			Request: &torchftpb.RankRequest_Cancel{Cancel: true}}))
		require.NoError(t, stream.Send(&torchftpb.RankRequest{Call: 3, TimeoutUs: 1e6,
			Request: &torchftpb.RankRequest_ShouldCommit{
				ShouldCommit: &torchftpb.ShouldCommitRequest{GroupRank: 7},
			}}))
		fails(3, codes.InvalidArgument)
		require.NoError(t, stream.CloseSend())
		_, err := stream.Recv()
		require.Error(t, err)
	})
}

// reporter is a membership with notices of failures.
type reporter struct {
	fake
	failures chan *torchftpb.Notice
}

func (t *reporter) Notices() <-chan *torchftpb.Notice { return t.failures }

func TestFailuresReachEveryRank(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		source := &reporter{failures: make(chan *torchftpb.Notice)}
		source.quorum = func(context.Context) (*quorum.Quorum, error) {
			return &quorum.Quorum{ID: 7, Members: []quorum.Member{{ReplicaID: "a"}}}, nil
		}
		g := c.StartGroup("a", 2, func(cfg *manager.ServerConfig) { cfg.Membership = source })
		round(t, 0, g) // opens the sessions

		failed := &torchftpb.Notice{Kind: torchftpb.Notice_MEMBER_FAILED, QuorumId: 7, ReplicaId: "b",
			Reason: "its connection broke"}
		source.failures <- failed
		for _, client := range g.Ranks {
			assert.True(t, proto.Equal(failed, <-client.Notices()))
		}
		g.Host(0).Cut()
		synctest.Wait()
		time.Sleep(time.Second)
		back := answers{g.Quorum(0, 1, time.Minute)} // in a new session
		synctest.Wait()
		append(back, g.Quorum(1, 1, time.Minute)).results(t)
		source.failures <- failed
		for _, client := range g.Ranks {
			assert.True(t, proto.Equal(failed, <-client.Notices()))
		}
		close(source.failures)
	})
}

func TestASessionHasABoundOnItsCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		// no vote is answered
		g := c.StartGroup("g", 1, func(cfg *manager.ServerConfig) { cfg.WorldSize = 101 })
		stream := rawSession(t, c, g)
		for call := range uint64(100) {
			_ = stream.Send(&torchftpb.RankRequest{Call: call + 1, TimeoutUs: 60e6,
				Request: &torchftpb.RankRequest_ShouldCommit{
					ShouldCommit: &torchftpb.ShouldCommitRequest{GroupRank: int64(call), Step: 1},
				}})
		}
		for {
			if _, err := stream.Recv(); err != nil {
				break // the stream has ended, long before the calls would have
			}
		}
		assert.Positive(t, c.Log.Count("a session is ended"))
	})
}

func TestASessionThatReusesTheNumberOfACallIsEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("g", 2)
		round(t, 0, g)
		stream := rawSession(t, c, g)
		for range 2 {
			require.NoError(t, stream.Send(&torchftpb.RankRequest{Call: 7, TimeoutUs: 60e6,
				Request: &torchftpb.RankRequest_ShouldCommit{
					ShouldCommit: &torchftpb.ShouldCommitRequest{GroupRank: 1},
				}}))
		}
		var err error
		for err == nil { // the first call may be answered before the end
			_, err = stream.Recv()
		}
		assert.Positive(t, c.Log.Count("a session is ended"))
		round(t, 1, g)
		assert.Zero(t, c.Log.Count("internal error"))
	})
}

// The answers to all ranks are sent one after the other. A rank that asks, and does not read, must not delay
// those to the others for longer than twice stuckTime (rpc.Pool).
func TestARankThatDoesNotReadDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		large := &quorum.Quorum{ID: 1, Members: []quorum.Member{{ReplicaID: "g"}}}
		for i := range 20_000 { // four answers exceed what is sent to a rank that does not read
			large.Members = append(large.Members, quorum.Member{ReplicaID: fmt.Sprintf("%060d", i)})
		}
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("g", 3, func(cfg *manager.ServerConfig) {
			cfg.Membership = &fake{quorum: func(context.Context) (*quorum.Quorum, error) {
				return large,
					nil
			}}
		})
		deaf := rawSession(t, c, g)
		for step := range int64(6) {
			require.NoError(t, deaf.Send(&torchftpb.RankRequest{Call: uint64(step) + 1, TimeoutUs: 60e6,
				Request: &torchftpb.RankRequest_Quorum{
					Quorum: &fttest.Request{Step: step},
				}}))
			synctest.Wait()
			asked := answers{g.Quorum(1, step, time.Minute), g.Quorum(2, step, time.Minute)}
			for _, answer := range asked {
				got := <-answer
				require.NoError(t, got.Err)
				assert.LessOrEqual(t, got.Took, 50*time.Millisecond)
			}
		}
	})
}

// rawSession opens the stream of a rank without its client, for the test to write to.
func rawSession(
	t *testing.T, c *fttest.Cluster, g *fttest.Group,
) grpc.BidiStreamingClient[torchftpb.RankRequest, torchftpb.RankResponse] {
	t.Helper()
	conn, err := rpc.Dial(t.Context(), rpc.Dialing{Network: c.Net.Host("x")}, "manager", g.Server.Address(),
		time.Second)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	stream, err := torchftpb.NewRankServiceClient(conn).Session(t.Context())
	require.NoError(t, err)
	return stream
}
