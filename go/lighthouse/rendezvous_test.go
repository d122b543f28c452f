package lighthouse_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/rendezvous"
)

// agent is a node of torchrun, on its own host.
type agent struct {
	t    *testing.T
	c    *fttest.Cluster
	name string
	ask  int64
	view rendezvous.View
}

// poll sends one request, and returns the status code and the error of the answer.
func (a *agent) poll(ctx context.Context) (int, string) {
	body, err := json.Marshal(rendezvous.Request{
		Group: "0", Node: a.name, Store: a.name + ":1", Ask: a.ask, Seen: a.view,
		Settings: rendezvous.Settings{Min: 1, Max: 2, Sizes: "all", LastCallMS: 5000},
	})
	require.NoError(a.t, err)
	transport := &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			return a.c.Net.Host(a.name).Dial(ctx, addr)
		}}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, fttest.LighthouseAddr+"/rendezvous?job=red",
		strings.NewReader(string(body)))
	require.NoError(a.t, err)
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return 0, err.Error()
	}
	code, text := read(a.t, resp)
	answer := struct {
		View  rendezvous.View `json:"view"`
		Error string          `json:"error"`
	}{}
	require.NoError(a.t, json.Unmarshal([]byte(text), &answer), text)
	if code == http.StatusOK {
		a.view = answer.View
	}
	return code, answer.Error
}

// placed polls until the node is in a round.
func (a *agent) placed(ctx context.Context) {
	a.ask++
	for a.view.Ask != a.ask || a.view.Round == 0 {
		code, why := a.poll(ctx)
		require.Equal(a.t, http.StatusOK, code, why)
	}
}

func TestNodesMeetThroughTheLighthouse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1, func(cfg *lighthouse.Config) { cfg.StateDir = t.TempDir() })
		a, b := &agent{t: t, c: c, name: "a"}, &agent{t: t, c: c, name: "b"}
		ctx, end := context.WithTimeout(t.Context(), time.Minute)
		defer end()
		go a.placed(ctx)
		synctest.Wait()
		b.placed(ctx)
		synctest.Wait()
		assert.Equal(t, rendezvous.View{Ask: 1, Round: 1, Rank: 0, Size: 2, Store: "a:1"}, a.view)
		assert.Equal(t, rendezvous.View{Ask: 1, Round: 1, Rank: 1, Size: 2, Store: "a:1"}, b.view)

		// The connection of b breaks: a continues alone, and waits neither for b nor for the last call.
		broken, breaks := context.WithCancel(ctx)
		go b.poll(broken)
		synctest.Wait()
		breaks()
		// This waits until the broken connection is noticed. If a asked before that, b's request would be
		// answered first, and a would wait for b until the heartbeat timeout.
		synctest.Wait()
		start := time.Now()
		a.placed(ctx)
		assert.Equal(t, rendezvous.View{Ask: 2, Round: 2, Rank: 0, Size: 1, Store: "a:1"}, a.view)
		assert.Less(t, time.Since(start), time.Second)
	})
}

func TestARoundOutlivesTheLighthouse(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		keeps := func(cfg *lighthouse.Config) { cfg.StateDir = dir }
		c := fttest.NewCluster(t, 1, keeps)
		a, b := &agent{t: t, c: c, name: "a"}, &agent{t: t, c: c, name: "b"}
		ctx, end := context.WithTimeout(t.Context(), time.Minute)
		defer end()
		go a.placed(ctx)
		b.placed(ctx)
		synctest.Wait()
		c.Lighthouse.Shutdown()
		c.StartLighthouse(1, keeps)
		for range 3 {
			for _, one := range []*agent{a, b} {
				code, why := one.poll(ctx)
				require.Equal(t, http.StatusOK, code, why)
				assert.Equal(t, int64(1), one.view.Round)
				assert.Zero(t, one.view.Waiting, "the round is unchanged")
			}
		}
		// a asks for another round: it must not get a number that was used before the restart.
		go func() { _, _ = b.poll(ctx) }()
		a.placed(ctx)
		assert.Equal(t, int64(2), a.view.Round)
	})
}

func TestWhichRequestsTheRendezvousAccepts(t *testing.T) {
	token := fttest.File(t, "secret")
	synctest.Test(t, func(t *testing.T) {
		const good = `{"node": "a", "store": "a:1", "min": 1, "max": 1, "sizes": "all", "ask": 1}`
		c := fttest.NewCluster(t, 1, func(cfg *lighthouse.Config) { cfg.Security.TokenFile = token })
		right := map[string]string{"Authorization": "Bearer secret"}
		for _, tc := range []struct {
			name, path, body string
			headers          map[string]string
			code             int
			wantError        string
		}{
			{"no token", "/rendezvous", good, nil, 401, "wants the job's token"},
			{"another token", "/rendezvous", good, map[string]string{"Authorization": "Bearer guess"}, 401,
				"not the job's"},
			{"a browser", "/rendezvous", good,
				map[string]string{"Authorization": "Bearer secret", "Origin": "http://lighthouse:29510"}, 403,
				"browser"},
			{"no body", "/rendezvous", "", right, 400, "there is no body"},
			{"another field", "/rendezvous", `{"rank": 1}`, right, 400, `unknown field "rank"`},
			{"a large body", "/rendezvous", `{"node": "` + strings.Repeat("a", 1<<20) + `"}`, right, 413,
				"more than 16384 bytes"},
			{"a job that is none", "/rendezvous?job=a%20b", good, right, 400, `job is "a b"`},
			{"no size", "/rendezvous", strings.Replace(good, `"all"`, `"7"`, 1), right, 400,
				"7 nodes are not within nnodes 1:1"},
			{"all is well", "/rendezvous", good, right, 200, ""},
			{"other settings", "/rendezvous",
				strings.Replace(strings.Replace(good, `"max": 1`, `"max": 2`, 1), `"node": "a"`,
					`"node": "b"`, 1), right, 409, "is in use by 1 node with nnodes 1:1"},
		} {
			code, answer := call(t, c, "POST", tc.path, tc.body, tc.headers)
			assert.Equal(t, tc.code, code, tc.name)
			assert.Contains(t, fmt.Sprint(answer["error"]), tc.wantError, tc.name)
		}
		time.Sleep(time.Second) // net/http closes the connection of a body that it did not read after a while
	})
}

func TestARendezvousEndsWithItsLighthouse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := &agent{t: t, c: c, name: "a", ask: 1}
		code, _ := a.poll(t.Context()) // registers the agent
		require.Equal(t, http.StatusOK, code)
		done := make(chan int)
		go func() {
			code, _ := a.poll(t.Context())
			done <- code
		}()
		synctest.Wait()
		go c.Lighthouse.Shutdown()
		assert.Contains(t, []int{0, http.StatusServiceUnavailable}, <-done,
			"the connection of a ends, or a gets the reason")
	})
}
