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

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/quorum"
)

// browser is an HTTP client on a host of the cluster.
func browser(t *testing.T, c *fttest.Cluster) *http.Client {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
		return c.Net.Host("browser").Dial(ctx, addr)
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

func TestStatusSaysWhoIsHereAndWhyThereIsNoQuorum(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		client := browser(t, c)
		code, page := get(t, client, "/")
		assert.Equal(t, http.StatusOK, code)
		assert.Contains(t, page, "No replica group has been here yet.")

		waiting := ask(dial(t, c, "a"), quorum.Member{ReplicaID: "<a>", Step: 4, Address: "http://a:1"}, 10*time.Second)
		time.Sleep(2 * time.Second)
		code, body := get(t, client, "/status")
		assert.Equal(t, http.StatusOK, code)
		var status quorum.Status
		require.NoError(t, json.Unmarshal([]byte(body), &status))
		assert.Equal(t, 1, status.Candidates)
		require.Len(t, status.Members, 1)
		assert.Equal(t, "<a>", status.Members[0].ReplicaID)
		assert.EqualValues(t, 2000, status.Members[0].HeartbeatAgeMS)
		assert.EqualValues(t, 4, status.Members[0].Step)
		assert.NotEmpty(t, status.Reason)

		_, page = get(t, client, "/")
		assert.Contains(t, page, "&lt;a&gt;", "names are escaped")
		assert.Contains(t, page, "waiting for 2.0 s")
		assert.NotContains(t, page, "<script")
		assert.NotContains(t, page, "/kill", "there is no token, so there is nothing to offer")

		require.NoError(t, (<-ask(dial(t, c, "b"), quorum.Member{ReplicaID: "b"}, 10*time.Second)).Err)
		require.NoError(t, (<-waiting).Err)
		_, body = get(t, client, "/status")
		require.NoError(t, json.Unmarshal([]byte(body), &status))
		assert.Equal(t, []string{"<a>", "b"}, status.Quorum)
		assert.Positive(t, status.QuorumID)
	})
}

func TestOtherPathsAndMethods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := browser(t, fttest.NewCluster(t, 1))
		for path, want := range map[string]int{"/nothing": http.StatusNotFound, "/replica//kill": http.StatusNotFound, "/replica/a/kill": http.StatusOK} {
			code, _ := get(t, client, path)
			assert.Equal(t, want, code, path)
		}
		resp, err := client.Post(fttest.LighthouseAddr+"/status", "text/plain", strings.NewReader("x"))
		require.NoError(t, err)
		code, _ := read(t, resp)
		assert.Equal(t, http.StatusMethodNotAllowed, code)
	})
}

func TestKill(t *testing.T) {
	for _, tc := range []struct {
		name       string
		configured string
		headers    map[string]string
		form       url.Values
		replica    string
		want       int
		says       string
	}{
		{name: "disabled", headers: map[string]string{"Authorization": "Bearer secret"}, want: 403, says: "TORCHFT_KILL_TOKEN"},
		{name: "no token", configured: "secret", want: 403, says: "authorization: Bearer"},
		{name: "wrong token", configured: "secret", headers: map[string]string{"Authorization": "Bearer guess"}, want: 403, says: "wrong"},
		{name: "not a bearer", configured: "secret", headers: map[string]string{"Authorization": "secret"}, want: 403, says: "wrong"},
		{name: "another site", configured: "secret", headers: map[string]string{"Authorization": "Bearer secret", "Origin": "http://evil.example"}, want: 403, says: "another site"},
		{name: "another site, as the browser says", configured: "secret", headers: map[string]string{"Authorization": "Bearer secret", "Sec-Fetch-Site": "cross-site"}, want: 403, says: "another site"},
		{name: "unknown replica", configured: "secret", headers: map[string]string{"Authorization": "Bearer secret"}, replica: "b", want: 404, says: `"b"`},
		{name: "by header", configured: "secret", headers: map[string]string{"Authorization": "Bearer secret"}, want: 200},
		{name: "by the page's form", configured: "secret", headers: map[string]string{"Origin": fttest.LighthouseAddr}, form: url.Values{"token": {"secret"}}, want: 200},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Setenv("TORCHFT_KILL_TOKEN", "")
			synctest.Test(t, func(t *testing.T) {
				c := fttest.NewCluster(t, 1, func(cfg *lighthouse.Config) { cfg.KillToken = tc.configured })
				exited := make(chan int, 1)
				g := c.StartGroup("a:1/2", 1, func(cfg *manager.ServerConfig) {
					cfg.Hostname, cfg.Network = "a", c.Net.Host("a")
					cfg.KillToken, cfg.Exit = tc.configured, func(code int) { exited <- code }
				})
				require.NoError(t, (<-g.Quorum(0, 1, time.Minute)).Err)
				replica := tc.replica
				if replica == "" {
					replica = "a:1/2"
				}
				req, err := http.NewRequest(http.MethodPost, fttest.LighthouseAddr+"/replica/"+url.PathEscape(replica)+"/kill", strings.NewReader(tc.form.Encode()))
				require.NoError(t, err)
				req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
				for name, value := range tc.headers {
					req.Header.Set(name, value)
				}
				resp, err := browser(t, c).Do(req)
				require.NoError(t, err)
				code, body := read(t, resp)
				assert.Equal(t, tc.want, code, body)
				assert.Contains(t, body, tc.says)
				time.Sleep(time.Second)
				assert.Len(t, exited, map[bool]int{true: 1}[tc.want == 200])
			})
		})
	}
}

func TestKillOfAManagerThatIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1, func(cfg *lighthouse.Config) { cfg.KillToken = "secret" })
		g := c.StartGroup("a", 1)
		require.NoError(t, (<-g.Quorum(0, 1, time.Minute)).Err)
		g.Server.Shutdown()
		req, err := http.NewRequest(http.MethodPost, fttest.LighthouseAddr+"/replica/a/kill", nil)
		require.NoError(t, err)
		req.Header.Set("Authorization", "Bearer secret")
		resp, err := browser(t, c).Do(req)
		require.NoError(t, err)
		code, body := read(t, resp)
		assert.Equal(t, http.StatusBadGateway, code)
		assert.Contains(t, body, "could not connect to manager at "+g.Server.Address())
	})
}

// Over real sockets: one port for gRPC, HTTP and whatever else finds it.
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

	client, err := manager.DialLighthouse(t.Context(), server.Address(), 5*time.Second)
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
