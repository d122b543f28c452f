package manager_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/rankclient"
	"github.com/torchft/torchft/go/relay"
	"github.com/torchft/torchft/go/torchftpb"
)

// hold is the longest time for which a relay holds requests in these tests.
const hold = 20 * time.Millisecond

// startRelay starts a relay of a group's manager server. It is closed at the end of the test.
func startRelay(c *fttest.Cluster, g *fttest.Group, network rpc.Network) *relay.Relay {
	c.T.Helper()
	r, err := relay.Start(context.Background(), relay.Config{
		Manager: g.Server.Address(), Hostname: "relay", Bind: "[::]:0", ConnectTimeout: time.Second, Hold: hold, Network: network, Logger: fttest.Quiet,
	})
	require.NoError(c.T, err)
	c.T.Cleanup(func() { _ = r.Close() })
	return r
}

// dialRelayed connects a client, which is on the given host, through a relay. It returns the client and the client's network, which
// counts the connections.
func dialRelayed(c *fttest.Cluster, g *fttest.Group, host, relay string) (*rankclient.Client, *dials) {
	c.T.Helper()
	network := &dials{Network: c.Net.Host(host)}
	client, err := rankclient.Dial(context.Background(), g.Server.Address(), 10*time.Second, rankclient.WithNetwork(network), rankclient.WithRelay(relay))
	require.NoError(c.T, err)
	c.T.Cleanup(func() { _ = client.Close() })
	return client, network
}

// dials is a network that counts the calls of Dial.
type dials struct {
	rpc.Network
	n atomic.Int64
}

func (d *dials) Dial(ctx context.Context, address string) (net.Conn, error) {
	d.n.Add(1)
	return d.Network.Dial(ctx, address)
}

// relayedGroup returns a group whose ranks all use a relay on the host "relay". The last result has the network of each rank's client.
func relayedGroup(t *testing.T, ranks int64, change ...func(*manager.ServerConfig)) (*fttest.Group, *fttest.Cluster, *relay.Relay, []*dials) {
	t.Helper()
	c := fttest.NewCluster(t, 1)
	g := c.StartGroup("g", ranks, change...)
	r := startRelay(c, g, c.Net.Host("relay"))
	networks := make([]*dials, ranks)
	for rank := range g.Ranks {
		require.NoError(t, g.Ranks[rank].Close())
		g.Ranks[rank], networks[rank] = dialRelayed(c, g, fmt.Sprintf("g/%d", rank), r.Address())
	}
	synctest.Wait()
	return g, c, r, networks
}

// votesOf makes all ranks of a group vote for the commit of a step.
func votesOf(g *fttest.Group, step int64) (votes []<-chan fttest.Answer[bool]) {
	for rank := range g.Ranks {
		votes = append(votes, g.Vote(rank, step, true, time.Minute))
	}
	return votes
}

// committed waits for the answers to votes, and requires the decision to commit.
func committed(t *testing.T, votes []<-chan fttest.Answer[bool]) {
	t.Helper()
	for _, vote := range votes {
		got := <-vote
		require.NoError(t, got.Err)
		assert.True(t, got.Value)
	}
}

func TestRanksAskThroughTheirRelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _, _, networks := relayedGroup(t, 4)
		for step := range int64(3) {
			round(t, step, g)
			committed(t, votesOf(g, step))
		}
		for _, d := range networks {
			assert.EqualValues(t, 1, d.n.Load(), "one connection, to the relay")
		}
		for rank := range 3 {
			g.Vote(rank, 3, true, time.Minute)
		}
		time.Sleep(time.Second)
		assert.Len(t, g.Server.Status().Vote.Waiting, 3, "requests wait at the relay for a short time only")
		last := <-g.Vote(3, 3, true, time.Minute)
		require.NoError(t, last.Err)
		assert.Zero(t, last.Took, "the last rank does not wait")
	})
}

func TestARankBehindARelayThatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _, _, networks := relayedGroup(t, 3)
		round(t, 0, g)
		waits := g.Quorum(1, 1, time.Minute)
		time.Sleep(time.Second)
		g.Host(2).Kill()
		got := <-waits
		assert.Equal(t, codes.Aborted, status.Code(got.Err), "the failed rank is noticed as if it had a connection of its own")
		assert.ErrorContains(t, got.Err, "rank 2 of replica group g has failed: its connection broke")
		assert.Equal(t, time.Second, got.Took)
		assert.EqualValues(t, 1, networks[1].n.Load())
	})
}

// The relay's process is killed at one of 14 times, from the beginning of a vote until shortly after its end. Rank 1 votes for or
// against the commit. Each rank gets the right decision or an error, and all ranks continue over their own connections to the manager
// server.
func TestARelayThatEndsAtEachMomentOfAVote(t *testing.T) {
	for _, no := range []bool{false, true} {
		for moment := range 14 {
			synctest.Test(t, func(t *testing.T) {
				g, c, _, networks := relayedGroup(t, 3)
				round(t, 0, g)
				time.AfterFunc(time.Duration(moment)*5*time.Millisecond, c.Net.Host("relay").Kill)
				began := time.Now()
				var ranks []<-chan fttest.Answer[bool]
				for rank, client := range g.Ranks { // 15 ms apart: when the relay is killed, votes may be held, sent, or answered
					ranks = append(ranks, fttest.Start(func() (bool, error) {
						commit, err := client.ShouldCommit(t.Context(), int64(rank), 0, !no || rank != 1)
						for { // whatever the outcome of the vote, the rank asks for the next quorum until it gets it
							ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
							_, failed := client.Quorum(ctx, rankclient.Request{GroupRank: int64(rank), Step: 1})
							if cancel(); failed == nil {
								return commit, err
							}
							time.Sleep(10 * time.Millisecond)
						}
					}))
					time.Sleep(15 * time.Millisecond)
				}
				for rank, all := range ranks {
					if got := <-all; got.Err == nil {
						assert.Equal(t, !no, got.Value, "rank %d", rank)
					} else {
						assert.Contains(t, []codes.Code{codes.Unavailable, codes.Aborted}, status.Code(got.Err), "%v", got.Err)
					}
				}
				assert.Less(t, time.Since(began), 2*time.Second)
				time.Sleep(time.Second) // the relay has ended in all cases, and the ranks have connected to the server
				committed(t, votesOf(g, 1))
				for _, d := range networks {
					assert.EqualValues(t, 2, d.n.Load(), "the relay, and the server itself")
				}
				assert.Zero(t, c.Log.Count("internal error"))
			})
		}
	}
}

func TestARelayWhoseStreamBreaksLosesOneCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c, _, _ := relayedGroup(t, 3)
		round(t, 0, g)
		vote := g.Vote(2, 0, true, time.Minute)
		time.Sleep(time.Second)
		c.Net.Interrupt("relay", "g", time.Hour)
		got := <-vote
		assert.Equal(t, codes.Unavailable, status.Code(got.Err), "%v", got.Err)
		assert.Equal(t, time.Second, got.Took)
		time.Sleep(100 * time.Millisecond) // the ranks connect to the server
		round(t, 0, g)
		committed(t, votesOf(g, 0))
	})
}

func TestARelayIsClosedAfterTheCallsInProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _, r, _ := relayedGroup(t, 2)
		round(t, 0, g)
		votes := []<-chan fttest.Answer[bool]{g.Vote(0, 0, true, time.Minute)}
		time.Sleep(100 * time.Millisecond)
		closed := fttest.Start(func() (any, error) { return nil, r.Close() })
		time.Sleep(500 * time.Millisecond)
		committed(t, append(votes, g.Vote(1, 0, true, time.Minute)))
		got := <-closed
		require.NoError(t, got.Err)
		assert.Equal(t, 500*time.Millisecond, got.Took)
		time.Sleep(100 * time.Millisecond) // the ranks connect to the server
		round(t, 1, g)
	})
}

func TestARelayWithCallsInProgressIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _, r, _ := relayedGroup(t, 2)
		vote := g.Vote(0, 0, true, time.Minute)
		synctest.Wait()
		require.NoError(t, r.Close())
		assert.Equal(t, codes.Unavailable, status.Code((<-vote).Err))
	})
}

func TestNoticesReachTheRanksBehindARelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &reporter{failures: make(chan membership.Notice)}
		defer close(source.failures)
		source.quorum = func(context.Context) (*quorum.Quorum, error) {
			return &quorum.Quorum{ID: 7, Members: []quorum.Member{{ReplicaID: "g"}}}, nil
		}
		g, _, _, _ := relayedGroup(t, 3, func(cfg *manager.ServerConfig) { cfg.Membership = source })
		round(t, 0, g) // the server learns of a session from its first request
		failed := membership.Notice{QuorumID: 7, ReplicaID: "b", Reason: "its connection broke"}
		source.failures <- failed
		for _, client := range g.Ranks {
			assert.Equal(t, failed, <-client.Notices())
		}
	})
}

// relayStream opens a stream to a group's manager server, as a relay does, for the test to write to.
func relayStream(t *testing.T, c *fttest.Cluster, g *fttest.Group) grpc.BidiStreamingClient[torchftpb.RelayRequests, torchftpb.RelayResponses] {
	t.Helper()
	conn, err := rpc.Dial(t.Context(), c.Net.Host("relay"), "manager", g.Server.Address(), time.Second)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	stream, err := torchftpb.NewRankServiceClient(conn).Relay(ctx)
	require.NoError(t, err)
	_, err = stream.Recv() // the server's first message is empty
	require.NoError(t, err)
	return stream
}

// voteOn returns a vote of rank 0 against the commit of step 0, as a relay sends it for a session.
func voteOn(session, call uint64) *torchftpb.RelayRequest {
	return &torchftpb.RelayRequest{Session: session, Request: &torchftpb.RankRequest{
		Call: call, TimeoutUs: time.Minute.Microseconds(), Request: &torchftpb.RankRequest_ShouldCommit{ShouldCommit: &torchftpb.ShouldCommitRequest{}},
	}}
}

func TestARelayWithMoreSessionsThanRanksIsEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("g", 2)
		stream := relayStream(t, c, g)
		for session := range uint64(5) {
			require.NoError(t, stream.Send(&torchftpb.RelayRequests{Requests: []*torchftpb.RelayRequest{voteOn(session+1, 1)}}))
		}
		var err error
		for err == nil {
			_, err = stream.Recv()
		}
		assert.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
		assert.ErrorContains(t, err, "a relay has more sessions than twice the world size of 2")
	})
}

// In a job of thousands of groups, a message with the answers for all ranks of a relay could be larger than a relay accepts. So the
// number of replica ids in a message is bounded (mostNamed): two of these answers fit.
func TestLargeAnswersForARelayAreSeveralMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const groups, ranks = 40_000, 5
		large := &quorum.Quorum{ID: 1, Members: []quorum.Member{{ReplicaID: "g"}}}
		for i := range groups - 1 {
			large.Members = append(large.Members, quorum.Member{ReplicaID: fmt.Sprintf("h%d", i)})
		}
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("g", ranks, func(cfg *manager.ServerConfig) {
			cfg.Membership = &fake{quorum: func(context.Context) (*quorum.Quorum, error) { return large, nil }}
		})
		stream := relayStream(t, c, g)
		message := &torchftpb.RelayRequests{}
		for rank := range uint64(ranks) {
			message.Requests = append(message.Requests, &torchftpb.RelayRequest{Session: rank + 1, Request: &torchftpb.RankRequest{
				Call: 1, TimeoutUs: time.Minute.Microseconds(),
				Request: &torchftpb.RankRequest_Quorum{Quorum: &torchftpb.ManagerQuorumRequest{GroupRank: int64(rank)}},
			}})
		}
		require.NoError(t, stream.Send(message))
		for answered := 0; answered < ranks; {
			message, err := stream.Recv()
			require.NoError(t, err)
			assert.LessOrEqual(t, len(message.GetResponses()), 2)
			for _, resp := range message.GetResponses() {
				require.Len(t, resp.GetResponse().GetQuorum().GetReplicaIds(), groups)
				answered++
			}
		}
	})
}

type rankSession = grpc.BidiStreamingClient[torchftpb.RankRequest, torchftpb.RankResponse]

