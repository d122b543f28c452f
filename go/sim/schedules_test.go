package sim

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// Histories with a list of lighthouses in which the question is whether the vote of an ended group still counts. The planted
// mistakes that they find are in mutants_test.go.
func TestJobsThatMoveWhileAGroupEnds(t *testing.T) {
	t.Parallel()
	for name, setup := range map[string]func(*Setup){"withheld": withheld, "renewed": renewed, "silent": silent, "lagging": lagging} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(budget(20, 2)) {
				s := Draw(seed, 2, 400)
				setup(&s)
				require.Equal(t, len(s.Faults), hold(t, s).FaultsHit)
			}
		})
	}
}

// Upstream groups make calls at the first lighthouse of the list only, know no term, and cannot show an earlier quorum. The first
// lighthouse knows all of their quorums, after a restart from its disk. The exception is a quorum that had not been written yet:
// docs/correctness.md has the promise that does not hold then.
func TestUpstreamGroupsAtTwoLighthouses(t *testing.T) {
	t.Parallel()
	for _, job := range []struct {
		upstream Slots
		seeds    int
		setup    func(*Setup)
	}{
		{0b0010, 45, several},
		{0b0001, 15, restless},
		{0b0110, 15, restless},
	} {
		for seed := range uint64(budget(job.seeds, 1)) {
			s := Draw(3000+seed, 0, 200)
			job.setup(&s)
			s.Slots, s.Upstream, s.Disk, s.Duplicate = max(s.Slots, 4), job.upstream, true, 0
			s.Faults = slices.DeleteFunc(s.Faults, func(f Fault) bool { return f.Kind == Noise })
			if b := Run(s, nil).Broken; b != nil {
				require.Equal(t, ruleEqual, b.Rule, "seed %d: %v", seed, b) // the only rule that is not promised with upstream groups
			}
		}
	}
}
