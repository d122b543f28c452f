package lighthouse_test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/replica"
	"github.com/torchft/torchft/go/slots"
	"github.com/torchft/torchft/go/torchftpb"
)

// openAPI is the OpenAPI document, with its schemas.
type openAPI struct {
	t        *testing.T
	document map[string]any
	compiler *jsonschema.Compiler
}

func readOpenAPI(t *testing.T) openAPI {
	text, err := os.ReadFile("../dashboard/openapi.json")
	require.NoError(t, err)
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	require.NoError(t, err)
	compiler := jsonschema.NewCompiler()
	require.NoError(t, compiler.AddResource("openapi.json", document))
	return openAPI{t, document.(map[string]any), compiler}
}

// at returns the part of the document at a JSON pointer, with references followed, and the pointer at which
// it was found.
func (o openAPI) at(pointer string) (map[string]any, string) {
	part := any(o.document)
	for _, step := range strings.Split(pointer, "/")[1:] {
		part = part.(map[string]any)[strings.NewReplacer("~1", "/", "~0", "~").Replace(step)]
	}
	found, _ := part.(map[string]any)
	if ref, is := found["$ref"].(string); is {
		return o.at(strings.TrimPrefix(ref, "#"))
	}
	return found, pointer
}

// check fails unless the document describes this answer.
func (o openAPI) check(method, path string, code int, kind string, body []byte) {
	o.t.Helper()
	operation := "/paths/" + strings.ReplaceAll(path, "/", "~1") + "/" + strings.ToLower(method)
	response, where := o.at(operation + "/responses/" + strconv.Itoa(code))
	require.NotNil(o.t, response, "%s %s answered %d: it is not described", method, path, code)
	kind, _, _ = strings.Cut(kind, ";")
	require.Contains(o.t, response["content"], kind, "%s %s %d", method, path, code)
	if kind != "application/json" {
		return
	}
	schema, err := o.compiler.Compile("openapi.json#" + where + "/content/application~1json/schema")
	require.NoError(o.t, err)
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	require.NoError(o.t, err)
	require.NoError(o.t, schema.Validate(value), "%s %s %d: %s", method, path, code, body)
}

