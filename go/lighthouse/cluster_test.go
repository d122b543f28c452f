package lighthouse_test

import (
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/membership/lighthouses"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/replica"
	"github.com/torchft/torchft/go/torchftpb"
)

func addressOf(host string) string { return "http://" + host + ":29510" }

// followers returns the lighthouses that do not lead.
func followers(l *fttest.Agreeing) (hosts []string) {
	leader := l.Leader()
	for _, host := range l.Running() {
		if host != leader {
			hosts = append(hosts, host)
		}
	}
	return hosts
}

// dialAt returns a client as upstream's, which only makes calls, and knows one lighthouse.
func dialAt(t *testing.T, l *fttest.Agreeing, host, at, job string) *lighthouses.Client {
	t.Helper()
	client, err := lighthouses.Dial(t.Context(), addressOf(at), 5*time.Second,
		rpc.Dialing{Network: l.Net.Host(host), Job: job})
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func TestCallsAreForwardedToTheLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fttest.NewAgreeing(t, 2)
		at := followers(l)
		a, b := dialAt(t, l, "a", at[0], ""), dialAt(t, l, "b", at[1], "")
		require.NoError(t, a.Heartbeat(t.Context(), "a"))
		waiting := ask(a, quorum.Member{ReplicaID: "a", Step: 3}, time.Minute)
		time.Sleep(time.Second)

		// The leader fails while a waits: the call is made again at the next one.
		l.Kill(l.Leader())
		time.Sleep(3 * time.Second)
		got := <-ask(b, quorum.Member{ReplicaID: "b", Step: 3}, time.Minute)
		require.NoError(t, got.Err)
		first := <-waiting
		require.NoError(t, first.Err)
		assert.Equal(t, got.Value.ID, first.Value.ID)
		assert.Len(t, first.Value.Members, 2)

		// Without a majority there is no answer, and the error says why.
		l.Kill(at[1])
		time.Sleep(time.Second)
		last := <-ask(a, quorum.Member{ReplicaID: "a", Step: 4}, 5*time.Second)
		assert.Equal(t, codes.Unavailable, status.Code(last.Err))
		assert.ErrorContains(t, last.Err, "no lighthouse of the cluster leads")
	})
}

// A lighthouse that ends does not wait for the calls that it has forwarded: their clients ask another one.
func TestAForwardedCallDoesNotDelayTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fttest.NewAgreeing(t, 2)
		at := followers(l)[0]
		waiting := ask(dialAt(t, l, "a", at, ""), quorum.Member{ReplicaID: "a"}, time.Minute)
		time.Sleep(time.Second)
		began := time.Now()
		l.Server(at).Shutdown()
		assert.Less(t, time.Since(began), 100*time.Millisecond)
		got := <-waiting
		assert.Equal(t, codes.Unavailable, status.Code(got.Err))
		assert.ErrorContains(t, got.Err, "the lighthouse is shutting down")
	})
}

func TestAStreamIsRefusedWithTheAddressOfTheLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fttest.NewAgreeing(t, 1)
		w := openAt(t, &l.Cluster, "a", addressOf(followers(l)[0]))
		w.send(&torchftpb.MemberMessage{
			Message: &torchftpb.MemberMessage_Greeting{Greeting: &torchftpb.Greeting{ReplicaId: "a",
				Lighthouses: 3}},
		})
		_, err := w.stream.Recv()
		assert.Equal(t, codes.Unavailable, status.Code(err))
		assert.Equal(t, addressOf(l.Leader()), wire.LeaderOf(err))
	})
}

func TestPagesAreForwardedToTheLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fttest.NewAgreeing(t, 1)
		at := followers(l)
		time.Sleep(3 * time.Second) // until each has asked the others again
		client := browser(t, &l.Cluster, "far")
		fetch := func(method, host, path, body string) (int, string) {
			req, err := http.NewRequestWithContext(t.Context(), method, addressOf(host)+path,
				strings.NewReader(body))
			require.NoError(t, err)
			resp, err := client.Do(req)
			require.NoError(t, err)
			return read(t, resp)
		}
		code, page := fetch("GET", at[0], "/", "")
		require.Equal(t, http.StatusOK, code, "before the first group: %s", page)
		require.NoError(t, (<-ask(dialAt(t, l, "a", l.Leader(), ""), quorum.Member{ReplicaID: "a", Step: 4},
			time.Minute)).Err)
		for _, host := range fttest.AgreeingHosts {
			code, page := fetch("GET", host, "/", "")
			assert.Equal(t, http.StatusOK, code)
			assert.Contains(t, page, "Replica groups")
			code, body := fetch("GET", host, "/status", "")
			assert.Equal(t, http.StatusOK, code)
			var shown struct {
				dashboard.Status
				Cluster replica.Status
			}
			require.NoError(t, json.Unmarshal([]byte(body), &shown))
			assert.Equal(t, []string{"a"}, shown.Quorum)
			assert.Equal(t, addressOf(l.Leader()), shown.Cluster.Leader)
			assert.Len(t, shown.Cluster.Members, 3)

			// Each answers for itself.
			code, body = fetch("GET", host, "/cluster", "")
			assert.Equal(t, http.StatusOK, code)
			readOpenAPI(t).check("GET", "/cluster", code, "application/json", []byte(body))
			var own replica.Status
			require.NoError(t, json.Unmarshal([]byte(body), &own))
			assert.Equal(t, addressOf(host), own.Self)
			code, body = fetch("GET", host, "/readyz", "")
			assert.Equal(t, http.StatusOK, code, body)

			// From another host, and without a token, nothing is ended or changed, on whatever way.
			for _, path := range []string{"/replica/a/kill", "/api/v1/kill", "/api/v1/cluster/remove"} {
				code, body = fetch("POST", host, path, `{}`)
				assert.Equal(t, http.StatusForbidden, code, body)
			}
		}
		for _, host := range at {
			l.Kill(host)
		}
		time.Sleep(2 * time.Second)
		left := l.Running()[0]
		code, page = fetch("GET", left, "/", "")
		assert.Equal(t, http.StatusServiceUnavailable, code)
		assert.Contains(t, page, "No lighthouse leads")
		code, body := fetch("GET", left, "/api/v1/state", "")
		assert.Equal(t, http.StatusServiceUnavailable, code)
		assert.Contains(t, body, `"error"`)
		code, _ = fetch("GET", left, "/healthz", "")
		assert.Equal(t, http.StatusOK, code)
	})
}

// A lighthouse is replaced by one on another host, without a pause.
func TestALighthouseIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fttest.NewAgreeing(t, 1)
		gone := followers(l)[0]
		l.Kill(gone)
		l.StartAs("four", strings.ReplaceAll(fttest.AgreeingAddrs, addressOf(gone), addressOf("four")))
		onHost := func(path, address string) (int, string) {
			client := browser(t, &l.Cluster, l.Leader()) // on the leader's own host it needs no token
			resp, err := client.Post(addressOf(l.Leader())+path, "application/json",
				strings.NewReader(`{"address": "`+address+`"}`))
			require.NoError(t, err)
			return read(t, resp)
		}
		code, body := onHost("/api/v1/cluster/add", addressOf("four"))
		require.Equal(t, http.StatusOK, code, body)
		readOpenAPI(t).check("POST", "/api/v1/cluster/add", code, "application/json", []byte(body))
		code, body = onHost("/api/v1/cluster/remove", addressOf(gone))
		require.Equal(t, http.StatusOK, code, body)
		code, body = onHost("/api/v1/cluster/add", addressOf("nobody"))
		assert.Equal(t, http.StatusConflict, code)
		assert.Contains(t, body, addressOf("nobody"))
		time.Sleep(time.Second)
		l.Kill(l.Leader())
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		assert.NotEmpty(t, l.Leader())
		_, err := dialAt(t, l, "a", "four", "").Quorum(ctx, quorum.Member{ReplicaID: "a"}, 0)
		assert.NoError(t, err)
	})
}

