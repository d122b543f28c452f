package dashboard

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/quorum"
)

func TestTheMetricsOfAJobWithAFailure(t *testing.T) {
	j := &job{}
	failed := member("c", 3)
	failed.Healthy = false
	evaluates := member("a", 7)
	evaluates.Phase = quorum.Evaluation.String()
	j.set(evaluates, member("b", 7), failed)
	f := NewFeed("default", false, j.current)
	for i := range 5 {
		f.Round(int64(i), 2, 20*time.Millisecond, start.Add(time.Duration(i)*100*time.Millisecond))
	}
	// step 4 again, since it was not committed: this is not counted as a step
	f.Round(4, 2, 20*time.Millisecond, start.Add(10*time.Second))
	f.Round(5, 2, 20*time.Millisecond, start.Add(10400*time.Millisecond))
	// a group with a checkpoint joins: no step took so short
	f.Round(5000, 2, 20*time.Millisecond, start.Add(10500*time.Millisecond))
	f.Record(Event{Kind: QuorumChanged})
	f.Failed(quorum.Silent)
	f.Failed(quorum.Connection)
	f.Failed(quorum.Connection)
	f.Record(Event{Kind: MemberFailed, Left: make([]string, 3)})
	f.Heard()
	phases := []Phase{{"transfer", 2}, {"load", 1}, {"total", 3}}
	f.Record(Event{Kind: Healed, Who: "c", Bytes: 1000, Phases: phases})
	f.Record(Event{Kind: Recovered, Who: "a", StepsLost: 2, Phases: phases[2:]})
	f.Record(Event{Kind: Drained, Left: []string{"b"}})
	f.Record(Event{Kind: Killed, Left: []string{"c"}})
	f.Record(Event{Kind: Stopped, Reason: "the same exception"})
	f.Record(Event{Kind: Corrupted, Left: []string{"b"}, Reason: "step 7"})
	f.Record(Event{Kind: MemberStalled, Left: []string{"a", "b"}, Reason: "no progress"})
	f.Record(Event{Kind: Regressed, Reason: "the job had reached step 9"})

	require.NoError(t, testutil.CollectAndCompare(collector(func() []*Feed { return []*Feed{f} }), strings.NewReader(`
# HELP torchft_corrupted_gradients_total Audits in which groups computed different gradients of the same unit.
# TYPE torchft_corrupted_gradients_total counter
torchft_corrupted_gradients_total{training_job="default"} 1
# HELP torchft_drains_total Members that were asked to leave at the end of a step.
# TYPE torchft_drains_total counter
torchft_drains_total{training_job="default"} 1
# HELP torchft_healed_bytes_total Bytes of these states, of the first rank of each group.
# TYPE torchft_healed_bytes_total counter
torchft_healed_bytes_total{training_job="default"} 1000
# HELP torchft_heals_total Groups that took over the state of another.
# TYPE torchft_heals_total counter
torchft_heals_total{training_job="default"} 1
# HELP torchft_heartbeats_total Heartbeats, which members send when they send nothing else.
# TYPE torchft_heartbeats_total counter
torchft_heartbeats_total{training_job="default"} 1
# HELP torchft_lost_steps_total Steps that the survivors of failures lost.
# TYPE torchft_lost_steps_total counter
torchft_lost_steps_total{training_job="default"} 2
# HELP torchft_kills_total Members that were ended on request.
# TYPE torchft_kills_total counter
torchft_kills_total{training_job="default"} 1
# HELP torchft_member_failures_total Members that were found failed, by cause.
# TYPE torchft_member_failures_total counter
torchft_member_failures_total{cause="connection",training_job="default"} 2
torchft_member_failures_total{cause="parted",training_job="default"} 0
torchft_member_failures_total{cause="rank",training_job="default"} 0
torchft_member_failures_total{cause="silent",training_job="default"} 1
torchft_member_failures_total{cause="stalled",training_job="default"} 0
torchft_member_failures_total{cause="unanswered",training_job="default"} 0
torchft_member_failures_total{cause="unreachable",training_job="default"} 0
# HELP torchft_member_stalls_total Members that made no progress while others waited for them.
# TYPE torchft_member_stalls_total counter
torchft_member_stalls_total{training_job="default"} 2
# HELP torchft_job_stops_total Exceptions that would have ended the job again and again, so that it was stopped.
# TYPE torchft_job_stops_total counter
torchft_job_stops_total{training_job="default"} 1
# HELP torchft_members_in_phase Live members by the phase that they report.
# TYPE torchft_members_in_phase gauge
torchft_members_in_phase{phase="between_steps",training_job="default"} 0
torchft_members_in_phase{phase="checkpoint",training_job="default"} 0
torchft_members_in_phase{phase="ending",training_job="default"} 0
torchft_members_in_phase{phase="evaluation",training_job="default"} 1
torchft_members_in_phase{phase="first_steps",training_job="default"} 0
torchft_members_in_phase{phase="healing",training_job="default"} 0
torchft_members_in_phase{phase="starting",training_job="default"} 0
torchft_members_in_phase{phase="training",training_job="default"} 0
# HELP torchft_members Members by state.
# TYPE torchft_members gauge
torchft_members{state="failed",training_job="default"} 1
torchft_members{state="draining",training_job="default"} 0
torchft_members{state="healing",training_job="default"} 0
torchft_members{state="joining",training_job="default"} 0
torchft_members{state="stalled",training_job="default"} 0
torchft_members{state="standby",training_job="default"} 0
torchft_members{state="suspect",training_job="default"} 0
torchft_members{state="training",training_job="default"} 2
torchft_members{state="waiting",training_job="default"} 0
# HELP torchft_quorum_changes_total Quorums with other members than the one before.
# TYPE torchft_quorum_changes_total counter
torchft_quorum_changes_total{training_job="default"} 1
# HELP torchft_quorum_id Id of the latest quorum.
# TYPE torchft_quorum_id gauge
torchft_quorum_id{training_job="default"} 3
# HELP torchft_quorum_rounds_total Quorums answered. While a quorum stands, its members train on without another one.
# TYPE torchft_quorum_rounds_total counter
torchft_quorum_rounds_total{training_job="default"} 8
# HELP torchft_regressions_total Quorums below the step that the job had reached: later steps are lost.
# TYPE torchft_regressions_total counter
torchft_regressions_total{training_job="default"} 1
# HELP torchft_step_seconds Time from one step of the job to the next.
# TYPE torchft_step_seconds histogram
torchft_step_seconds_bucket{training_job="default",le="0.005"} 0
torchft_step_seconds_bucket{training_job="default",le="0.01"} 0
torchft_step_seconds_bucket{training_job="default",le="0.02"} 0
torchft_step_seconds_bucket{training_job="default",le="0.04"} 0
torchft_step_seconds_bucket{training_job="default",le="0.08"} 0
torchft_step_seconds_bucket{training_job="default",le="0.16"} 4
torchft_step_seconds_bucket{training_job="default",le="0.32"} 4
torchft_step_seconds_bucket{training_job="default",le="0.64"} 4
torchft_step_seconds_bucket{training_job="default",le="1.28"} 4
torchft_step_seconds_bucket{training_job="default",le="2.56"} 4
torchft_step_seconds_bucket{training_job="default",le="5.12"} 4
torchft_step_seconds_bucket{training_job="default",le="10.24"} 5
torchft_step_seconds_bucket{training_job="default",le="20.48"} 5
torchft_step_seconds_bucket{training_job="default",le="40.96"} 5
torchft_step_seconds_bucket{training_job="default",le="81.92"} 5
torchft_step_seconds_bucket{training_job="default",le="163.84"} 5
torchft_step_seconds_bucket{training_job="default",le="+Inf"} 5
torchft_step_seconds_sum{training_job="default"} 10.4
torchft_step_seconds_count{training_job="default"} 5
`), "torchft_corrupted_gradients_total", "torchft_drains_total", "torchft_healed_bytes_total", "torchft_heals_total", "torchft_heartbeats_total", "torchft_lost_steps_total", "torchft_kills_total", "torchft_member_failures_total", "torchft_member_stalls_total", "torchft_job_stops_total", "torchft_members_in_phase", "torchft_members", "torchft_quorum_changes_total", "torchft_quorum_id",
		"torchft_quorum_rounds_total", "torchft_step_seconds"))
}

