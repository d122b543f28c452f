package lighthouse_test

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/quorum"
)

func TestParseArgs(t *testing.T) {
	home := t.TempDir()
	t.Setenv("XDG_STATE_HOME", home)
	token, other := fttest.File(t, "secret"), fttest.File(t, "other")
	t.Setenv("TORCHFT_TOKEN_FILE", token)
	cfg, err := lighthouse.ParseArgs([]string{"--min_replicas", "2"})
	require.NoError(t, err)
	want := lighthouse.DefaultConfig()
	want.MinReplicas, want.Security.TokenFile = 2, token
	want.StateDir, want.StateOptional = home+"/torchft/lighthouse-"+hostname(t)+"-29510", true
	assert.Equal(t, want, cfg)
	assert.Equal(t, "[::]:29510", cfg.Bind)
	assert.Equal(t, []time.Duration{30 * time.Second, 100 * time.Millisecond, 5 * time.Second},
		[]time.Duration{cfg.JoinTimeout, cfg.QuorumTick, cfg.HeartbeatTimeout})

	cfg, err = lighthouse.ParseArgs([]string{"--min-replicas=3", "--bind", "0.0.0.0:0", "--join_timeout_ms=1",
		"--quorum_tick_ms=2", "--heartbeat_timeout_ms", "3", "--suspect_grace_ms=0", "--token-file", other,
		"--allow-remote-kill", "--max_connections=4", "--max-joins-per-second=5", "--state-dir=/s",
		"--forbid_regression", "--max_jobs=7", "--max-calls-per-job=8"})
	require.NoError(t, err)
	assert.Equal(t, lighthouse.Config{Bind: "0.0.0.0:0", QuorumTick: 2 * time.Millisecond,
		Policy: quorum.Policy{MinReplicas: 3, JoinTimeout: time.Millisecond,
			HeartbeatTimeout: 3 * time.Millisecond, EjectStalledAfter: quorum.EjectAuto,
			ForbidRegression: true},
		Security: auth.Security{TokenFile: other}, AllowRemoteKill: true, MaxConnections: 4,
		MaxJoinsPerSecond: 5, StateDir: "/s", MaxJobs: 7, MaxCallsPerJob: 8}, cfg)
}

func TestWhenAStalledGroupIsEvicted(t *testing.T) {
	for text, after := range map[string]time.Duration{"auto": quorum.EjectAuto, "0": 0, "3000": 3 * time.Second} {
		cfg, err := lighthouse.ParseArgs([]string{"--min_replicas=1", "--eject_stalled_after_ms=7",
			"--eject_stalled_after_ms", text})
		require.NoError(t, err, text)
		assert.Equal(t, after, cfg.EjectStalledAfter, text)
	}
	for _, text := range []string{"-1", "soon"} {
		_, err := lighthouse.ParseArgs([]string{"--min_replicas=1", "--eject_stalled_after_ms=" + text})
		assert.ErrorContains(t, err, "eject_stalled_after_ms", text)
	}
	_, err := lighthouse.ParseArgs([]string{"--min_replicas=1", "--stalled_after_ms=auto"})
	assert.ErrorContains(t, err, "stalled_after_ms", "only this limit has a default of its own")
}

func TestHelpIsUsage(t *testing.T) {
	_, err := lighthouse.ParseArgs([]string{"--help"})
	var help *lighthouse.Help
	require.ErrorAs(t, err, &help)
	for _, flag := range []string{"--bind", "--min_replicas", "--join_timeout_ms", "--quorum_tick_ms",
		"--heartbeat_timeout_ms", "--suspect_grace_ms", "--token_file", "--tls_cert", "--tls_key",
		"--tls_client_ca", "--tls_ca", "--allow_remote_kill", "--max_connections", "--max_joins_per_second",
		"--state_dir", "--forbid_regression", "--max_jobs", "--max_calls_per_job", "--cluster", "--advertise",
		"--recover"} {
		assert.Contains(t, help.Usage, flag)
	}
}

