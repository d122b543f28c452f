package lighthouse_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/manager"
)

// call makes a request of the API, and returns the answer, which is always JSON.
func call(
	t *testing.T, c *fttest.Cluster, method, path, body string, headers map[string]string,
) (int, map[string]any) {
	t.Helper()
	req, err := http.NewRequest(method, fttest.LighthouseAddr+path, strings.NewReader(body))
	require.NoError(t, err)
	for name, value := range headers {
		req.Header.Set(name, value)
	}
	resp, err := browser(t, c, "lighthouse").Do(req)
	require.NoError(t, err)
	assert.Equal(t, "application/json", resp.Header.Get("Content-Type"), path)
	code, text := read(t, resp)
	var answer map[string]any
	require.NoError(t, json.Unmarshal([]byte(text), &answer), text)
	return code, answer
}

func TestTheAPIRefusesBadRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		for _, tc := range []struct {
			name, method, path, body string
			code                     int
			wantError                string
		}{
			{"no body", "POST", "/kill", "", 400, "there is no body"},
			{"no JSON", "POST", "/kill", "a", 400, "the body is not understood: invalid character 'a'"},
			{"cut off", "POST", "/drain", `{"replica_id": "a`, 400,
				"the body is not understood: unexpected EOF"},
			{"another field", "POST", "/drain", `{"replica": "a"}`, 400,
				`unknown field "replica"; wanted: {"replica_id": "..."}`},
			{"another type", "POST", "/drain", `{"replica_id": 7}`, 400, "cannot unmarshal number"},
			{"a list", "POST", "/kill", `["a"]`, 400, "cannot unmarshal array"},
			{"two values", "POST", "/kill", `{"replica_id": "a"} {}`, 400, "more than one value"},
			{"no name", "POST", "/kill", `{}`, 400, `replica_id is ""`},
			{"a long name", "POST", "/kill", `{"replica_id": "` + strings.Repeat("a", 1025) + `"}`, 400,
				"replica_id has 1025 bytes: allowed are 1024"},
			{"a large body", "POST", "/drain", `{"replica_id": "` + strings.Repeat("a", 1<<20) + `"}`, 413,
				"more than 16384 bytes"},
			{"an unknown member", "POST", "/kill", `{"replica_id": "<b>"}`, 404, `member "<b>" is not known`},
			{"an unknown member", "POST", "/drain", `{"replica_id": "b"}`, 404, `member "b" is not known`},
			{"no reason", "POST", "/scaled", `{}`, 400, "reason is empty"},
			{"too few", "POST", "/max_replicas", `{}`, 400, "max_replicas is 0: it must be at least 1"},
			{"another job", "POST", "/max_replicas?job=x", `{"max_replicas": 2}`, 404, `job "x"`},
			{"no reason", "POST", "/bad_node", `{}`, 400, "reason is empty"},
			{"another job", "POST", "/scaled?job=x", `{"reason": "a"}`, 404, `no group of job "x" has joined`},
			{"another method", "GET", "/kill", "", 405, "GET /api/v1/kill is not allowed; allowed: POST"},
			{"another method", "DELETE", "/drain", "", 405, "allowed: POST"},
			{"another path", "POST", "/nothing", "", 404, "there is no POST /api/v1/nothing"},
			{"POST of a route that reads", "POST", "/status", "", 404, "there is no POST /api/v1/status"},
			{"another job", "GET", "/status?job=x", "", 404, `no group of job "x" has joined`},
		} {
			code, answer := call(t, c, tc.method, "/api/v1"+tc.path, tc.body, nil)
			assert.Equal(t, tc.code, code, tc.name)
			assert.Contains(t, answer["error"], tc.wantError, tc.name)
		}
		time.Sleep(time.Second) // net/http closes the connection of a body that it did not read after a while
	})
}