func TestTheStepsOfAQuorumThatStandsAreNoRounds(t *testing.T) {
	f := NewFeed("default", false, (&job{}).current)
	f.Round(4, 2, 20*time.Millisecond, start)
	f.Advanced(54, 2, start.Add(time.Second))
	f.Advanced(1_000_054, 2, start.Add(time.Hour)) // the lighthouse was away
	f.Round(1_000_054, 2, 20*time.Millisecond, start.Add(time.Hour))
	out := httptest.NewRecorder()
	Metrics(func() []*Feed { return []*Feed{f} }).ServeHTTP(out,
		httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for _, line := range []string{
		`torchft_quorum_rounds_total{training_job="default"} 2`,
		`torchft_quorum_seconds_count{training_job="default"} 2`,
		`torchft_step_seconds_count{training_job="default"} 1050`,
		`torchft_step_seconds_bucket{training_job="default",le="0.005"} 1000`,
		`torchft_step_seconds_bucket{training_job="default",le="0.02"} 1050`,
	} {
		assert.Contains(t, out.Body.String(), line+"\n")
	}
}

func TestTheMetricsAreNamedAsPrometheusWantsThem(t *testing.T) {
	found, err := testutil.GatherAndLint(registry(func() []*Feed {
		return []*Feed{NewFeed("default", false,
			(&job{}).current)}
	}))
	require.NoError(t, err)
	assert.Empty(t, found)
}

func TestTwoJobsAndProcess(t *testing.T) {
	one, two := NewFeed("one", false, (&job{}).current), NewFeed("two", false, (&job{}).current)
	two.Record(Event{Kind: Killed, Left: []string{"c"}})
	recorder := httptest.NewRecorder()
	Metrics(func() []*Feed { return []*Feed{one, two} }).ServeHTTP(recorder,
		httptest.NewRequest(http.MethodGet, "/metrics", nil))
	assert.Equal(t, 200, recorder.Code)
	assert.Contains(t, recorder.Body.String(), `torchft_kills_total{training_job="one"} 0`)
	assert.Contains(t, recorder.Body.String(), `torchft_kills_total{training_job="two"} 1`)
	assert.Contains(t, recorder.Body.String(), "go_goroutines")
}
