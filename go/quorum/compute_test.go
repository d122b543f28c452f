package quorum

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestCompute(t *testing.T) {
	policy := Policy{MinReplicas: 2, JoinTimeout: time.Second, HeartbeatTimeout: 5 * time.Second}
	for _, c := range []struct {
		name   string
		tally  tally
		ready  bool
		reason string
	}{
		{"no request", tally{healthy: 3}, false,
			"no member asks for a quorum"},
		{"no request, and all of the previous quorum have left", tally{previous: 2}, false,
			"no member asks for a quorum"},
		{"too few", tally{healthy: 1, candidates: 1, joining: time.Hour}, false,
			"1 member asked, min_replicas is 2"},
		{"all", tally{healthy: 2, candidates: 2}, true,
			"every healthy member asked (2), 2 in the quorum"},
		{"half", tally{healthy: 4, candidates: 2, joining: time.Hour}, false,
			"2 of 4 healthy members asked, more than half are needed"},
		{"more than half, too early", tally{healthy: 3, candidates: 2, joining: 999 * time.Millisecond},
			false,
			"2 of 3 healthy members asked, the others have 1ms left to join (join_timeout_ms)"},
		{"more than half, after the join timeout", tally{healthy: 3, candidates: 2, joining: time.Second},
			true,
			"2 of 3 healthy members asked before join_timeout_ms passed, 2 in the quorum"},
		{"fast path", tally{healthy: 2, candidates: 2, previous: 2, previousCandidates: 2}, true,
			"every member of the previous quorum asked (2), 2 in the quorum"},
		{"fast path with new members, and some that have not asked",
			tally{healthy: 9, candidates: 3, previous: 2, previousCandidates: 2}, true,
			"every member of the previous quorum asked (2), 3 in the quorum"},
		{"a previous member is missing", tally{healthy: 3, candidates: 2, previous: 3, previousCandidates: 2},
			false,
			"2 of 3 healthy members asked, the others have 1s left to join (join_timeout_ms)"},
		{"shrink, fast path", tally{healthy: 3, candidates: 3, previous: 2, previousCandidates: 2,
			shrinkers: 1}, true,
			"every member of the previous quorum asked (2), 2 in the quorum (shrink_only: of the previous " +
				"quorum)"},
		{"shrink, a previous member left", tally{healthy: 3, candidates: 3, previous: 3,
			previousCandidates: 2, shrinkers: 2}, true,
			"every healthy member asked (3), 2 in the quorum (shrink_only: of the previous quorum)"},
		{"shrink below min_replicas", tally{healthy: 3, candidates: 3, previous: 3, previousCandidates: 1,
			shrinkers: 1}, false,
			"1 member asked (shrink_only: of the previous quorum), min_replicas is 2"},
		{"shrink to no member", tally{healthy: 3, candidates: 3, previous: 3, shrinkers: 1}, false,
			"0 members asked (shrink_only: of the previous quorum), min_replicas is 2"},
		{"shrink without a previous quorum", tally{healthy: 2, candidates: 2, shrinkers: 2}, true,
			"every healthy member asked (2), 2 in the quorum"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := compute(policy, c.tally)
			require.Equal(t, c.ready, d.ready())
			require.Equal(t, c.reason, d.String())
		})
	}
}

func TestPolicyValidate(t *testing.T) {
	good := Policy{MinReplicas: 1, JoinTimeout: time.Millisecond, HeartbeatTimeout: 5 * time.Second}
	require.NoError(t, good.Validate())
	for _, c := range []struct {
		change func(*Policy)
		want   string
	}{
		{func(p *Policy) { p.MinReplicas = 0 }, "min_replicas is 0: it must be at least 1"},
		{func(p *Policy) { p.MinReplicas = -3 }, "min_replicas is -3: it must be at least 1"},
		{func(p *Policy) { p.MinReplicas, p.MaxReplicas = 3, 2 },
			"max_replicas is 2: it must be at least min_replicas (3), or 0 (no limit)"},
		{func(p *Policy) { p.JoinTimeout = 0 }, "join_timeout_ms is 0: it must be more than 0"},
		{func(p *Policy) { p.JoinTimeout = -1500 * time.Microsecond },
			"join_timeout_ms is -1.5: it must be more than 0"},
		{func(p *Policy) { p.HeartbeatTimeout = -time.Second },
			"heartbeat_timeout_ms is -1000: it must be more than 0"},
		{func(p *Policy) { *p = Policy{} }, "min_replicas is 0: it must be at least 1\n" +
			"join_timeout_ms is 0: it must be more than 0\nheartbeat_timeout_ms is 0: it must be more than 0"},
	} {
		p := good
		c.change(&p)
		require.EqualError(t, p.Validate(), c.want)
	}
}
