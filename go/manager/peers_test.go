package manager_test

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// A group that is cut off only from its lighthouse is evicted, and only its peers can notify it. It does not count itself as
// silent: it keeps sending messages, which are lost.
func TestAnEvictedGroupThatReachesOnlyItsPeersCommitsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		cut, others := c.StartGroup("a", 1), []*fttest.Group{c.StartGroup("b", 1), c.StartGroup("d", 1)}
		before := round(t, 1, append(others, cut)...)
		c.Net.Sever("a", "lighthouse")
		c.Net.Sever("lighthouse", "a")

		failure := nextFailure(t, cut, 0)
		assert.Equal(t, membership.Notice{
			Kind: membership.MemberFailed, QuorumID: before[0].QuorumID, ReplicaID: "a", Reason: failure.Reason,
		}, failure)
		assert.Equal(t, failure, nextFailure(t, others[0], 0), "the other groups receive the same notice")
		got := <-cut.Vote(0, 1, true, time.Minute)
		require.NoError(t, got.Err)
		assert.False(t, got.Value)
		assert.Contains(t, c.Log.String(), "counts as failed in quorum")
		for _, g := range others {
			got = <-g.Vote(0, 1, true, time.Minute)
			require.NoError(t, got.Err)
			assert.True(t, got.Value)
		}

		c.Net.Heal("a", "lighthouse")
		c.Net.Heal("lighthouse", "a")
		time.Sleep(20 * time.Second) // a has a new stream by then
		require.Len(t, round(t, 2, append(others, cut)...)[0].ReplicaIDs, 3)
		got = <-cut.Vote(0, 2, true, time.Minute)
		require.NoError(t, got.Err)
		assert.True(t, got.Value, "the group that was cut off commits in the next quorum")
		select {
		case again := <-cut.Ranks[0].Notices():
			assert.NotEqual(t, failure, again, "two peers notify it, and its rank is notified once")
		default:
		}
	})
}

// If the others have already asked again, the report and the quorum without the evicted group arrive at the same time.
func TestAnEvictionThatCompletesTheNextQuorumIsForwarded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		cut, b, d := c.StartGroup("a", 1), c.StartGroup("b", 1), c.StartGroup("d", 1)
		before := round(t, 1, cut, b, d)[0]
		c.Net.Sever("a", "lighthouse")
		c.Net.Sever("lighthouse", "a")
		next := round(t, 1, b, d)[0]
		require.Equal(t, []string{"b", "d"}, next.ReplicaIDs)

		assert.Equal(t, before.QuorumID, nextFailure(t, cut, 0).QuorumID)
		got := <-cut.Vote(0, 1, true, time.Minute)
		require.NoError(t, got.Err)
		assert.False(t, got.Value)
		for _, g := range []*fttest.Group{b, d} {
			got = <-g.Vote(0, 1, true, time.Minute)
			require.NoError(t, got.Err)
			assert.True(t, got.Value)
		}
	})
}

// The groups of a rack are neighbours in the list. If the rack is cut off from the lighthouse and its first group is evicted, the
// neighbours of that group receive no report either, and do not count as failed yet.
func TestAGroupOfARackThatIsCutOffFromItsLighthouseIsNotified(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		var groups []*fttest.Group
		for _, name := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
			groups = append(groups, c.StartGroup(name, 1))
		}
		before := round(t, 1, groups...)[0]
		c.Net.Sever("a", "lighthouse")
		c.Net.Sever("lighthouse", "a")
		time.Sleep(2 * time.Second)
		for _, name := range []string{"b", "c", "d"} {
			c.Net.Sever(name, "lighthouse")
			c.Net.Sever("lighthouse", name)
		}
		failure := nextFailure(t, groups[7], 0)
		require.Equal(t, "a", failure.ReplicaID)
		start := time.Now()
		assert.Equal(t, failure, nextFailure(t, groups[0], 0))
		assert.Zero(t, time.Since(start), "a is notified at the same time as the others, and not only when its neighbours are evicted")
		assert.Equal(t, before.QuorumID, failure.QuorumID)
	})
}

func TestANoticeOfAPeerMustBeAboutThisGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := c.StartGroup("a", 1)
		q := round(t, 1, a)[0]
		assert.Equal(t, codes.InvalidArgument, status.Code(notify(t, c, a, "b", q.QuorumID)))
		require.NoError(t, notify(t, c, a, "a", q.QuorumID+1))
		got := <-a.Vote(0, 1, true, time.Minute)
		require.NoError(t, got.Err)
		assert.True(t, got.Value, "the notice was about another quorum")
	})
}

func TestANoticeOfAPeerNeedsTheToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		security := auth.Security{TokenFile: fttest.File(t, "sesame")}
		c := fttest.NewCluster(t, 1, func(l *lighthouse.Config) { l.Security = security })
		a := c.StartGroup("a", 1, func(m *manager.ServerConfig) { m.Security = security })
		assert.Equal(t, codes.Unauthenticated, status.Code(notify(t, c, a, "a", 1)))
	})
}

// If most of a job fails, few members are left to notify the failed ones.
func TestFewMembersAreNotifiedAtTheSameTime(t *testing.T) {
	const others = 100
	for name, vanish := range map[string]bool{"processes end": false, "hosts vanish": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := fttest.NewCluster(t, 1)
				q := &quorum.Quorum{ID: 7}
				for i := range others {
					host := fmt.Sprintf("a%03d", i)
					q.Members = append(q.Members, quorum.Member{ReplicaID: host, Address: "http://" + host + ":1"})
					if vanish {
						c.Net.Block("g", host)
					}
				}
				q.Members = append(q.Members, quorum.Member{ReplicaID: "g", Address: "http://g:1"})
				source := &reporter{failures: make(chan membership.Notice)}
				defer close(source.failures)
				source.quorum = func(context.Context) (*quorum.Quorum, error) { return q, nil }
				var dialing counted
				g := c.StartGroup("g", 1, func(cfg *manager.ServerConfig) {
					dialing.Network = cfg.Network
					cfg.Membership, cfg.Network = source, &dialing
				})
				round(t, 0, g)
				for _, m := range q.Members[:others] {
					source.failures <- membership.Notice{Kind: membership.MemberFailed, QuorumID: 7, ReplicaID: m.ReplicaID}
				}
				synctest.Wait()
				if vanish {
					assert.EqualValues(t, 32, dialing.now.Load())
				}
				time.Sleep(time.Second)
				synctest.Wait()
				assert.Zero(t, dialing.now.Load(), "a notice that is a second old is not sent")
				if !vanish {
					assert.EqualValues(t, others, dialing.all.Load(), "a process that has ended is dialed once")
				}
			})
		})
	}
}

// counted is a network that counts its dials.
type counted struct {
	rpc.Network
	all, now atomic.Int64
}

func (c *counted) Dial(ctx context.Context, address string) (net.Conn, error) {
	c.all.Add(1)
	c.now.Add(1)
	defer c.now.Add(-1)
	return c.Network.Dial(ctx, address)
}

func notify(t *testing.T, c *fttest.Cluster, g *fttest.Group, id string, quorumID int64) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	conn, err := rpc.DialSecurely(ctx, auth.Security{}, c.Net.Host("x"), "manager", g.Server.Address(), time.Second)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close()) }()
	_, err = torchftpb.NewPeerServiceClient(conn).NotifyFailed(ctx, &torchftpb.MemberFailed{ReplicaId: id, QuorumId: quorumID})
	return err
}