func TestTheServerAnswersAsOpenAPISays(t *testing.T) {
	o := readOpenAPI(t)
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("a", 1, func(cfg *manager.ServerConfig) {
			cfg.Hostname, cfg.Network, cfg.Exit = "lighthouse", c.Net.Host("lighthouse"), func(int) {}
		})
		require.NoError(t, (<-g.Quorum(0, 1, time.Minute)).Err)
		fttest.ReportHealing(g.Ranks[0], &torchftpb.HealProgress{Received: 1, Total: 2})
		synctest.Wait()
		seen := map[string]bool{}
		ask := func(method, path, body string, want int, headers ...string) {
			req, err := http.NewRequestWithContext(t.Context(), method, fttest.LighthouseAddr+path,
				strings.NewReader(body))
			require.NoError(t, err)
			for i := 0; i < len(headers); i += 2 {
				req.Header.Set(headers[i], headers[i+1])
			}
			resp, err := browser(t, c, "lighthouse").Do(req)
			require.NoError(t, err)
			require.Equal(t, want, resp.StatusCode, path)
			kind := resp.Header.Get("Content-Type")
			var text string
			if strings.HasPrefix(kind, "text/event-stream") {
				require.NoError(t, resp.Body.Close())
			} else {
				_, text = read(t, resp)
			}
			plain, _, _ := strings.Cut(path, "?")
			if operation, _ := o.at("/paths/" + strings.ReplaceAll(plain, "/", "~1") + "/" +
				strings.ToLower(method)); operation != nil || want != 405 {
				o.check(method, plain, resp.StatusCode, kind, []byte(text))
			}
			seen[plain] = true
		}
		ask("GET", "/api/v1/status", "", 200)
		ask("GET", "/api/v1/history?after=x", "", 400)
		ask("GET", "/api/v1/events", "", 200)
		ask("GET", "/api/v1/events?after=-1", "", 400)
		ask("GET", "/api/v1/openapi.json", "", 200)
		ask("GET", "/healthz", "", 200)
		ask("GET", "/readyz", "", 200)
		ask("POST", "/api/v1/keepers", `{"address": "http://b:1", "host": "b", "snapshots": [{"job": "j", "group": "a",
			"group_rank": 0, "path": "a/rank-0/1", "group_world_size": 1, "step": 3, "quorum": 1, "saved": 1.5, "bytes": 4096}],
			"disks": [{"job": "j", "folder": "/ckpt", "written": -1, "writing": 3, "bytes": 5, "problem": "full", "since": 1.5}]}`, 200)
		ask("POST", "/api/v1/keepers", "", 400)
		ask("POST", "/api/v1/keepers", `{}`, 403, "Origin", "http://evil.example")
		ask("GET", "/api/v1/keepers", "", 200)
		ask("GET", "/cluster", "", 404)
		ask("POST", "/api/v1/cluster/add", `{"address": "http://b:1"}`, 404)
		ask("POST", "/api/v1/cluster/remove", `{"address": "http://b:1"}`, 404)
		ask("POST", "/api/v1/scaled", `{}`, 400)
		ask("POST", "/api/v1/scaled", `{"reason": "2 -> 3 groups"}`, 403, "Origin", "http://evil.example")
		ask("POST", "/api/v1/scaled", `{"reason": "2 -> 3 groups"}`, 200)
		ask("POST", "/api/v1/max_replicas", `{"max_replicas": 0}`, 400)
		ask("POST", "/api/v1/max_replicas", `{"max_replicas": 3}`, 200)
		ask("POST", "/api/v1/bad_node", `{}`, 400)
		ask("POST", "/api/v1/bad_node", `{"reason": "host b: XID 79"}`, 200)
		for _, path := range []string{"/api/v1/drain", "/api/v1/kill"} {
			ask("POST", path, "", 400)
			ask("POST", path, `{"replica_id": "b"}`, 404)
			ask("POST", path, `{"replica_id": "`+strings.Repeat("b", 1<<15)+`"}`, 413)
			ask("POST", path, `{"replica_id": "a"}`, 403, "Origin", "http://evil.example")
			ask("POST", path, `{"replica_id": "a"}`, 200)
		}
		fttest.ReportRecovered(g.Ranks[0], &torchftpb.Recovered{Healed: true, Bytes: 5,
			Phases: []*torchftpb.PhaseTime{{Phase: "load", Seconds: 1}}})
		synctest.Wait()
		ask("GET", "/api/v1/history", "", 200)
		g.Server.Shutdown()
		ask("POST", "/api/v1/kill", `{"replica_id": "a"}`, 502)
		for path := range o.document["paths"].(map[string]any) {
			assert.True(t, seen[path], "%s is described, and was not tried", path)
		}
		time.Sleep(time.Second) // net/http closes the connection of a body that it did not read after a while
	})
}

func TestTheExampleOfABodyIsAccepted(t *testing.T) {
	o := readOpenAPI(t)
	schema, err := o.compiler.Compile("openapi.json#/components/schemas/About")
	require.NoError(t, err)
	for body, ok := range map[string]bool{
		`{"replica_id": "a"}`: true, `{}`: false, `{"replica_id": ""}`: false, `{"replica_id": 1}`: false,
		`{"replica_id": "a", "x": 1}`: false,
	} {
		var value any
		require.NoError(t, json.Unmarshal([]byte(body), &value))
		assert.Equal(t, ok, schema.Validate(value) == nil, body)
	}
}

// The JSON answers of the server have exactly the fields that the document names.
func TestOpenAPINamesEachField(t *testing.T) {
	o := readOpenAPI(t)
	for schema, value := range map[string]any{
		"Status": dashboard.Status{}, "Member": dashboard.Member{}, "Event": dashboard.Event{},
		"Point":   dashboard.Point{},
		"Cluster": replica.Status{}, "ClusterMember": replica.Member{},
		"Snapshots": dashboard.Snapshots{}, "Slot": slots.Slot{}, "Disk": slots.Disk{}, "Keeper": lighthouse.KeeperHeld{},
		"Keepers": lighthouse.KeepersAnswer{},
	} {
		var fields, named []string
		for _, field := range reflect.VisibleFields(reflect.TypeOf(value)) {
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			if name != "-" && name != "" { // not embedded
				fields = append(fields, name)
			}
		}
		described, _ := o.at("/components/schemas/" + schema + "/properties")
		for name := range described {
			named = append(named, name)
		}
		assert.ElementsMatch(t, fields, named, schema)
	}
}
