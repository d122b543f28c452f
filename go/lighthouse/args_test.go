package lighthouse_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/lighthouse"
)

func TestParseArgs(t *testing.T) {
	t.Setenv("TORCHFT_KILL_TOKEN", "from the environment")
	cfg, err := lighthouse.ParseArgs([]string{"--min_replicas", "2"})
	require.NoError(t, err)
	want := lighthouse.DefaultConfig()
	want.MinReplicas, want.KillToken = 2, "from the environment"
	assert.Equal(t, want, cfg)
	assert.Equal(t, "[::]:29510", cfg.Bind)
	assert.Equal(t, []time.Duration{time.Minute, 100 * time.Millisecond, 5 * time.Second}, []time.Duration{cfg.JoinTimeout, cfg.QuorumTick, cfg.HeartbeatTimeout})

	cfg, err = lighthouse.ParseArgs([]string{"--min-replicas=3", "--bind", "0.0.0.0:0", "--join_timeout_ms=1", "--quorum_tick_ms=2", "--heartbeat_timeout_ms", "3", "--suspect_grace_ms=0", "--kill_token", "x"})
	require.NoError(t, err)
	assert.Equal(t, lighthouse.Config{Bind: "0.0.0.0:0", MinReplicas: 3, JoinTimeout: time.Millisecond, QuorumTick: 2 * time.Millisecond, HeartbeatTimeout: 3 * time.Millisecond, KillToken: "x"}, cfg)
}

func TestHelpIsUsage(t *testing.T) {
	_, err := lighthouse.ParseArgs([]string{"--help"})
	var help *lighthouse.Help
	require.ErrorAs(t, err, &help)
	for _, flag := range []string{"--bind", "--min_replicas", "--join_timeout_ms", "--quorum_tick_ms", "--heartbeat_timeout_ms", "--suspect_grace_ms", "--kill_token"} {
		assert.Contains(t, help.Usage, flag)
	}
}

func TestBadArgsAreNamed(t *testing.T) {
	for _, tc := range []struct {
		args []string
		says string
	}{
		{nil, "min_replicas is missing"},
		{[]string{"--min_replicas", "0"}, "min_replicas is 0: it must be at least 1"},
		{[]string{"--min_replicas", "-1"}, "min_replicas is -1: it must be at least 1"},
		{[]string{"--min_replicas", "two"}, `"two"`},
		{[]string{"--min_replicas", "1", "--join_timeout_ms", "0"}, "join_timeout_ms is 0: it must be more than 0"},
		{[]string{"--min_replicas", "1", "--quorum_tick_ms", "-5"}, "quorum_tick_ms is -5: it must be more than 0"},
		{[]string{"--min_replicas", "1", "--heartbeat_timeout_ms", "0"}, "heartbeat_timeout_ms is 0: it must be more than 0"},
		{[]string{"--min_replicas", "1", "--suspect_grace_ms", "-1"}, "suspect_grace_ms is -1: it must be at least 0"},
		{[]string{"--min_replicas", "1", "--join_timeout_ms", "9223372036854775807"}, "join_timeout_ms is 9223372036854775807: it must be at most"},
		{[]string{"--min_replicas", "1", "--bind", "29510"}, `bind is "29510": it must be host:port`},
		{[]string{"--min_replicas", "1", "--bind", "[::]:70000"}, `bind is "[::]:70000": it must be host:port`},
		{[]string{"--min_replicas", "1", "--colour", "red"}, "--colour"},
		{[]string{"--min_replicas", "1", "now"}, `"now" is not understood`},
	} {
		_, err := lighthouse.ParseArgs(tc.args)
		assert.ErrorContains(t, err, tc.says)
	}
	cfg := lighthouse.DefaultConfig()
	cfg.MinReplicas, cfg.Hostname = 1, "a b"
	_, err := lighthouse.New(cfg)
	assert.ErrorContains(t, err, `hostname is "a b"`)
}
