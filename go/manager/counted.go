package manager

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/torchft/torchft/go/torchftpb"
)

// Counter is a counter of the manager server that ranks add to.
type Counter struct{ Metric, Help string }

// Counters are the counters of ranks, with the names by which ranks report them (Extras.counted in
// torchft/_extras.py).
var Counters = map[string]Counter{
	"divergences": {
		"torchft_manager_divergences_total",
		"Comparisons in which the weights or the optimizer state of its ranks differed from those of most " +
			"groups, or no majority shows which are right.",
	},
	"nonfinite_syncs": {
		"torchft_manager_nonfinite_syncs_total",
		"Synchronizations of its ranks (LocalSGD, DiLoCo) whose average held NaN or Inf, and was used.",
	},
}

// ValidateCounted returns why a server would refuse the report of a rank.
func ValidateCounted(c *torchftpb.Counted) error {
	if _, known := Counters[c.GetName()]; !known {
		return fmt.Errorf("no counter of a rank is named %q, only: %s", c.GetName(),
			strings.Join(slices.Sorted(maps.Keys(Counters)), ", "))
	}
	if c.GetNumber() < 0 {
		return fmt.Errorf("counter %q: number=%d must be at least 0", c.GetName(), c.GetNumber())
	}
	return nil
}