// Garbage on a link is refused, and the leader stays.
func TestStrangersOnTheLinksOfACluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fttest.NewAgreeing(t, 1)
		leader := l.Leader()
		conn, err := rpc.Dial(t.Context(), rpc.Dialing{Network: l.Net.Host("client")}, "lighthouse",
			addressOf(leader), time.Second)
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close()) }()
		link, err := torchftpb.NewClusterServiceClient(conn).Link(t.Context())
		require.NoError(t, err)
		_ = link.Send(&torchftpb.Frame{Data: []byte(strings.Repeat("garbage", 1000))})
		_, err = link.Recv()
		assert.Error(t, err)
		time.Sleep(time.Second)
		assert.Equal(t, leader, l.Leader())
	})
}

// Ended jobs leave their states in the log for a while. They do not count in max_jobs at the next leader, and
// are removed in the end.
func TestStatesOfEndedJobs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const month = 31 * 24 * time.Hour
		l := fttest.NewAgreeing(t, 1, func(cfg *lighthouse.Config) { cfg.MaxJobs = 3 })
		leader := l.Server(l.Leader())
		first := map[string]int64{}
		train := func(job string) int64 {
			t.Helper()
			got := <-ask(dialAt(t, l, "a", l.Leader(), job), quorum.Member{ReplicaID: "a"}, 10*time.Second)
			require.NoError(t, got.Err)
			return got.Value.ID
		}
		for _, job := range []string{"one", "two", "three", "four"} {
			first[job] = train(job)
			if job != "four" {
				time.Sleep(6 * time.Second) // until the group counts as failed
				leader.ForgetJobs(time.Now().Add(time.Hour))
			}
		}
		leader.Renew()
		time.Sleep(time.Second)
		l.Kill(l.Leader())
		leader = l.Server(l.Leader())
		require.Len(t, leader.States(), 4)
		assert.Equal(t, []string{rpc.DefaultJob}, leader.Jobs())
		assert.Greater(t, train("one"), first["one"])

		leader.RemoveOld(time.Now())
		require.Len(t, leader.States(), 4)
		leader.RemoveOld(time.Now().Add(month))
		assert.Equal(t, []string{"one"}, slices.Collect(maps.Keys(leader.States())), "it is in use")
		assert.Greater(t, train("two"), first["two"])
	})
}

// After a panic of the machine the leader continues from the latest quorum, as a new leader does, also if the
// first group that comes was not in it.
func TestALeaderContinuesAfterAPanicOfTheMachine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fttest.NewAgreeing(t, 1)
		clients := map[string]*lighthouses.Client{}
		for _, id := range []string{"a", "b", "c"} {
			clients[id] = dialAt(t, l, id, l.Leader(), "")
			require.NoError(t, clients[id].Heartbeat(t.Context(), id))
		}
		a, b := ask(clients["a"], quorum.Member{ReplicaID: "a", Step: 7}, time.Minute),
			ask(clients["b"], quorum.Member{ReplicaID: "b", Step: 7}, time.Minute)
		c := ask(clients["c"], quorum.Member{ReplicaID: "c"}, time.Minute)
		first := <-a
		require.NoError(t, first.Err)
		require.Len(t, first.Value.Members, 3)
		<-b
		<-c
		l.Server(l.Leader()).BreakMachine()
		assert.Error(t, clients["c"].Heartbeat(t.Context(), "c"))
		c = ask(clients["c"], quorum.Member{ReplicaID: "c"}, time.Minute)
		time.Sleep(time.Second) // the others are in the middle of a step
		a, b = ask(clients["a"], quorum.Member{ReplicaID: "a", Step: 8}, time.Minute),
			ask(clients["b"], quorum.Member{ReplicaID: "b", Step: 8}, time.Minute)
		for _, answer := range []<-chan result{a, b, c} {
			got := <-answer
			require.NoError(t, got.Err)
			assert.Len(t, got.Value.Members, 3)
			assert.Greater(t, got.Value.ID, first.Value.ID)
		}
	})
}

