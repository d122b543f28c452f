package manager_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/torchftpb"
)

const theList = "http://lighthouse:29510,http://second:29510"

func listed(cfg *manager.ServerConfig) { cfg.LighthouseAddr = theList }

// twoLighthouses returns a cluster with two lighthouses, and groups that have both in their list.
func twoLighthouses(t *testing.T, names ...string) (*fttest.Cluster, *lighthouse.Server, []*fttest.Group) {
	c := fttest.NewCluster(t, 1)
	second := c.LighthouseOn("second", 1)
	t.Cleanup(second.Shutdown)
	var groups []*fttest.Group
	for _, name := range names {
		groups = append(groups, c.StartGroup(name, 1, listed))
	}
	return c, second, groups
}

func TestALighthouseThatStartsReceivesTheLastQuorum(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b, d := c.StartGroup("a", 1), c.StartGroup("b", 1), c.StartGroup("d", 1)
		before := round(t, 5, a, b, d)[0].QuorumID
		c.Net.Host("lighthouse").Kill()
		c.Lighthouse.Shutdown()
		d.Host(-1).Kill()
		d.Server.Shutdown()
		c.StartLighthouse(1)

		// a asks, and gets no quorum alone: the lighthouse knows that b was in the last one. It does not wait for d: the host of d
		// refuses the probe.
		start := time.Now()
		asked := a.Quorum(0, 6, time.Minute)
		time.Sleep(2 * time.Second)
		status := c.Lighthouse.Status()
		assert.Equal(t, before, status.QuorumID)
		assert.Equal(t, []string{"a", "b", "d"}, status.Quorum)
		assert.Equal(t, 2, status.Healthy)
		other := b.Quorum(0, 6, time.Minute)
		got := <-asked
		require.NoError(t, got.Err)
		assert.Equal(t, []string{"a", "b"}, got.Value.ReplicaIDs)
		assert.Greater(t, got.Value.QuorumID, before)
		require.NoError(t, (<-other).Err)
		assert.Less(t, time.Since(start), 3*time.Second)
	})
}

func TestFailoverToTheSecondLighthouseAndFailbackToTheFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, second, groups := twoLighthouses(t, "a", "b", "d")
		id := round(t, 1, groups...)[0].QuorumID
		assert.Zero(t, second.Status().Healthy, "all members ask the first lighthouse")

		c.Net.Host("lighthouse").Kill()
		c.Lighthouse.Shutdown()
		start := time.Now()
		for step := int64(2); step < 5; step++ {
			got := round(t, step, groups...)[0]
			require.Greater(t, got.QuorumID, id)
			require.Len(t, got.ReplicaIDs, 3)
			id = max(id, got.QuorumID-1)
		}
		assert.Less(t, time.Since(start), 4*time.Second)
		assert.Equal(t, 3, second.Status().Healthy)

		c.StartLighthouse(1)
		time.Sleep(10 * time.Second)
		var got = round(t, 5, groups...)[0]
		assert.Greater(t, got.QuorumID, id)
		assert.Len(t, got.ReplicaIDs, 3)
		assert.Equal(t, 3, c.Lighthouse.Status().Healthy, "all groups failed back")
		time.Sleep(10 * time.Second)
		assert.Zero(t, second.Status().Healthy)
		again := round(t, 6, groups...)[0]
		assert.Equal(t, got.QuorumID, again.QuorumID)
	})
}

func TestNoFailoverInAShortOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, second, groups := twoLighthouses(t, "a", "b")
		round(t, 1, groups...)
		c.Net.Host("lighthouse").Kill()
		c.Lighthouse.Shutdown()
		time.Sleep(500 * time.Millisecond)
		c.StartLighthouse(1)
		round(t, 2, groups...)
		time.Sleep(5 * time.Second)
		assert.Zero(t, second.Status().Healthy)
	})
}

