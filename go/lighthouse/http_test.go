package lighthouse_test

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/membership/lighthouses"
	"github.com/torchft/torchft/go/quorum"
)

// browser returns an HTTP client on a host of the cluster.
func browser(t *testing.T, c *fttest.Cluster, host string) *http.Client {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
		return c.Net.Host(host).Dial(ctx, addr)
	}}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: 10 * time.Second}
}

func get(t *testing.T, client *http.Client, path string) (int, string) {
	t.Helper()
	resp, err := client.Get(fttest.LighthouseAddr + path)
	require.NoError(t, err)
	return read(t, resp)
}

func read(t *testing.T, resp *http.Response) (int, string) {
	t.Helper()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return resp.StatusCode, string(body)
}

func TestStatusHasTheMembersAndTheReasonWhyThereIsNoQuorum(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		client := browser(t, c, "far")
		code, page := get(t, client, "/")
		assert.Equal(t, http.StatusOK, code)
		assert.Contains(t, page, "Replica groups")

		waiting := ask(dial(t, c, "a"), quorum.Member{ReplicaID: "<a>", Step: 4, Address: "http://a:1"},
			10*time.Second)
		time.Sleep(2 * time.Second)
		code, body := get(t, client, "/status")
		assert.Equal(t, http.StatusOK, code)
		var status dashboard.Status
		require.NoError(t, json.Unmarshal([]byte(body), &status))
		assert.Equal(t, 1, status.Candidates)
		require.Len(t, status.Members, 1)
		assert.Equal(t, "<a>", status.Members[0].ReplicaID)
		assert.EqualValues(t, 2000, status.Members[0].HeartbeatAgeMS)
		assert.EqualValues(t, 4, status.Members[0].Step)
		assert.NotEmpty(t, status.Reason)

		require.NoError(t, (<-ask(dial(t, c, "b"), quorum.Member{ReplicaID: "b"}, 10*time.Second)).Err)
		require.NoError(t, (<-waiting).Err)
		// within this time, the lighthouse would serve the same status again (shared.go)
		time.Sleep(time.Millisecond)
		_, body = get(t, client, "/status")
		require.NoError(t, json.Unmarshal([]byte(body), &status))
		assert.Equal(t, []string{"<a>", "b"}, status.Quorum)
		assert.Positive(t, status.QuorumID)

		var history struct {
			Events []dashboard.Event
			Points []dashboard.Point
		}
		_, body = get(t, client, "/api/v1/history")
		require.NoError(t, json.Unmarshal([]byte(body), &history))
		require.Len(t, history.Events, 1)
		assert.Equal(t, dashboard.QuorumChanged, history.Events[0].Kind)
		assert.Equal(t, []string{"<a>", "b"}, history.Events[0].Joined)
		assert.EqualValues(t, 4, history.Points[0].Step)
		_, body = get(t, client, "/metrics")
		assert.Contains(t, body, `torchft_quorum_members{training_job="default"} 2`)
	})
}

func TestOtherPathsAndMethods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := browser(t, fttest.NewCluster(t, 1), "far")
		for path, want := range map[string]int{"/nothing": http.StatusNotFound,
			"/replica/a/kill": http.StatusMethodNotAllowed} {
			code, _ := get(t, client, path)
			assert.Equal(t, want, code, path)
		}
		resp, err := client.Post(fttest.LighthouseAddr+"/status", "text/plain", strings.NewReader("x"))
		require.NoError(t, err)
		code, _ := read(t, resp)
		assert.Equal(t, http.StatusMethodNotAllowed, code)
	})
}

// kill posts the kill of a member from a browser on a host of the cluster, at the route of upstream.
func kill(t *testing.T, c *fttest.Cluster, host, replica string, headers map[string]string) (int, string) {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost,
		fttest.LighthouseAddr+"/replica/"+url.PathEscape(replica)+"/kill", http.NoBody)
	require.NoError(t, err)
	for name, value := range headers {
		req.Header.Set(name, value)
	}
	if name := headers["Host"]; name != "" {
		req.Host = name
	}
	resp, err := browser(t, c, host).Do(req)
	require.NoError(t, err)
	return read(t, resp)
}