// A member hears of a failure after the quorum that it is about, also if the log does not have that quorum
// yet: news about a quorum that it does not know would be dropped, and it would wait for the failed member.
func TestAFailureIsReportedAfterItsQuorum(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fttest.NewAgreeing(t, 2)
		leader := l.Leader()
		join := func(id string) *rawStream {
			w := openAt(t, &l.Cluster, id, addressOf(leader))
			w.send(&torchftpb.MemberMessage{
				Message: &torchftpb.MemberMessage_Greeting{Greeting: &torchftpb.Greeting{ReplicaId: id,
					Lighthouses: 3}},
			})
			require.NotNil(t, w.receive().GetWelcome())
			return w
		}
		a, b := join("a"), join("b")
		for _, host := range followers(l) {
			l.Net.Sever(leader, host)
		}
		a.ask(1, time.Minute)
		b.ask(1, time.Minute)
		b.send(&torchftpb.MemberMessage{
			Message: &torchftpb.MemberMessage_Incomplete{Incomplete: "a rank has ended"},
		})
		synctest.Wait()
		for _, host := range followers(l) {
			l.Net.Heal(leader, host)
		}
		q := a.answered()
		failed := a.receive().GetNotice()
		assert.Equal(t, q.ID, failed.GetQuorumId())
		assert.Equal(t, "b", failed.GetReplicaId())
	})
}

// The page's stream of updates through a lighthouse that does not lead ends with the leader, also if that one
// vanishes without a word.
func TestAPageIsNotLeftAtAFormerLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fttest.NewAgreeing(t, 1)
		leader, at := l.Leader(), followers(l)[0]
		resp, err := browser(t, &l.Cluster, "far").Get(addressOf(at) + "/api/v1/events")
		require.NoError(t, err)
		defer func() { _ = resp.Body.Close() }()
		require.Equal(t, http.StatusOK, resp.StatusCode)
		l.Net.Host(leader).Vanish()
		began := time.Now()
		_, _ = io.Copy(io.Discard, resp.Body)
		assert.Less(t, time.Since(began), 3*time.Second)
		assert.Zero(t, l.Log.Count("internal error"), "a page that ends is no error:\n%s", l.Log)
	})
}

// A page that was fetched from any lighthouse may change the job through it: the browser names that
// lighthouse as the origin. A page of another site is refused.
func TestARequestOfAPageIsForwardedToTheLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fttest.NewAgreeing(t, 1, func(cfg *lighthouse.Config) { cfg.AllowRemoteKill = true })
		l.Leader()
		at := followers(l)[0]
		post := func(client, path, origin, host string) (int, string) {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, addressOf(at)+path,
				strings.NewReader(`{"replica_id": "a"}`))
			require.NoError(t, err)
			req.Header.Set("Origin", origin)
			req.Host = host
			resp, err := browser(t, &l.Cluster, client).Do(req)
			require.NoError(t, err)
			return read(t, resp)
		}
		own := at + ":29510"
		for _, path := range []string{"/replica/a/kill", "/api/v1/drain"} {
			code, body := post("far", path, addressOf(at), own)
			assert.Equal(t, http.StatusNotFound, code, body)
			assert.Contains(t, body, "is not known to this lighthouse")
			for _, origin := range []string{"http://evil:29510", addressOf(l.Leader())} {
				code, body = post("far", path, origin, own)
				assert.Equal(t, http.StatusForbidden, code)
				assert.Contains(t, body, "another site")
			}
		}
		code, body := post("far", "/rendezvous", addressOf(at), own)
		assert.Equal(t, http.StatusForbidden, code, body)
	})
}