// openRawSession opens a session at a relay without a rank's client, for the test to write to. The returned function ends the session.
func openRawSession(t *testing.T, c *fttest.Cluster, r *relay.Relay) (rankSession, func()) {
	t.Helper()
	conn, err := rpc.Dial(t.Context(), c.Net.Host("bad"), "relay", r.Address(), time.Second)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	session, err := torchftpb.NewRankServiceClient(conn).Session(ctx)
	require.NoError(t, err)
	return session, func() {
		cancel()
		require.NoError(t, conn.Close())
	}
}

// endOf waits for the end of a session, and returns its error. Answers that arrive before it are skipped.
func endOf(session rankSession) error {
	for {
		if _, err := session.Recv(); err != nil {
			return err
		}
	}
}

func TestOnlyTheSessionOfARankThatReusesACallNumberIsEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c, r, _ := relayedGroup(t, 2)
		round(t, 0, g)
		bad, end := openRawSession(t, c, r)
		defer end()
		for range 2 { // two calls with the same number, 7
			require.NoError(t, bad.Send(voteOn(1, 7).GetRequest()))
		}
		err := endOf(bad) // the first call may be answered before the end
		assert.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
		assert.ErrorContains(t, err, "the manager server has ended this session")
		round(t, 1, g)
		assert.Zero(t, c.Log.Count("internal error"))
	})
}

// A manager server ends the whole stream of a relay if a message is too large. So the relay must not send a too large request of a
// rank: it ends the session of that rank, and the other ranks keep theirs.
func TestOnlyTheSessionOfARankWithATooLargeRequestIsEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c, r, networks := relayedGroup(t, 2)
		round(t, 0, g)
		bad, end := openRawSession(t, c, r)
		defer end()
		large := voteOn(1, 7).GetRequest()
		large.GetShouldCommit().Traceparent = strings.Repeat("x", rpc.MaxRequest-proto.Size(large)-12) // 12: tags and lengths
		require.LessOrEqual(t, proto.Size(large), rpc.MaxRequest, "a server accepts it from a rank")
		require.NoError(t, bad.Send(large))
		err := endOf(bad)
		assert.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
		round(t, 1, g)
		for _, d := range networks {
			assert.EqualValues(t, 1, d.n.Load(), "one connection, to the relay")
		}
	})
}

func TestAServerWithoutRelays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := fttest.NewNetwork()
		defer net.Host("upstream").Serve(t, ":1", (&upstreamManager{}).register)()
		_, err := relay.Start(t.Context(), relay.Config{
			Manager: "http://upstream:1", Hostname: "relay", Bind: ":0", ConnectTimeout: time.Second, Network: net.Host("relay"),
		})
		require.ErrorIs(t, err, relay.ErrNone)
		_, err = relay.Start(t.Context(), relay.Config{
			Manager: "http://away:1", Hostname: "relay", Bind: ":0", ConnectTimeout: time.Second, Network: net.Host("relay"),
		})
		require.ErrorContains(t, err, "could not connect to manager at http://away:1: timed out after 1s")
		assert.NotErrorIs(t, err, relay.ErrNone)
	})
}

// The certificate of the manager server protects the requests of ranks. A relay without a certificate would receive these requests
// over plain connections, so it must not start.
func TestARelayOfASecureServer(t *testing.T) {
	ca := fttest.NewCA(t)
	cert, key := ca.Issue("lighthouse", "g", "relay")
	all := auth.Security{TokenFile: fttest.File(t, "secret"), TLSCert: cert, TLSKey: key, TLSCA: ca.File}
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("g", 1, func(cfg *manager.ServerConfig) {
			cfg.Security, cfg.Membership = all, &fake{quorum: func(context.Context) (*quorum.Quorum, error) { return nil, nil }}
		})
		start := func(security auth.Security) (*relay.Relay, error) {
			return relay.Start(t.Context(), relay.Config{
				Manager: g.Server.Address(), Hostname: "relay", Bind: ":0", ConnectTimeout: time.Second, Network: c.Net.Host("relay"), Security: security,
			})
		}
		plain := all
		plain.TLSCert, plain.TLSKey = "", ""
		_, err := start(plain)
		require.ErrorIs(t, err, relay.ErrNone)
		require.ErrorContains(t, err, `tls_cert (TORCHFT_TLS_CERT) is ""`)
		r, err := start(all)
		require.NoError(t, err)
		defer func() { require.NoError(t, r.Close()) }()
		client, err := rankclient.Dial(t.Context(), g.Server.Address(), time.Second,
			rankclient.WithNetwork(c.Net.Host("rank")), rankclient.WithRelay(r.Address()), rankclient.WithSecurity(plain))
		require.NoError(t, err)
		defer func() { require.NoError(t, client.Close()) }()
		commit, err := client.ShouldCommit(t.Context(), 0, 0, true)
		require.NoError(t, err)
		assert.True(t, commit)
	})
}

func TestAnUnreachableRelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("g", 1)
		client, _ := dialRelayed(c, g, "host", "http://nowhere:1")
		commit, err := client.ShouldCommit(t.Context(), 0, 0, true)
		require.NoError(t, err)
		assert.True(t, commit)
	})
}

// The group's store may still name the relay of an earlier manager server, and the relay of another group may now listen on its port. A
// vote through that relay would count in the other group.
func TestARankDoesNotAskThroughTheRelayOfAnotherServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g, other := c.StartGroup("g", 1), c.StartGroup("other", 2)
		r := startRelay(c, other, c.Net.Host("relay"))
		client, _ := dialRelayed(c, g, "host", r.Address())
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		commit, err := client.ShouldCommit(ctx, 0, 7, true)
		require.NoError(t, err)
		assert.True(t, commit, "group other has two ranks, and would still wait")
	})
}

func TestARankThatStartsAfterItsRelayHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c, r, _ := relayedGroup(t, 2)
		round(t, 0, g)
		c.Net.Interrupt("relay", "g", time.Hour)
		time.Sleep(100 * time.Millisecond)
		require.NoError(t, g.Ranks[1].Close())
		g.Ranks[1], _ = dialRelayed(c, g, "g/1", r.Address())
		first := g.Quorum(1, 0, time.Minute)
		synctest.Wait()
		answers{first, g.Quorum(0, 0, time.Minute)}.results(t)
		committed(t, votesOf(g, 0))
	})
}

func TestAGroupLeavesThroughItsRelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c, _, networks := relayedGroup(t, 3)
		peer := c.StartGroup("peer", 3)
		round(t, 0, g, peer)
		require.Equal(t, http.StatusOK, drain(t, c, "g"))
		synctest.Wait()
		for i, result := range append(answers(g.QuorumOfAll(1, time.Minute)), peer.QuorumOfAll(1, time.Minute)...).results(t) {
			assert.Equal(t, i < 3, result.Draining, "rank %d", i)
		}
		committed(t, votesOf(g, 1))
		var left []<-chan fttest.Answer[bool]
		for rank := range g.Ranks {
			left = append(left, leave(g, rank, time.Minute))
		}
		committed(t, votesOf(peer, 1))
		next := peer.QuorumOfAll(2, time.Minute)
		committed(t, left)
		for _, d := range networks {
			assert.EqualValues(t, 1, d.n.Load(), "one connection, to the relay")
		}
		g.Server.Shutdown()
		assert.Equal(t, []string{"peer"}, answers(next).results(t)[0].ReplicaIDs)
		noFailure(t, peer, 0)
	})
}

// silentRelay accepts sessions, and sends nothing on them, not even the header.
type silentRelay struct {
	torchftpb.UnimplementedRankServiceServer
}

func (silentRelay) Session(rank grpc.BidiStreamingServer[torchftpb.RankRequest, torchftpb.RankResponse]) error {
	<-rank.Context().Done()
	return nil
}

func TestARelayThatDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("g", 1)
		defer c.Net.Host("relay").Serve(t, ":1", func(g *grpc.Server) { torchftpb.RegisterRankServiceServer(g, silentRelay{}) })()
		began := time.Now()
		client, _ := dialRelayed(c, g, "host", "http://relay:1")
		assert.Equal(t, 5*time.Second, time.Since(began), "the relay gets half of the connect timeout")
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		commit, err := client.ShouldCommit(ctx, 0, 0, true)
		require.NoError(t, err)
		assert.True(t, commit)
	})
}