// A minority that is cut off from the first lighthouse gets no quorum, and the others continue.
func TestTwoLighthousesDoNotServeOneJobAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, second, groups := twoLighthouses(t, "a", "b", "d")
		a, b, d := groups[0], groups[1], groups[2]
		round(t, 1, groups...)
		c.Net.Block("a", "lighthouse")
		lone := a.Quorum(0, 2, 30*time.Second)
		for step := int64(2); step < 5; step++ {
			got := round(t, step, b, d)[0]
			assert.Equal(t, []string{"b", "d"}, got.ReplicaIDs)
			time.Sleep(time.Second)
		}
		got := <-lone
		require.Error(t, got.Err)
		assert.Contains(t, second.Status().Reason+got.Err.Error(), "another lighthouse might serve")
		c.Net.Unblock("a", "lighthouse")

		// All train together again once a has reconnected. a asks only then: a request that has been pending since the cut could
		// form a quorum with just one of the others.
		time.Sleep(20 * time.Second)
		asked := a.Quorum(0, 2, time.Minute)
		time.Sleep(time.Second)
		var together []string
		for step := int64(5); len(together) < 3 && step < 7; step++ { // a new member is in the quorum within two rounds
			together = round(t, step, b, d)[0].ReplicaIDs
		}
		assert.Equal(t, []string{"a", "b", "d"}, together)
		require.NoError(t, (<-asked).Err)
	})
}

// A majority that is cut off from the first lighthouse continues at the second one. The first lighthouse sends the others there.
func TestTheMinorityFailsOverToTheLighthouseOfTheMajority(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, second, groups := twoLighthouses(t, "a", "b", "d")
		a, b, d := groups[0], groups[1], groups[2]
		round(t, 1, groups...)
		c.Net.Block("b", "lighthouse")
		c.Net.Block("d", "lighthouse")
		asked := a.Quorum(0, 2, time.Minute)
		start := time.Now()
		got := round(t, 2, b, d)[0]
		assert.Equal(t, []string{"a", "b", "d"}, got.ReplicaIDs, "the first lighthouse has sent a to the second one")
		require.NoError(t, (<-asked).Err)
		assert.Equal(t, 3, second.Status().Healthy)
		assert.Less(t, time.Since(start), 12*time.Second, "the groups wait for about two heartbeat timeouts at most")
	})
}

func TestGroupsWithDifferentListsAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _, _ := twoLighthouses(t, "a")
		b := c.StartGroup("b", 1, func(cfg *manager.ServerConfig) {
			cfg.LighthouseAddr = "http://third:29510,http://lighthouse:29510"
		})
		other := c.StartGroup("other", 1)
		round := func(g *fttest.Group) error { return (<-g.Quorum(0, 1, 5*time.Second)).Err }
		assert.ErrorContains(t, round(other), "TORCHFT_LIGHTHOUSE must be the same for all groups of a job")
		assert.ErrorContains(t, round(b), "for member b this lighthouse is number 2 of 2, for the others number 1 of 2")
	})
}

func TestAListOfAddressesIsChecked(t *testing.T) {
	c := &fttest.Cluster{T: t, Net: fttest.NewNetwork(), Log: &fttest.Log{}}
	for list, wantError := range map[string]string{
		"http://a:1,":            `lighthouse_addr is "": it must be http://host:port`,
		"http://a:1,b:2":         `lighthouse_addr is "b:2"`,
		"http://a:1,http://a:1":  "http://a:1 is in it twice",
		"http://a:1,https://b:1": "all addresses of a list must begin with http://, or all with https://",
		"https://a:1,http://b:1": "all addresses of a list must begin with http://, or all with https://",
	} {
		cfg := c.ServerConfig("g", 1)
		cfg.LighthouseAddr = list
		_, err := manager.NewServer(context.Background(), cfg)
		assert.ErrorContains(t, err, wantError)
	}
	cfg := c.ServerConfig("g", 1)
	cfg.LighthouseAddr, cfg.ConnectTimeout = theList, 100*time.Millisecond
	_, err := manager.NewServer(context.Background(), cfg)
	assert.ErrorContains(t, err, "could not connect to a lighthouse at "+theList)
}

