package lighthouse_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/slots"
)

// tell posts the report of a keeper.
func tell(t *testing.T, client *http.Client, job, body string, headers ...string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost,
		fttest.LighthouseAddr+"/api/v1/keepers?job="+job, strings.NewReader(body))
	require.NoError(t, err)
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := client.Do(req)
	require.NoError(t, err)
	return read(t, resp)
}

func reportOf(t *testing.T, host string, held ...slots.Slot) string {
	text, err := json.Marshal(map[string]any{"address": "http://" + host + ":1", "host": host, "snapshots": held})
	require.NoError(t, err)
	return string(text)
}

func heldOf(t *testing.T, client *http.Client, job string) lighthouse.KeepersAnswer {
	t.Helper()
	code, body := get(t, client, "/api/v1/keepers?job="+job)
	require.Equal(t, http.StatusOK, code)
	var answer lighthouse.KeepersAnswer
	require.NoError(t, json.Unmarshal([]byte(body), &answer))
	return answer
}

func TestKeepersTellWhatTheyHoldForAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := browser(t, fttest.NewCluster(t, 1), "far")
		slot := slots.Slot{Job: "train-1", Group: "a", GroupWorldSize: 1, Step: 7, Bytes: 10}
		torn := slots.Slot{Job: "train-1", Group: "a", Path: "a/rank-0/1", Bytes: 10, Incomplete: "torn"}
		time.Sleep(time.Second)
		code, body := tell(t, client, "default", reportOf(t, "b", slot, torn))
		require.Equal(t, http.StatusOK, code, body)
		_, _ = tell(t, client, "default", reportOf(t, "a"))
		_, _ = tell(t, client, "other", reportOf(t, "c", slot))
		answer := heldOf(t, client, "default")
		assert.EqualValues(t, 1000, answer.ListeningMS)
		require.Len(t, answer.Keepers, 2, "those of another job are not listed")
		assert.Equal(t, lighthouse.KeeperHeld{Report: slots.Report{Address: "http://b:1", Host: "b",
			Held: slots.Held{Snapshots: []slots.Slot{slot, torn}}}}, answer.Keepers[1])
		assert.Len(t, heldOf(t, client, "other").Keepers, 1, "a job needs no members to have snapshots")
		_, metrics := get(t, client, "/metrics")
		for _, line := range []string{"torchft_keepers{training_job=\"default\"} 2",
			"torchft_snapshot_step{training_job=\"default\"} 7", "torchft_snapshot_bytes{training_job=\"default\"} 20",
			"torchft_snapshot_incomplete_slots{training_job=\"default\"} 1"} {
			assert.Contains(t, metrics, line)
		}

		time.Sleep(9 * time.Second)
		_, _ = tell(t, client, "default", reportOf(t, "a"))
		time.Sleep(time.Second)
		require.Len(t, heldOf(t, client, "default").Keepers, 1, "a report counts for ten seconds")
		assert.Equal(t, "a", heldOf(t, client, "default").Keepers[0].Host)
		_, metrics = get(t, client, "/metrics")
		assert.NotContains(t, metrics, "torchft_snapshot_step{")
		time.Sleep(10 * time.Second)
		assert.Empty(t, heldOf(t, client, "default").Keepers)
	})
}

func TestTheStepThatAllHostsHaveStoredIsAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := browser(t, fttest.NewCluster(t, 1), "far")
		stored := func(step, part int64) slots.Slot {
			return slots.Slot{Job: "j", Group: fmt.Sprint(part), GroupWorldSize: 1, Step: step,
				Bytes: 10, Share: []int64{part, 2, 1}, Stored: true}
		}
		code, body := tell(t, client, "default", reportOf(t, "a", stored(5, 0), stored(6, 0)))
		require.Equal(t, http.StatusOK, code, body)
		assert.JSONEq(t, `{}`, body)
		text, err := json.Marshal(map[string]any{"address": "http://a:1", "host": "a",
			"snapshots": []slots.Slot{stored(5, 0), stored(6, 0)},
			"disks":     []slots.Disk{{Job: "j", Folder: "/c", Written: 6, Since: 1}}})
		require.NoError(t, err)
		_, _ = tell(t, client, "default", string(text))
		_, metrics := get(t, client, "/metrics")
		assert.NotContains(t, metrics, "torchft_checkpoint_step{")
		_, body = tell(t, client, "default", reportOf(t, "b", stored(5, 1)))
		assert.JSONEq(t, `{"complete": {"j": 5}}`, body)
		_, metrics = get(t, client, "/metrics")
		assert.Contains(t, metrics, "torchft_snapshot_bytes{training_job=\"default\"} 0\n", "they are on disks")
		assert.Contains(t, metrics, "torchft_checkpoint_step{training_job=\"default\"} 5\n")
		bad := stored(5, 1)
		bad.Share = []int64{1, 2}
		code, body = tell(t, client, "default", reportOf(t, "b", bad))
		assert.Equal(t, http.StatusBadRequest, code)
		assert.Contains(t, body, "share is [1 2]")
	})
}

func TestTheStateOfDisksIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := browser(t, fttest.NewCluster(t, 1), "far")
		good := slots.Disk{Job: "j", Folder: "/ckpt", Written: 40, Since: 1.5}
		full := slots.Disk{Job: "j", Folder: "/ckpt", Written: 30, Problem: "no space left on device",
			Since: float64(time.Now().Unix() - 90)}
		for host, disk := range map[string]slots.Disk{"a": good, "b": full} {
			text, err := json.Marshal(map[string]any{"address": "http://" + host + ":1", "host": host,
				"snapshots": []slots.Slot{}, "disks": []slots.Disk{disk}})
			require.NoError(t, err)
			code, body := tell(t, client, "default", string(text))
			require.Equal(t, http.StatusOK, code, body)
		}
		answer := heldOf(t, client, "default")
		assert.Equal(t, []slots.Disk{full}, answer.Keepers[1].Disks)
		_, metrics := get(t, client, "/metrics")
		assert.Contains(t, metrics, `torchft_checkpoint_step{training_job="default"} 40`)
		assert.Contains(t, metrics, `torchft_checkpoint_problem_seconds{training_job="default"} 90`)
		code, body := tell(t, client, "default", `{"address": "http://b:1", "host": "b", "snapshots": [], "disks":
			[{"job": "j", "folder": "`+strings.Repeat("f", 5000)+`", "written": 1, "bytes": 0, "since": 1}]}`)
		assert.Equal(t, http.StatusBadRequest, code)
		assert.Contains(t, body, "the name of a folder has more than 4096 bytes")
		time.Sleep(10 * time.Second)
		_, metrics = get(t, client, "/metrics")
		assert.NotContains(t, metrics, "torchft_checkpoint_step{")
		assert.Contains(t, metrics, `torchft_checkpoint_problem_seconds{training_job="default"} 0`)
	})
}

func TestAReportIsRefusedByName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := browser(t, fttest.NewCluster(t, 1), "far")
		good := reportOf(t, "a")
		for _, c := range []struct {
			job, body, want string
			code            int
			headers         []string
		}{
			{"default", `{"address": "a"}`, `address is \"a\": it must be http://host:port`, 400, nil},
			{"default", `{"where": "a"}`, "where", 400, nil},
			{"default", "", "there is no body", 400, nil},
			{"a/b", good, `job is \"a/b\"`, 400, nil},
			{"default", reportOf(t, strings.Repeat("a", 300)), "allowed are 255", 400, nil},
			{"default", good + strings.Repeat(" ", 300<<10), "the body has more than 262144 bytes", 413, nil},
			{"default", good, "a request of a browser is refused", 403, []string{"Origin", "http://evil.example"}},
		} {
			code, body := tell(t, client, c.job, c.body, c.headers...)
			assert.Equal(t, c.code, code, c.want)
			assert.Contains(t, body, c.want)
		}
		assert.Empty(t, heldOf(t, client, "default").Keepers)
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, fttest.LighthouseAddr+"/api/v1/keepers", nil)
		require.NoError(t, err)
		resp, err := client.Do(req)
		require.NoError(t, err)
		code, _ := read(t, resp)
		assert.Equal(t, http.StatusMethodNotAllowed, code)
		time.Sleep(time.Second) // net/http closes the connection of a body that it did not read after a while
	})
}

func TestAReportNeedsTheToken(t *testing.T) {
	secret := fttest.File(t, "right")
	synctest.Test(t, func(t *testing.T) {
		client := browser(t, fttest.NewCluster(t, 1, func(cfg *lighthouse.Config) {
			cfg.Security = auth.Security{TokenFile: secret}
		}), "far")
		code, body := tell(t, client, "default", reportOf(t, "a"))
		assert.Equal(t, http.StatusUnauthorized, code)
		assert.Contains(t, body, "TORCHFT_TOKEN_FILE")
		code, body = tell(t, client, "default", reportOf(t, "a"), "Authorization", "Bearer wrong")
		assert.Equal(t, http.StatusUnauthorized, code)
		assert.Contains(t, body, "the token is not the job's")
		code, _ = tell(t, client, "default", reportOf(t, "a"), "Authorization", "Bearer right")
		assert.Equal(t, http.StatusOK, code)
	})
}

func TestTooManyKeepersAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := browser(t, fttest.NewCluster(t, 1), "far")
		for i := range 4096 {
			code, _ := tell(t, client, fmt.Sprintf("job-%d", i%7), reportOf(t, fmt.Sprintf("host-%d", i)))
			require.Equal(t, http.StatusOK, code)
		}
		code, body := tell(t, client, "default", reportOf(t, "one-more"))
		assert.Equal(t, http.StatusServiceUnavailable, code)
		assert.Contains(t, body, "4096 keepers")
		code, _ = tell(t, client, "job-0", reportOf(t, "host-0"))
		assert.Equal(t, http.StatusOK, code, "a known one is heard")
		time.Sleep(10 * time.Second)
		code, _ = tell(t, client, "default", reportOf(t, "one-more"))
		assert.Equal(t, http.StatusOK, code, "when the others are silent, there is room")
	})
}
