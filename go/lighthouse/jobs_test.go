package lighthouse_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

func dialJob(t *testing.T, c *fttest.Cluster, host, job string) *manager.LighthouseClient {
	t.Helper()
	client, err := manager.DialLighthouse(t.Context(), fttest.LighthouseAddr, time.Second, manager.WithNetwork(c.Net.Host(host)), manager.WithJob(job))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	return client
}

func TestJobsAreIsolated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		client := browser(t, c, "browser")
		// The same replica_id in two jobs is two members; one job's waiting is not another's.
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
		assert.Zero(t, c.Lighthouse.Status().Healthy, "the default job has nobody")

		code, body := get(t, client, "/status?job=red")
		assert.Equal(t, http.StatusOK, code)
		var s quorum.Status
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
		assert.Contains(t, body, `job "green" is not known`)
		code, _ = get(t, client, "/?job=green")
		assert.Equal(t, http.StatusNotFound, code)

		again := ask(blue, quorum.Member{ReplicaID: "b", Step: 7}, time.Minute)
		require.NoError(t, (<-again).Err)
		require.NoError(t, (<-lone).Err)
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
		assert.Equal(t, 1, red.Healthy, "its heartbeats name the job, too")
		assert.Zero(t, c.Lighthouse.Status().Healthy)
	})
}

func TestAJobIsForgottenWhenNobodyIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1, func(cfg *lighthouse.Config) { cfg.MaxJobs = 3 })
		alive := c.StartGroup("alive", 1, func(cfg *manager.ServerConfig) { cfg.Job = "alive" })
		round := <-alive.Quorum(0, 1, time.Minute)
		require.NoError(t, round.Err)
		dead := dialJob(t, c, "x", "dead")
		require.NoError(t, (<-ask(dead, quorum.Member{ReplicaID: "x"}, time.Minute)).Err)
		_, err := dialJob(t, c, "y", "more").Quorum(t.Context(), quorum.Member{ReplicaID: "y"}, 0)
		assert.Equal(t, codes.ResourceExhausted, status.Code(err))
		assert.ErrorContains(t, err, `job "more" is one too many: this lighthouse serves 3 (max_jobs)`)
		assert.Equal(t, []string{"alive", "dead", "default"}, c.Lighthouse.Jobs())

		time.Sleep(11 * time.Minute)
		assert.Equal(t, []string{"alive", "default"}, c.Lighthouse.Jobs())
		require.NoError(t, (<-ask(dialJob(t, c, "z", "more"), quorum.Member{ReplicaID: "y"}, time.Minute)).Err)
	})
}

func TestBadJobsAreNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		conn, err := rpc.Dial(t.Context(), c.Net.Host("x"), "lighthouse", fttest.LighthouseAddr, time.Second)
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close()) }()
		heartbeat := func(pairs ...string) error {
			ctx := metadata.AppendToOutgoingContext(t.Context(), pairs...)
			_, err := torchftpb.NewLighthouseServiceClient(conn).Heartbeat(ctx, &torchftpb.LighthouseHeartbeatRequest{ReplicaId: "a"})
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
		require.NoError(t, stream.Send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Greeting{Greeting: &torchftpb.Greeting{ReplicaId: "a"}}}))
		_, err = stream.Recv()
		assert.Equal(t, codes.InvalidArgument, status.Code(err))

		assert.Equal(t, []string{"default"}, c.Lighthouse.Jobs())
		for _, job := range []string{"default", "x", "Run_2026-11.3", strings.Repeat("x", 128)} {
			assert.NoError(t, heartbeat("torchft-job", job))
		}
		_, err = manager.DialLighthouse(t.Context(), fttest.LighthouseAddr, time.Second, manager.WithNetwork(c.Net.Host("x")), manager.WithJob("a/b"))
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
		client, err := manager.DialLighthouse(t.Context(), s.Address(), 10*time.Second, manager.WithJob(job))
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
