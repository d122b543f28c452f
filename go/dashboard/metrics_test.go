package dashboard

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTheMetricsOfAJobWithAFailure(t *testing.T) {
	j := &job{}
	dead := member("c", 3)
	dead.Healthy = false
	j.set(member("a", 7), member("b", 7), dead)
	f := NewFeed(j.say)
	for i := range 5 {
		f.Round(int64(i), 2, start.Add(time.Duration(i)*100*time.Millisecond))
	}
	f.Round(4, 2, start.Add(10*time.Second)) // a step that was lost is no step
	f.Round(5, 2, start.Add(10400*time.Millisecond))
	f.Record(Event{Kind: QuorumChanged})
	f.Record(Event{Kind: MemberFailed, Left: make([]string, 20)})
	f.Record(Event{Kind: Killed, Left: []string{"c"}})

	require.NoError(t, testutil.CollectAndCompare(f, strings.NewReader(`
# HELP torchft_kills_total Members that were ended on request.
# TYPE torchft_kills_total counter
torchft_kills_total 1
# HELP torchft_member_failures_total Members that were found dead.
# TYPE torchft_member_failures_total counter
torchft_member_failures_total 20
# HELP torchft_members Members by state.
# TYPE torchft_members gauge
torchft_members{state="dead"} 1
torchft_members{state="joining"} 0
torchft_members{state="training"} 2
torchft_members{state="waiting"} 0
# HELP torchft_quorum_changes_total Quorums with other members than the one before.
# TYPE torchft_quorum_changes_total counter
torchft_quorum_changes_total 1
# HELP torchft_quorum_id Id of the latest quorum.
# TYPE torchft_quorum_id gauge
torchft_quorum_id 3
# HELP torchft_quorum_rounds_total Quorums answered, one for each step.
# TYPE torchft_quorum_rounds_total counter
torchft_quorum_rounds_total 7
# HELP torchft_step_seconds Time from one step of the job to the next.
# TYPE torchft_step_seconds histogram
torchft_step_seconds_bucket{le="0.005"} 0
torchft_step_seconds_bucket{le="0.01"} 0
torchft_step_seconds_bucket{le="0.02"} 0
torchft_step_seconds_bucket{le="0.04"} 0
torchft_step_seconds_bucket{le="0.08"} 0
torchft_step_seconds_bucket{le="0.16"} 4
torchft_step_seconds_bucket{le="0.32"} 4
torchft_step_seconds_bucket{le="0.64"} 4
torchft_step_seconds_bucket{le="1.28"} 4
torchft_step_seconds_bucket{le="2.56"} 4
torchft_step_seconds_bucket{le="5.12"} 4
torchft_step_seconds_bucket{le="10.24"} 5
torchft_step_seconds_bucket{le="20.48"} 5
torchft_step_seconds_bucket{le="40.96"} 5
torchft_step_seconds_bucket{le="81.92"} 5
torchft_step_seconds_bucket{le="163.84"} 5
torchft_step_seconds_bucket{le="+Inf"} 5
torchft_step_seconds_sum 10.4
torchft_step_seconds_count 5
`), "torchft_kills_total", "torchft_member_failures_total", "torchft_members", "torchft_quorum_changes_total", "torchft_quorum_id",
		"torchft_quorum_rounds_total", "torchft_step_seconds"))
}

func TestTheMetricsAreNamedAsPrometheusWantsThem(t *testing.T) {
	found, err := testutil.GatherAndLint(NewFeed((&job{}).say).registry())
	require.NoError(t, err)
	assert.Empty(t, found)
}

func TestMetricsAreServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		code, body, header := serve(t, &job{}).get(t, "/metrics")
		assert.Equal(t, 200, code)
		assert.Contains(t, body, "torchft_members{state=\"training\"} 0")
		assert.Contains(t, body, "go_goroutines")
		assert.Contains(t, header.Get("Content-Type"), "text/plain")
	})
}
