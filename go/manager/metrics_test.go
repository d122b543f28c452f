package manager_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/torchftpb"
)

// scrape returns the metrics of a manager server, requested from another host.
func scrape(t *testing.T, c *fttest.Cluster, g *fttest.Group, token string) (int, string) {
	t.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
		return c.Net.Host("far").Dial(ctx, addr)
	}}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequest(http.MethodGet, g.Server.Address()+"/metrics", nil)
	require.NoError(t, err)
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	require.NoError(t, err)
	defer func() { require.NoError(t, resp.Body.Close()) }()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(body)
}

// While a quorum stands, a step is the time from one vote to the next.
func TestThePhasesOfAQuorumThatStands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := c.StartGroup("a", 1)
		answers{a.QuorumWith(&fttest.Request{Step: 1, CommittedQuorumId: 7}, time.Minute)}.results(t)
		for step := range int64(3) {
			time.Sleep(2 * time.Second)
			require.NoError(t, (<-a.Vote(0, 1+step, true, time.Minute)).Err)
		}
		_, body := scrape(t, c, a, "")
		for _, want := range []string{
			`torchft_manager_phase_seconds_count{group="a",phase="quorum",training_job="default"} 1`,
			`torchft_manager_phase_seconds_count{group="a",phase="step",training_job="default"} 3`,
			`torchft_manager_phase_seconds_sum{group="a",phase="step",training_job="default"} 6`,
		} {
			assert.Contains(t, body, want+"\n")
		}
	})
}

func TestTheMetricsOfAGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := c.StartGroup("a", 2, func(cfg *manager.ServerConfig) { cfg.ReplicaID = "a:1f2e" })
		for step := range int64(3) {
			first := a.Quorum(0, step, time.Minute)
			time.Sleep(time.Second) // the other rank is slower
			answers{first, a.Quorum(1, step, time.Minute)}.results(t)
			time.Sleep(2 * time.Second)
			vote := a.Vote(0, step, true, time.Minute)
			time.Sleep(4 * time.Second)
			require.NoError(t, (<-a.Vote(1, step, step != 1, time.Minute)).Err)
			require.NoError(t, (<-vote).Err)
		}
		phases := []*torchftpb.PhaseTime{{Phase: "transfer", Seconds: 2}, {Phase: "load", Seconds: 0.5},
			{Phase: "an unknown one", Seconds: 1}}
		fttest.ReportRecovered(a.Ranks[0], &torchftpb.Recovered{Healed: true, Bytes: 1000, Phases: phases})
		fttest.ReportRecovered(a.Ranks[1], &torchftpb.Recovered{GroupRank: 1, StepsLost: 2,
			Phases: []*torchftpb.PhaseTime{{Phase: "abort", Seconds: 0.25}}})
		for name := range manager.Counters {
			fttest.ReportCount(a.Ranks[1], &torchftpb.Counted{GroupRank: 1, Name: name, Number: 3})
			fttest.ReportCount(a.Ranks[1], &torchftpb.Counted{GroupRank: 1, Name: name, Number: -1})
			// the group has no rank 2
			fttest.ReportCount(a.Ranks[1], &torchftpb.Counted{GroupRank: 2, Name: name, Number: 1})
		}
		fttest.ReportCount(a.Ranks[1], &torchftpb.Counted{GroupRank: 1, Name: "unknown", Number: 1})
		synctest.Wait()
		code, body := scrape(t, c, a, "")
		require.Equal(t, http.StatusOK, code)
		const labels = `{group="a",training_job="default"`
		for _, counter := range manager.Counters {
			metric := counter.Metric
			assert.True(t, strings.Contains(body, metric+labels+"} 3\n"), "%s is not in\n%s", metric, body)
		}
		for _, want := range []string{
			"torchft_manager_commits_total" + labels + "} 2\n",
			"torchft_manager_lost_steps_total" + labels + "} 1\n",
			"torchft_manager_step" + labels + "} 2\n",
			"torchft_manager_step_seconds_sum" + labels + "} 14\n",
			"torchft_manager_step_seconds_count" + labels + "} 1\n",
			`torchft_manager_phase_seconds_sum{group="a",phase="gather",training_job="default"} 3` + "\n",
			`torchft_manager_phase_seconds_sum{group="a",phase="step",training_job="default"} 6` + "\n",
			`torchft_manager_phase_seconds_sum{group="a",phase="vote",training_job="default"} 12` + "\n",
			`torchft_manager_phase_seconds_count{group="a",phase="quorum",training_job="default"} 3` + "\n",
			"torchft_manager_heals_total" + labels + "} 1\n",
			"torchft_manager_healed_bytes_total" + labels + "} 1000\n",
			"torchft_manager_recovery_lost_steps_total" + labels + "} 2\n",
			`torchft_manager_recovery_seconds_total{group="a",phase="transfer",recovery="heal",training_job="default"} 2` + "\n",
			`torchft_manager_recovery_seconds_total{group="a",phase="other",recovery="heal",training_job="default"} 1` + "\n",
			`torchft_manager_recovery_seconds_total{group="a",phase="abort",recovery="failure",training_job="default"} 0.25` + "\n",
			"torchft_manager_nonfinite_syncs_total" + labels + "} 3\n",
			"go_goroutines ",
		} {
			assert.True(t, strings.Contains(body, want), "%s is not in\n%s", want, body)
		}
		problems, err := promlint.New(strings.NewReader(body)).Lint()
		require.NoError(t, err)
		assert.Empty(t, problems)

		operating, err := os.ReadFile("../../docs/metrics.md")
		require.NoError(t, err)
		for _, name := range regexp.MustCompile(`(?m)^# TYPE (torchft_\w+)`).FindAllStringSubmatch(body, -1) {
			assert.True(t, strings.Contains(string(operating), name[1]), "%s is not documented", name[1])
		}
		for _, name := range regexp.MustCompile("torchft_manager_[a-z_]+").FindAllString(string(operating),
			-1) {
			assert.True(t, strings.Contains(body, "# TYPE "+name+" "), "%s is documented, and not there",
				name)
		}
		grafana, err := os.ReadFile("../../docs/grafana.json")
		require.NoError(t, err)
		suffix := regexp.MustCompile("_(bucket|sum|count)$")
		shown := map[string]bool{}
		for _, name := range regexp.MustCompile("torchft_(manager|log)_[a-z_]+").FindAllString(string(grafana), -1) {
			name = suffix.ReplaceAllString(name, "")
			assert.True(t, strings.Contains(body, "# TYPE "+name+" "),
				"docs/grafana.json uses %s, which does not exist", name)
			shown[name] = true
		}
		for _, name := range regexp.MustCompile(`(?m)^# TYPE (torchft_\w+)`).FindAllStringSubmatch(body, -1) {
			assert.True(t, shown[name[1]], "%s is on no panel of docs/grafana.json", name[1])
		}
	})
}

func TestTheMetricsWantTheToken(t *testing.T) {
	token := fttest.File(t, "secret")
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := c.StartGroup("a", 1, func(cfg *manager.ServerConfig) { cfg.Security.TokenFile = token })
		for shown, want := range map[string]int{"": 401, "guess": 401, "secret": 200} {
			code, body := scrape(t, c, a, shown)
			assert.Equal(t, want, code)
			assert.Equal(t, want == 200, strings.Contains(body, "torchft_manager"))
		}
	})
}
