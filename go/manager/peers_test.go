package manager_test

import (
	"context"
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
	"github.com/torchft/torchft/go/torchftpb"
)

// A group that is cut off from its lighthouse only is evicted. Nothing but its peers can say so: it is not silent, by its own clock, since
// what it sends is lost on the way, or since it has asked the next lighthouse of the list.
func TestAGroupThatIsCutOffFromItsLighthouseOnlyCommitsNothingOnceItIsEvicted(t *testing.T) {
	for name, start := range map[string]func(*testing.T) (*fttest.Cluster, []*fttest.Group){
		"one lighthouse": func(t *testing.T) (*fttest.Cluster, []*fttest.Group) {
			c := fttest.NewCluster(t, 1)
			return c, []*fttest.Group{c.StartGroup("a", 1), c.StartGroup("b", 1), c.StartGroup("d", 1)}
		},
		"two": func(t *testing.T) (*fttest.Cluster, []*fttest.Group) {
			c, _, groups := twoLighthouses(t, "a", "b", "d")
			return c, groups
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, groups := start(t)
				cut, others := groups[0], groups[1:]
				before := round(t, 1, groups...)
				c.Net.Sever("a", "lighthouse")
				c.Net.Sever("lighthouse", "a")

				failure := heard(t, cut, 0)
				assert.Equal(t, membership.Notice{
					Kind: membership.MemberFailed, QuorumID: before[0].QuorumID, ReplicaID: "a", Reason: failure.Reason,
				}, failure)
				assert.Equal(t, failure, heard(t, others[0], 0), "in the same moment as the others")
				got := <-cut.Vote(0, 1, true, time.Minute)
				require.NoError(t, got.Err)
				assert.False(t, got.Value)
				assert.Contains(t, c.Log.String(), "counts as failed in quorum")

				// The second lighthouse, which the group has asked, misses the others. Nobody reports that to them.
				time.Sleep(40 * time.Second)
				for _, g := range others {
					got = <-g.Vote(0, 1, true, time.Minute)
					require.NoError(t, got.Err)
					assert.True(t, got.Value)
				}

				c.Net.Heal("a", "lighthouse")
				c.Net.Heal("lighthouse", "a")
				time.Sleep(20 * time.Second) // it returns to the first lighthouse
				require.Len(t, round(t, 2, groups...)[0].ReplicaIDs, 3)
				got = <-cut.Vote(0, 2, true, time.Minute)
				require.NoError(t, got.Err)
				assert.True(t, got.Value, "in the next quorum it commits")
				select {
				case again := <-cut.Ranks[0].Notices():
					assert.NotEqual(t, failure, again, "two peers notify it, and its rank hears it once")
				default:
				}
			})
		})
	}
}

// Where the others already ask for the step again, the report and the quorum without the evicted group come in one moment.
func TestAnEvictionThatCompletesTheNextQuorumIsForwarded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		cut, b, d := c.StartGroup("a", 1), c.StartGroup("b", 1), c.StartGroup("d", 1)
		before := round(t, 1, cut, b, d)[0]
		c.Net.Sever("a", "lighthouse")
		c.Net.Sever("lighthouse", "a")
		next := round(t, 1, b, d)[0]
		require.Equal(t, []string{"b", "d"}, next.ReplicaIDs)

		assert.Equal(t, before.QuorumID, heard(t, cut, 0).QuorumID)
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

func TestANoticeOfAPeerMustBeAboutThisGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := c.StartGroup("a", 1)
		q := round(t, 1, a)[0]
		assert.Equal(t, codes.InvalidArgument, status.Code(notify(t, c, a, "b", q.QuorumID)))
		require.NoError(t, notify(t, c, a, "a", q.QuorumID+1))
		got := <-a.Vote(0, 1, true, time.Minute)
		require.NoError(t, got.Err)
		assert.True(t, got.Value, "it was about another quorum")
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
