package manager_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/torchftpb"
)

const theList = "http://lighthouse:29510,http://second:29510,http://third:29510"

func TestALighthouseThatStartsReceivesTheLastQuorum(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b, d := c.StartGroup("a", 1), c.StartGroup("b", 1), c.StartGroup("d", 1)
		before := round(t, 5, a, b, d)[0].GetQuorumId()
		c.Net.Host("lighthouse").Kill()
		c.Lighthouse.Shutdown()
		d.Host(-1).Kill()
		d.Server.Shutdown()
		c.StartLighthouse(1)

		// a asks, and gets no quorum alone: the lighthouse knows that b and d were in the last one. It waits
		// for them for the heartbeat timeout.
		start := time.Now()
		asked := a.Quorum(0, 6, time.Minute)
		time.Sleep(2 * time.Second)
		status := c.Lighthouse.Status()
		assert.Equal(t, before, status.QuorumID)
		assert.Equal(t, []string{"a", "b", "d"}, status.Quorum)
		assert.Equal(t, 3, status.Healthy)
		other := b.Quorum(0, 6, time.Minute)
		got := <-asked
		require.NoError(t, got.Err)
		assert.Equal(t, []string{"a", "b"}, got.Value.GetReplicaIds())
		assert.Greater(t, got.Value.GetQuorumId(), before)
		require.NoError(t, (<-other).Err)
		assert.Less(t, time.Since(start), 6*time.Second)
	})
}

func TestAListOfAddressesIsChecked(t *testing.T) {
	c := &fttest.Cluster{T: t, Net: fttest.NewNetwork(), Log: &fttest.Log{}}
	for list, wantError := range map[string]string{
		"http://a:1,":            `lighthouse address is "": it must be http://host:port`,
		"http://a:1,b:2":         `lighthouse address is "b:2"`,
		"http://a:1,http://a:1":  "http://a:1 is in it twice",
		"http://a:1,https://b:1": "all addresses of a list must begin with http://, or all with https://",
		"https://a:1,http://b:1": "all addresses of a list must begin with http://, or all with https://",
	} {
		cfg := c.ServerConfig("g", 1)
		cfg.LighthouseAddr = list
		_, err := fttest.NewManager(context.Background(), cfg)
		assert.ErrorContains(t, err, wantError)
	}
	cfg := c.ServerConfig("g", 1)
	cfg.LighthouseAddr, cfg.ConnectTimeout = theList, 100*time.Millisecond
	_, err := fttest.NewManager(context.Background(), cfg)
	assert.ErrorContains(t, err, "could not connect to a lighthouse at "+theList)
}

// A group whose list has lighthouses that are in no cluster does not start, also if something before them
// does not let streams through.
func TestAListWithoutAClusterEndsTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		cfg := c.ServerConfig("a", 1)
		cfg.LighthouseAddr = theList
		began := time.Now()
		_, err := fttest.NewManager(t.Context(), cfg)
		assert.Equal(t, codes.FailedPrecondition, status.Code(err))
		assert.ErrorContains(t, err, "TORCHFT_LIGHTHOUSE names 3 lighthouses, and this one, "+
			"http://lighthouse:29510, is in no cluster")
		assert.True(t, strings.HasPrefix(rpc.Message(err),
			"attend call to lighthouse at http://lighthouse:29510 failed: TORCHFT_LIGHTHOUSE names"),
			rpc.Message(err))
		assert.Less(t, time.Since(began), time.Second)

		conn, err := grpc.NewClient("passthrough:///lighthouse:29510",
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(c.Net.Host("between").Dial))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, conn.Close()) })
		t.Cleanup(serveOn(t, c, "between", func(g *grpc.Server) {
			torchftpb.RegisterLighthouseServiceServer(g,
				unaryOnly{to: torchftpb.NewLighthouseServiceClient(conn)})
		}))
		b := c.StartGroup("b", 1,
			func(cfg *manager.ServerConfig) { cfg.LighthouseAddr = "http://between:29510,http://second:29510" })
		assert.ErrorContains(t, (<-b.Quorum(0, 1, 5*time.Second)).Err,
			"TORCHFT_LIGHTHOUSE names 2 lighthouses")
	})
}

// unaryOnly is a proxy that forwards unary calls to a lighthouse, and answers UNIMPLEMENTED to streams.
type unaryOnly struct {
	torchftpb.UnimplementedLighthouseServiceServer
	to torchftpb.LighthouseServiceClient
}

func (u unaryOnly) Quorum(
	ctx context.Context, req *torchftpb.LighthouseQuorumRequest,
) (*torchftpb.LighthouseQuorumResponse, error) {
	return u.to.Quorum(ctx, req)
}

func (u unaryOnly) Heartbeat(
	ctx context.Context, req *torchftpb.LighthouseHeartbeatRequest,
) (*torchftpb.LighthouseHeartbeatResponse, error) {
	return u.to.Heartbeat(ctx, req)
}