// The first lighthouse is up again, but one of three groups cannot reach it: the job stays at the second one. When all groups can reach
// the first one, they fail back at the same moment, and no group misses a step.
func TestAllFailBackTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, second, groups := twoLighthouses(t, "a", "b", "d")
		round(t, 1, groups...)
		c.Net.Host("lighthouse").Kill()
		c.Lighthouse.Shutdown()
		id := round(t, 2, groups...)[0].QuorumID
		c.Net.Block("d", "lighthouse")
		c.StartLighthouse(1)

		step := int64(3)
		rounds := func(span time.Duration) (changes int) {
			for end := time.Now().Add(span); time.Now().Before(end); step++ {
				got := round(t, step, groups...)[0]
				require.Equal(t, []string{"a", "b", "d"}, got.ReplicaIDs)
				if got.QuorumID != id {
					require.Greater(t, got.QuorumID, id)
					id = got.QuorumID
					changes++
				}
				time.Sleep(300 * time.Millisecond)
			}
			return changes
		}
		assert.Zero(t, rounds(time.Minute))
		assert.Zero(t, c.Lighthouse.Status().Healthy)
		assert.Equal(t, 3, second.Status().Healthy)

		c.Net.Unblock("d", "lighthouse")
		assert.Equal(t, 1, rounds(time.Minute))
		assert.Equal(t, 3, c.Lighthouse.Status().Healthy)
		assert.Zero(t, second.Status().Healthy)
	})
}

// An upstream lighthouse does not send members back: each member fails back by itself, and sends its heartbeats to the first
// lighthouse from then on.
func TestFromALighthouseWithoutStreamsAMemberFailsBackAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		upstream := &upstreamLighthouse{}
		t.Cleanup(serveOn(t, c, "second", func(g *grpc.Server) { torchftpb.RegisterLighthouseServiceServer(g, upstream) }))
		c.Net.Host("lighthouse").Kill()
		c.Lighthouse.Shutdown()
		a := c.StartGroup("a", 1, listed)
		round(t, 1, a)
		require.Positive(t, upstream.quorums.Load())
		c.StartLighthouse(1)
		time.Sleep(5 * time.Second)
		round(t, 2, a)
		time.Sleep(time.Second)
		beats := upstream.beats.Load()
		time.Sleep(30 * time.Second)
		assert.Equal(t, 1, c.Lighthouse.Status().Healthy)
		assert.Equal(t, beats, upstream.beats.Load())
	})
}

// Members fail back whether they have a pending request or are in a step. A failure in that step is then found by the first lighthouse.
func TestFailbackInTheMiddleOfAStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, second, groups := twoLighthouses(t, "a", "b", "d")
		round(t, 1, groups...)
		c.Net.Host("lighthouse").Kill()
		c.Lighthouse.Shutdown()
		id := round(t, 2, groups...)[0].QuorumID
		asked := groups[0].Quorum(0, 3, time.Minute)
		time.Sleep(time.Second)
		require.Equal(t, 1, second.Status().Candidates)
		c.StartLighthouse(1)
		time.Sleep(4 * time.Second)
		require.Empty(t, asked)
		status := c.Lighthouse.Status()
		assert.Equal(t, 3, status.Healthy)
		assert.Equal(t, 1, status.Candidates)
		assert.Equal(t, id, status.QuorumID, "the first lighthouse knows their quorum")
		assert.Zero(t, second.Status().Healthy)

		b, d := groups[1], groups[2]
		d.Host(-1).Kill()
		d.Server.Shutdown()
		other := b.Quorum(0, 3, time.Minute)
		got := <-asked
		require.NoError(t, got.Err)
		assert.Equal(t, []string{"a", "b"}, got.Value.ReplicaIDs)
		require.NoError(t, (<-other).Err)
	})
}

