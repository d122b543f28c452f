package lighthouse_test

import (
	"context"
	"encoding/json"
	"fmt"
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
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/membership/lighthouses"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

func dialJob(t *testing.T, c *fttest.Cluster, host, job string) *lighthouses.Client {
	t.Helper()
	client, err := lighthouses.Dial(t.Context(), fttest.LighthouseAddr, time.Second,
		rpc.Dialing{Network: c.Net.Host(host), Job: job})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	return client
}

func TestJobsAreIsolated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		client := browser(t, c, "browser")
		// The same replica_id in two jobs names two members, and requests in one job do not count in another.
		red, blue := dialJob(t, c, "r", "red"), dialJob(t, c, "b", "blue")
		lone := ask(blue, quorum.Member{ReplicaID: "a", Step: 7}, time.Minute)
		first := ask(red, quorum.Member{ReplicaID: "a", Step: 1}, time.Minute)
		synctest.Wait()
		assert.Empty(t, lone)
		second := ask(red, quorum.Member{ReplicaID: "b", Step: 1}, time.Minute)
		for _, answer := range []<-chan result{first, second} {
			got := <-answer
			require.NoError(t, got.Err)
			assert.Len(t, got.Value.Members, 2)
		}
		assert.Empty(t, lone)
		assert.Zero(t, c.Lighthouse.Status().Healthy, "the default job has no members")

		code, body := get(t, client, "/status?job=red")
		assert.Equal(t, http.StatusOK, code)
		var s dashboard.Status
		require.NoError(t, json.Unmarshal([]byte(body), &s))
		assert.Equal(t, []string{"a", "b"}, s.Quorum)
		_, body = get(t, client, "/jobs")
		var jobs []lighthouse.JobOverview
		require.NoError(t, json.Unmarshal([]byte(body), &jobs))
		require.Len(t, jobs, 3)
		assert.Equal(t, lighthouse.JobOverview{Job: "blue", Healthy: 1}, jobs[0])
		assert.Equal(t, "default", jobs[1].Job)
		assert.Equal(t, 2, jobs[2].Groups)
		code, body = get(t, client, "/api/v1/status?job=red")
		assert.Equal(t, http.StatusOK, code)
		assert.Contains(t, body, `"quorum":["a","b"]`)
		_, body = get(t, client, "/api/v1/history?job=blue")
		assert.Contains(t, body, `"events":[]`)
		code, body = get(t, client, "/status?job=green")
		assert.Equal(t, http.StatusNotFound, code)
		assert.Contains(t, body, `no group of job "green" has joined`)
		code, _ = get(t, client, "/?job=green")
		assert.Equal(t, http.StatusNotFound, code)

		again := ask(blue, quorum.Member{ReplicaID: "b", Step: 7}, time.Minute)
		require.NoError(t, (<-again).Err)
		require.NoError(t, (<-lone).Err)
	})
}

// Two jobs may use one replica_id. A kill ends the group of the job that the request names.
func TestAGroupIsEndedInTheJobThatWasNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		exited := make(chan string, 9)
		for _, job := range []string{"red", "blue", "green"} {
			g := c.StartGroup(job, 1, func(cfg *manager.ServerConfig) {
				// on the lighthouse's host, a kill needs no token
				cfg.ReplicaID, cfg.Job, cfg.Hostname = "a", job, "lighthouse"
				cfg.Network = c.Net.Host("lighthouse")
				cfg.Exit = func(int) { exited <- job }
			})
			require.NoError(t, (<-g.Quorum(0, 1, time.Minute)).Err)
		}
		const body = `{"replica_id": "a"}`
		for _, what := range []string{"drain", "kill"} {
			code, answer := call(t, c, "POST", "/api/v1/"+what, body, nil)
			assert.Equal(t, http.StatusConflict, code)
			assert.Equal(t,
				`member "a" is in the jobs blue, green and red: name one, /api/v1/`+what+`?job=ID`,
				answer["error"])
			code, answer = call(t, c, "POST", "/api/v1/"+what+"?job=yellow", body, nil)
			assert.Equal(t, http.StatusNotFound, code)
			assert.Contains(t, answer["error"], `no group of job "yellow" has joined`)
			code, answer = call(t, c, "POST", "/api/v1/"+what+"?job=default", body, nil)
			assert.Equal(t, http.StatusNotFound, code)
			assert.Contains(t, answer["error"], `member "a" is not known`)
		}
		for range 3 {
			code, _ := call(t, c, "POST", "/api/v1/drain?job=blue", body, nil)
			assert.Equal(t, http.StatusOK, code)
			for _, job := range []string{"red", "blue", "green"} {
				status, _ := c.Lighthouse.StatusOf(job)
				assert.Equal(t, job == "blue", status.Members[0].Draining != "", job)
			}
		}
		code, _ := call(t, c, "POST", "/api/v1/kill?job=green", body, nil)
		assert.Equal(t, http.StatusOK, code)
		time.Sleep(time.Second)
		require.Len(t, exited, 1)
		assert.Equal(t, "green", <-exited)

		code, text := kill(t, c, "lighthouse", "a", nil)
		assert.Equal(t, http.StatusConflict, code)
		assert.Contains(t, text, "is in the jobs blue, green and red")
	})
}

func TestAManagerNamesItsJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("g", 1, func(cfg *manager.ServerConfig) { cfg.Job = "red" })
		got := <-g.Quorum(0, 1, time.Minute)
		require.NoError(t, got.Err)
		red, known := c.Lighthouse.StatusOf("red")
		require.True(t, known)
		assert.Equal(t, []string{"g"}, red.Quorum)
		time.Sleep(30 * time.Second)
		red, _ = c.Lighthouse.StatusOf("red")
		assert.Equal(t, 1, red.Healthy, "the heartbeats of g name the job, too")
		assert.Zero(t, c.Lighthouse.Status().Healthy)
	})
}

func TestAJobWithoutMembersIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1, func(cfg *lighthouse.Config) { cfg.MaxJobs = 3 })
		alive := c.StartGroup("alive", 1, func(cfg *manager.ServerConfig) { cfg.Job = "alive" })
		round := <-alive.Quorum(0, 1, time.Minute)
		require.NoError(t, round.Err)
		ended := dialJob(t, c, "x", "ended")
		require.NoError(t, (<-ask(ended, quorum.Member{ReplicaID: "x"}, time.Minute)).Err)
		_, err := dialJob(t, c, "y", "more").Quorum(t.Context(), quorum.Member{ReplicaID: "y"}, 0)
		assert.Equal(t, codes.ResourceExhausted, status.Code(err))
		assert.ErrorContains(t, err, `job "more" is one too many: this lighthouse serves 3 (max_jobs)`)
		assert.Equal(t, []string{"alive", "default", "ended"}, c.Lighthouse.Jobs())

		time.Sleep(11 * time.Minute)
		assert.Equal(t, []string{"alive", "default"}, c.Lighthouse.Jobs())
		require.NoError(t, (<-ask(dialJob(t, c, "z", "more"), quorum.Member{ReplicaID: "y"},
			time.Minute)).Err)
	})
}

// The timer may be about to forget a job while the server ends it.
func TestAJobThatIsForgottenWhileTheServerEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		require.NoError(t, (<-ask(dialJob(t, c, "x", "red"), quorum.Member{ReplicaID: "x"}, time.Minute)).Err)
		c.Lighthouse.Shutdown()
		c.Lighthouse.ForgetJobs(time.Now().Add(time.Hour))
	})
}

func TestAJobThatRunsWildLeavesRoomForOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 3, func(cfg *lighthouse.Config) { cfg.MaxCallsPerJob = 2 })
		wild := dialJob(t, c, "w", "wild")
		first := ask(wild, quorum.Member{ReplicaID: "a"}, time.Minute)
		second := ask(wild, quorum.Member{ReplicaID: "b"}, time.Minute)
		synctest.Wait()
		_, err := wild.Quorum(t.Context(), quorum.Member{ReplicaID: "c"}, 0)
		assert.Equal(t, codes.ResourceExhausted, status.Code(err))
		assert.ErrorContains(t, err,
			`job "wild" has 2 streams and calls open, which is the limit (max_calls_per_job)`)

		other := ask(dialJob(t, c, "o", "other"), quorum.Member{ReplicaID: "a"}, time.Second)
		got := <-other
		assert.Equal(t, codes.DeadlineExceeded, status.Code(got.Err),
			"the request of the other job is accepted, and waits: %v", got.Err)
		assert.Error(t, (<-first).Err)
		assert.Error(t, (<-second).Err)
		got = <-ask(wild, quorum.Member{ReplicaID: "c"}, time.Second)
		assert.Equal(t, codes.DeadlineExceeded, status.Code(got.Err), "there is room again: %v", got.Err)
	})
}

func TestBadJobsAreNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		conn, err := rpc.Dial(t.Context(), rpc.Dialing{Network: c.Net.Host("x")}, "lighthouse",
			fttest.LighthouseAddr, time.Second)
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close()) }()
		heartbeat := func(pairs ...string) error {
			ctx := metadata.AppendToOutgoingContext(t.Context(), pairs...)
			_, err := torchftpb.NewLighthouseServiceClient(conn).Heartbeat(ctx,
				&torchftpb.LighthouseHeartbeatRequest{ReplicaId: "a"})
			return err
		}
		for _, job := range []string{"", "../x", ".hidden", "-x", "a b", strings.Repeat("x", 129)} {
			err := heartbeat("torchft-job", job)
			assert.Equal(t, codes.InvalidArgument, status.Code(err), job)
			assert.ErrorContains(t, err, "it must be 1 to 128 letters, digits, '.', '_' or '-'")
		}
		err = heartbeat("torchft-job", "a", "torchft-job", "b")
		assert.ErrorContains(t, err, "torchft-job is given 2 times")
		stream, err := torchftpb.NewMemberServiceClient(conn).Attend(metadata.AppendToOutgoingContext(t.Context(), "torchft-job", "a b"))
		require.NoError(t, err)
		require.NoError(t, stream.Send(&torchftpb.MemberMessage{
			Message: &torchftpb.MemberMessage_Greeting{Greeting: &torchftpb.Greeting{ReplicaId: "a"}},
		}))
		_, err = stream.Recv()
		assert.Equal(t, codes.InvalidArgument, status.Code(err))

		assert.Equal(t, []string{"default"}, c.Lighthouse.Jobs())
		for _, job := range []string{"default", "x", "Run_2026-11.3", strings.Repeat("x", 128)} {
			assert.NoError(t, heartbeat("torchft-job", job))
		}
		_, err = lighthouses.Dial(t.Context(), fttest.LighthouseAddr, time.Second,
			rpc.Dialing{Network: c.Net.Host("x"), Job: "a/b"})
		assert.ErrorContains(t, err, `TORCHFT_JOB_ID is "a/b"`)
		cfg := c.ServerConfig("g", 1)
		cfg.Job = "a/b"
		assert.ErrorContains(t, cfg.Validate(), `job id (TORCHFT_JOB_ID) is "a/b"`)
	})
}

func TestTheStatesOfJobsAreApart(t *testing.T) {
	dir := t.TempDir()
	start := func() *lighthouse.Server {
		cfg := lighthouse.DefaultConfig()
		cfg.Bind, cfg.MinReplicas, cfg.StateDir, cfg.Hostname = "127.0.0.1:0", 1, dir, "localhost"
		s, err := lighthouse.New(cfg)
		require.NoError(t, err)
		return s
	}
	askAs := func(s *lighthouse.Server, job string) int64 {
		client, err := lighthouses.Dial(t.Context(), s.Address(), 10*time.Second, rpc.Dialing{Job: job})
		require.NoError(t, err)
		defer func() { require.NoError(t, client.Close()) }()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		q, err := client.Quorum(ctx, quorum.Member{ReplicaID: "of_" + job}, 0)
		require.NoError(t, err)
		return q.ID
	}
	s := start()
	ids := map[string]int64{}
	for i := range 3 {
		job := fmt.Sprint("job", i)
		ids[job] = askAs(s, job)
	}
	s.Shutdown()
	s = start()
	defer s.Shutdown()
	for job, id := range ids {
		assert.Greater(t, askAs(s, job), id)
		status, known := s.StatusOf(job)
		require.True(t, known)
		assert.Equal(t, []string{"of_" + job}, status.Quorum)
	}
}

// The number of metrics grows with the number of jobs, at most max_jobs, and not with the names of members. A
// job that never had a quorum is forgotten with its members.
func TestAnUnauthorizedClientDoesNotFillTheMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1, func(cfg *lighthouse.Config) { cfg.MaxJobs = 5 })
		web := browser(t, c, "prometheus")
		metrics := func() (jobs []string, series int) {
			code, body := get(t, web, "/metrics")
			require.Equal(t, http.StatusOK, code)
			assert.NotContains(t, body, "unknown-", "members have no series of their own")
			found := map[string]bool{}
			for line := range strings.Lines(body) {
				_, label, ok := strings.Cut(line, `training_job="`)
				if job, _, _ := strings.Cut(label, `"`); ok {
					found[job] = true
					series++
				}
			}
			return slices.Sorted(maps.Keys(found)), series
		}
		red := ask(dialJob(t, c, "r", "red"), quorum.Member{ReplicaID: "a"}, time.Minute)
		require.NoError(t, (<-red).Err)
		jobs, before := metrics()
		require.Equal(t, []string{"default", "red"}, jobs)

		members := dial(t, c, "x")
		for i := range 1000 {
			require.NoError(t, members.Heartbeat(t.Context(), fmt.Sprint("unknown-", i)))
		}
		jobs, after := metrics()
		assert.Equal(t, []string{"default", "red"}, jobs)
		assert.Equal(t, before, after)

		refused := 0
		for i := range 50 {
			err := dialJob(t, c, "y", fmt.Sprint("made_up_", i)).Heartbeat(t.Context(), "unknown-")
			if status.Code(err) == codes.ResourceExhausted {
				refused++
				continue
			}
			require.NoError(t, err)
		}
		assert.Equal(t, 47, refused)
		jobs, after = metrics()
		assert.Len(t, jobs, 5)
		assert.Equal(t, before/2*5, after)

		time.Sleep(11 * time.Second) // longer than the heartbeat timeout and forgetNameAfter together
		jobs, _ = metrics()
		assert.Equal(t, []string{"default", "red"}, jobs, "a job that had a quorum is kept")
		time.Sleep(11 * time.Minute)
		jobs, _ = metrics()
		assert.Equal(t, []string{"default"}, jobs)
	})
}