func TestBadArgsAreNamed(t *testing.T) {
	for _, tc := range []struct {
		args      []string
		wantError string
	}{
		{nil, "min_replicas is missing"},
		{[]string{"--min_replicas", "0"}, "min_replicas is 0: it must be at least 1"},
		{[]string{"--min_replicas", "1", "--max_calls_per_job", "0"},
			"max_calls_per_job is 0: it must be at least 1"},
		{[]string{"--min_replicas", "1", "--max_jobs", "0"}, "max_jobs is 0: it must be at least 1"},
		{[]string{"--min_replicas", "-1"}, "min_replicas is -1: it must be at least 1"},
		{[]string{"--min_replicas", "two"}, `"two"`},
		{[]string{"--min_replicas", "1", "--join_timeout_ms", "0"},
			"join_timeout_ms is 0: it must be more than 0"},
		{[]string{"--min_replicas", "1", "--quorum_tick_ms", "-5"},
			"quorum_tick_ms is -5: it must be more than 0"},
		{[]string{"--min_replicas", "1", "--heartbeat_timeout_ms", "0"},
			"heartbeat_timeout_ms is 0: it must be more than 0"},
		{[]string{"--min_replicas", "1", "--suspect_grace_ms", "-1"},
			"suspect_grace_ms is -1: it must be at least 0"},
		{[]string{"--min_replicas", "1", "--join_timeout_ms", "9223372036854775807"},
			"join_timeout_ms is 9223372036854775807: it must be at most"},
		{[]string{"--min_replicas", "1", "--bind", "29510"}, `bind is "29510": it must be host:port`},
		{[]string{"--min_replicas", "1", "--bind", "[::]:70000"},
			`bind is "[::]:70000": it must be host:port`},
		{[]string{"--min_replicas", "1", "--token_file", "/missing"},
			`token_file (TORCHFT_TOKEN_FILE) is "/missing": it cannot be read`},
		{[]string{"--min_replicas", "1", "--tls_cert", "/missing"}, `tls_key (TORCHFT_TLS_KEY) is ""`},
		{[]string{"--min_replicas", "1", "--tls-client-ca", "/missing"}, `tls_cert (TORCHFT_TLS_CERT) is ""`},
		{[]string{"--min_replicas", "1", "--max_connections", "0"},
			"max_connections is 0: it must be at least 1"},
		{[]string{"--min_replicas", "1", "--max_joins_per_second", "0"},
			"max_joins_per_second is 0: it must be at least 1"},
		{[]string{"--min_replicas", "1", "--allow_remote_kill=perhaps"}, "perhaps"},
		{[]string{"--min_replicas", "1", "--color", "red"}, "unknown flag: --color; see --help"},
		{[]string{"--é", "1"}, "unknown flag: --é; see --help"},
		{[]string{"-m", "1"}, "'m' in -m; see --help"},
		{[]string{"--min_replicas", "1", "--cluster", "http://localhost:29510"},
			`--cluster is "http://localhost:29510": it has 1 addresses, but must have 3, 5 or 7`},
		{[]string{"--min_replicas", "1", "--cluster", "http://a:1,http://b:1,http://c:1"},
			`none of its addresses has the port 29510 and a name of this host`},
		{[]string{"--min_replicas", "1", "--cluster", "http://a:1,http://b:1,http://c:1", "--advertise",
			"http://d:1"}, `--advertise is "http://d:1", which is not in --cluster`},
		{[]string{"--min_replicas", "1", "--cluster", "http://a:1,http://b:1,http://c:1", "--advertise",
			"http://a:1", "--state_dir="}, `state_dir is "": a lighthouse of a cluster needs a directory`},
		{[]string{"--min_replicas", "1", "--cluster", "https://a:1,https://b:1,https://c:1", "--advertise",
			"https://a:1"},
			"https://a:1: it must begin with https:// if tls_cert is set, and with http:// otherwise"},
		{[]string{"--min_replicas", "1", "--advertise", "http://a:1"},
			`advertise is "http://a:1": it names this lighthouse among those of cluster, which is not given`},
		{[]string{"--min_replicas", "1", "--recover"}, "recover is set: it needs cluster"},
		{[]string{"--min_replicas", "1", "now"}, `"now" is not understood`},
	} {
		_, err := lighthouse.ParseArgs(tc.args)
		assert.ErrorContains(t, err, tc.wantError)
	}
	cfg := lighthouse.DefaultConfig()
	cfg.MinReplicas, cfg.Hostname = 1, "a b"
	_, err := lighthouse.New(cfg)
	assert.ErrorContains(t, err, `hostname is "a b"`)
}

func hostname(t *testing.T) string {
	t.Helper()
	name, err := os.Hostname()
	require.NoError(t, err)
	return name
}

func TestWhereTheStateIsKept(t *testing.T) {
	t.Setenv("XDG_STATE_HOME", "")
	t.Setenv("HOME", "/home/u")
	for _, tc := range []struct {
		args []string
		dir  string
	}{
		{nil, "/home/u/.local/state/torchft/lighthouse-" + hostname(t) + "-29510"},
		{[]string{"--bind", ":7"}, "/home/u/.local/state/torchft/lighthouse-" + hostname(t) + "-7"},
		{[]string{"--bind", ":0"}, ""},
		{[]string{"--state_dir="}, ""},
		{[]string{"--state_dir=x"}, "x"},
	} {
		cfg, err := lighthouse.ParseArgs(append([]string{"--min_replicas=1"}, tc.args...))
		require.NoError(t, err)
		assert.Equal(t, tc.dir, cfg.StateDir)
		assert.Equal(t, len(tc.args) < 1 || tc.args[0] == "--bind" && tc.dir != "", cfg.StateOptional)
	}
	t.Setenv("HOME", "")
	cfg, err := lighthouse.ParseArgs([]string{"--min_replicas=1"})
	require.NoError(t, err)
	assert.Empty(t, cfg.StateDir)
}