func TestChangesOverTheAPIWantTheToken(t *testing.T) {
	token := fttest.File(t, "secret")
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1, func(cfg *lighthouse.Config) { cfg.Security.TokenFile = token })
		exited := make(chan int, 1)
		g := c.StartGroup("a", 1, func(cfg *manager.ServerConfig) {
			cfg.Security.TokenFile, cfg.Exit = token, func(code int) { exited <- code }
		})
		require.NoError(t, (<-g.Quorum(0, 1, time.Minute)).Err)
		const body = `{"replica_id": "a"}`
		right := map[string]string{"Authorization": "Bearer secret"}
		for _, path := range []string{"/api/v1/kill", "/api/v1/drain"} {
			code, answer := call(t, c, "POST", path, body, nil)
			assert.Equal(t, 401, code)
			assert.Contains(t, answer["error"], "wants the job's token")
			code, answer = call(t, c, "POST", path, body, map[string]string{"Authorization": "Bearer guess"})
			assert.Equal(t, 401, code)
			assert.Contains(t, answer["error"], "not the job's")
			code, answer = call(t, c, "POST", path, body,
				map[string]string{"Authorization": "Bearer secret", "Origin": "http://evil.example"})
			assert.Equal(t, 403, code)
			assert.Contains(t, answer["error"], "another site")
		}
		code, answer := call(t, c, "POST", "/api/v1/drain", body, right)
		assert.Equal(t, 200, code)
		assert.Equal(t, map[string]any{"replica_id": "a", "done": "asked to leave at the end of a step"},
			answer)
		_, status := call(t, c, "GET", "/api/v1/status", "", nil)
		assert.Contains(t, status["members"].([]any)[0].(map[string]any)["draining"], "requested from")
		const why = `{"reason": "2 -> 3 groups"}`
		code, answer = call(t, c, "POST", "/api/v1/scaled", why, nil)
		assert.Equal(t, 401, code)
		assert.Contains(t, answer["error"], "wants the job's token")
		code, answer = call(t, c, "POST", "/api/v1/scaled", why, right)
		assert.Equal(t, 200, code)
		assert.Equal(t, map[string]any{"done": "recorded"}, answer)
		code, _ = call(t, c, "POST", "/api/v1/max_replicas", `{"max_replicas": 3}`, nil)
		assert.Equal(t, 401, code)
		code, _ = call(t, c, "POST", "/api/v1/max_replicas", `{"max_replicas": 3}`, right)
		assert.Equal(t, 200, code)
		code, _ = call(t, c, "POST", "/api/v1/bad_node", `{"reason": "host b: XID 79"}`, right)
		assert.Equal(t, 200, code)
		time.Sleep(time.Second) // a status is shared for a while
		_, status = call(t, c, "GET", "/api/v1/status", "", nil)
		assert.InDelta(t, 3, status["max_replicas"], 0)
		var notices []any
		for _, event := range status["notices"].([]any) {
			notices = append(notices, event.(map[string]any)["reason"])
		}
		assert.Equal(t, []any{"2 -> 3 groups", "host b: XID 79"}, notices)
		code, answer = call(t, c, "POST", "/api/v1/kill", body, right)
		assert.Equal(t, 200, code)
		assert.Equal(t, map[string]any{"replica_id": "a", "done": "asked to end"}, answer)
		time.Sleep(time.Second)
		assert.Len(t, exited, 1)
		_, history := call(t, c, "GET", "/api/v1/history", "", nil)
		var kinds []any
		for _, event := range history["events"].([]any) {
			event := event.(map[string]any)
			kinds = append(kinds, event["kind"])
			if event["kind"] == "scaled" {
				assert.Equal(t, "2 -> 3 groups", event["reason"])
			}
		}
		assert.Equal(t, []any{"quorum", "drained", "scaled", "bad_node", "killed"}, kinds)
		for range 60 {
			code, answer = call(t, c, "POST", "/api/v1/scaled", why, right)
		}
		assert.Equal(t, 429, code)
		assert.Contains(t, answer["error"], "more than 60 such events in a minute")
		time.Sleep(time.Minute)
		code, _ = call(t, c, "POST", "/api/v1/scaled", why, right)
		assert.Equal(t, 200, code)
	})
}
