package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// onlyFailures draws a job whose groups fail at any moment, one or several at once, and come back.
func onlyFailures(seed uint64) Setup {
	s := Draw(seed, 2+int(seed%4), 400)
	s.Replay, s.OnlyFailures = true, true
	s.Policy.MinReplicas = 1
	s.Loss, s.Duplicate, s.Straggle = 0, 0, 0
	for i := range s.Faults {
		f := &s.Faults[i]
		f.Kind = []FaultKind{Crash, Crash, Vanish, Leave}[(seed+uint64(i))%4]
		f.N = 0
		if f.Slots == 0 {
			f.Slots = 1
		}
	}
	return s
}

// No step that a live group has computed is lost when groups fail: at any moment, one or several at once, in each phase of a
// replay, and while others join.
func TestAFailureCostsNoStep(t *testing.T) {
	joins := 0
	for p, name := range map[phase]string{
		idle: "in a step", agreeing: "while its ranks agree", awaiting: "before the quorum", working: "while it connects",
		reducing: "while it reduces", voting: "before the decision",
	} {
		t.Run(name, func(t *testing.T) {
			var replays, commits uint64
			failures := 0
			for seed := range uint64(budget(40, 4)) {
				s := onlyFailures(seed)
				s.ReplayFailure = p
				r := hold(t, s)
				require.Zero(t, r.NotReplayed)
				replays, commits, joins = replays+r.Replays, commits+r.Commits, joins+r.replayJoins
				failures += r.replayFailures[p]
			}
			t.Logf("%d commits, %d replays, %d failures in this phase of a replay; in all phases so far, %d groups joined during a replay", commits, replays, failures, joins)
			require.NotZero(t, replays)
			require.Equal(t, p != idle, failures > 0)
		})
	}
	require.NotZero(t, joins, "no group joined during a replay")
}

// Without replay the same failures cost steps.
func TestWithoutReplayAFailureCostsSteps(t *testing.T) {
	lost := 0
	for seed := range uint64(10) {
		s := onlyFailures(seed)
		s.Replay, s.OnlyFailures = false, false
		lost += int(hold(t, s).Lost)
	}
	require.NotZero(t, lost)
}