// unaryOnly is a proxy that forwards unary calls to a lighthouse, and answers UNIMPLEMENTED to streams.
type unaryOnly struct {
	torchftpb.UnimplementedLighthouseServiceServer
	to torchftpb.LighthouseServiceClient
}

func (u unaryOnly) Quorum(ctx context.Context, req *torchftpb.LighthouseQuorumRequest) (*torchftpb.LighthouseQuorumResponse, error) {
	return u.to.Quorum(ctx, req)
}

func (u unaryOnly) Heartbeat(ctx context.Context, req *torchftpb.LighthouseHeartbeatRequest) (*torchftpb.LighthouseHeartbeatResponse, error) {
	return u.to.Heartbeat(ctx, req)
}

// ahead first answers with a quorum id far ahead of all clocks, like a lighthouse with a wrong clock; then it forwards calls.
type ahead struct {
	unaryOnly
	id int64
}

func (s *ahead) Quorum(ctx context.Context, req *torchftpb.LighthouseQuorumRequest) (*torchftpb.LighthouseQuorumResponse, error) {
	if id := s.id; id != 0 {
		s.id = 0
		return &torchftpb.LighthouseQuorumResponse{Quorum: &torchftpb.Quorum{QuorumId: id, Participants: []*torchftpb.QuorumMember{req.GetRequester()}}}, nil
	}
	return s.unaryOnly.Quorum(ctx, req)
}

// A lighthouse must not refuse a job whose quorum id is ahead of the lighthouse's clock. A group that makes calls shows its last
// quorum, too, so the lighthouse continues after that id.
func TestACallShowsAQuorumThatIsAheadOfTheClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		conn, err := grpc.NewClient("passthrough:///lighthouse:29510", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(c.Net.Host("between").Dial))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, conn.Close()) })
		far := time.Now().Add(24 * time.Hour).UnixMilli()
		t.Cleanup(serveOn(t, c, "between", func(g *grpc.Server) {
			torchftpb.RegisterLighthouseServiceServer(g, &ahead{unaryOnly{to: torchftpb.NewLighthouseServiceClient(conn)}, far})
		}))
		a := c.StartGroup("a", 1, func(cfg *manager.ServerConfig) { cfg.LighthouseAddr = "http://between:29510" })
		require.Equal(t, far, round(t, 0, a)[0].QuorumID)
		assert.GreaterOrEqual(t, round(t, 1, a)[0].QuorumID, far)
		assert.GreaterOrEqual(t, round(t, 2, a)[0].QuorumID, far)
	})
}

// A proxy blocks the streams of a group with a list of lighthouses. The group gets an error that says so: it cannot fall back to unary
// calls, whose answers contain no term. A group with one lighthouse does fall back to them.
func TestAGroupOfAListThatHasNoStreamsGetsAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _, groups := twoLighthouses(t, "a")
		round(t, 0, groups...)
		conn, err := grpc.NewClient("passthrough:///lighthouse:29510", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(c.Net.Host("between").Dial))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, conn.Close()) })
		t.Cleanup(serveOn(t, c, "between", func(g *grpc.Server) {
			torchftpb.RegisterLighthouseServiceServer(g, unaryOnly{to: torchftpb.NewLighthouseServiceClient(conn)})
		}))
		b := c.StartGroup("b", 1, func(cfg *manager.ServerConfig) { cfg.LighthouseAddr = "http://between:29510,http://second:29510" })
		err = (<-b.Quorum(0, 1, 5*time.Second)).Err
		assert.ErrorContains(t, err, "member b makes calls in place of a stream, and its list has 2 lighthouses")
		assert.ErrorContains(t, err, "Let streams (torchft.MemberService/Attend) through to every lighthouse")
		round(t, 1, groups...) // the refused group delays no quorum
	})
}