func TestKill(t *testing.T) {
	const bearer = "Bearer secret"
	for _, tc := range []struct {
		name     string
		open     bool // there is no token
		remote   bool // --allow_remote_kill
		from     string
		group    string // the host of the group; empty: "far"
		headers  map[string]string
		replica  string
		want     int
		wantBody string
	}{
		{name: "no token", from: "far", want: 401, wantBody: "wants the job's token"},
		{name: "no token, from here", from: "lighthouse", want: 401, wantBody: "wants the job's token"},
		{name: "wrong token", from: "far", headers: map[string]string{"Authorization": "Bearer guess"},
			want: 401, wantBody: "not the job's"},
		{name: "not a bearer", from: "far", headers: map[string]string{"Authorization": "secret"}, want: 401,
			wantBody: "not the job's"},
		{name: "another site", from: "lighthouse",
			headers: map[string]string{"Authorization": bearer, "Origin": "http://evil.example"}, want: 403,
			wantBody: "another site"},
		{name: "another site, by Sec-Fetch-Site", from: "lighthouse",
			headers: map[string]string{"Authorization": bearer, "Sec-Fetch-Site": "cross-site"}, want: 403,
			wantBody: "another site"},
		{name: "unknown member", from: "far", headers: map[string]string{"Authorization": bearer},
			replica: "b", want: 404, wantBody: `"b"`},
		{name: "by header", from: "far", headers: map[string]string{"Authorization": bearer}, want: 200},
		{name: "by header, under any name", from: "far",
			headers: map[string]string{"Authorization": bearer, "Host": "alias.example"}, want: 200},
		{name: "by the page", from: "far", headers: map[string]string{"Authorization": bearer,
			"Origin": fttest.LighthouseAddr}, want: 200},

		{name: "open, from elsewhere", open: true, from: "far", group: "lighthouse", want: 403,
			wantBody: "--allow_remote_kill"},
		{name: "open, from elsewhere with any token", open: true, from: "far", group: "lighthouse",
			headers: map[string]string{"Authorization": bearer}, want: 403, wantBody: "another host"},
		{name: "open, by a proxy here", open: true, from: "lighthouse", group: "lighthouse",
			headers: map[string]string{"X-Forwarded-For": "10.0.0.1"}, want: 403, wantBody: "another host"},
		{name: "open, another site", open: true, from: "lighthouse", group: "lighthouse",
			headers: map[string]string{"Origin": "http://evil.example"}, want: 403, wantBody: "another site"},
		{name: "open, another site's name for this host", open: true, from: "lighthouse", group: "lighthouse",
			headers: map[string]string{"Host": "evil.example:29510", "Origin": "http://evil.example:29510"},
			want:    403, wantBody: `"evil.example:29510", is no name of this server`},
		{name: "open, from here", open: true, from: "lighthouse", group: "lighthouse", want: 200},
		{name: "open, by the page", open: true, from: "lighthouse", group: "lighthouse",
			headers: map[string]string{"Origin": fttest.LighthouseAddr}, want: 200},
		{name: "open, a manager elsewhere", open: true, from: "lighthouse", want: 502,
			wantBody: "it comes from another host, and this server has no token"},
		{name: "remote kill", open: true, remote: true, from: "far", group: "lighthouse", want: 200},
		{name: "remote kill, another site", open: true, remote: true, from: "far", group: "lighthouse",
			headers: map[string]string{"Origin": "null"}, want: 403, wantBody: "another site"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var security auth.Security
			if !tc.open {
				security.TokenFile = fttest.File(t, "secret")
			}
			synctest.Test(t, func(t *testing.T) {
				c := fttest.NewCluster(t, 1, func(cfg *lighthouse.Config) {
					cfg.Security,
						cfg.AllowRemoteKill = security, tc.remote
				})
				exited := make(chan int, 1)
				host := tc.group
				if host == "" {
					host = "far"
				}
				g := c.StartGroup("a:1/2", 1, func(cfg *manager.ServerConfig) {
					cfg.Hostname, cfg.Network = host, c.Net.Host(host)
					cfg.Security, cfg.Exit = security, func(code int) { exited <- code }
				})
				require.NoError(t, (<-g.Quorum(0, 1, time.Minute)).Err)
				replica := tc.replica
				if replica == "" {
					replica = "a:1/2"
				}
				code, body := kill(t, c, tc.from, replica, tc.headers)
				assert.Equal(t, tc.want, code, body)
				assert.Contains(t, body, tc.wantBody)
				time.Sleep(time.Second)
				assert.Len(t, exited, map[bool]int{true: 1}[tc.want == 200])
			})
		})
	}
}

func TestKillOfAManagerThatHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("a", 1)
		require.NoError(t, (<-g.Quorum(0, 1, time.Minute)).Err)
		g.Server.Shutdown()
		code, body := kill(t, c, "lighthouse", "a", nil)
		assert.Equal(t, http.StatusBadGateway, code)
		assert.Contains(t, body, "could not connect to manager at "+g.Server.Address())
	})
}

// Over real sockets: one port serves gRPC and HTTP, and refuses clients of any other protocol.
func TestOnePort(t *testing.T) {
	cfg := lighthouse.DefaultConfig()
	cfg.Bind, cfg.MinReplicas, cfg.Logger, cfg.Hostname = "[::]:0", 1, fttest.Quiet, "127.0.0.1"
	server, err := lighthouse.New(cfg)
	require.NoError(t, err)
	defer server.Shutdown()

	silent, err := net.Dial("tcp", strings.TrimPrefix(server.Address(), "http://"))
	require.NoError(t, err)
	defer func() { require.NoError(t, silent.Close()) }()
	fttest.SendGarbage(t, server.Address())

	client, err := lighthouses.Dial(t.Context(), server.Address(), 5*time.Second, rpc.Dialing{})
	require.NoError(t, err)
	defer func() { require.NoError(t, client.Close()) }()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, err = client.Quorum(ctx, quorum.Member{ReplicaID: "a"}, 0)
	require.NoError(t, err)

	web := &http.Client{Transport: &http.Transport{}, Timeout: 10 * time.Second}
	defer web.CloseIdleConnections()
	resp, err := web.Get(server.Address() + "/status")
	require.NoError(t, err)
	code, body := read(t, resp)
	assert.Equal(t, http.StatusOK, code)
	assert.Contains(t, body, `"replica_id": "a"`)
}
