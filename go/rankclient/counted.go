package rankclient

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Counter is a counter of the manager server that ranks add to.
type Counter struct{ Metric, Help string }

// Counters are the counters of ranks, with the names by which ranks report them (Extras.counted in torchft/_extras.py).
var Counters = map[string]Counter{
	"divergences": {
		"torchft_manager_divergences_total",
		"Comparisons in which the weights or the optimizer state of its ranks differed from those of most groups, or no majority shows which are right.",
	},
	"nonfinite_syncs": {
		"torchft_manager_nonfinite_syncs_total",
		"Synchronisations of its ranks (LocalSGD, DiLoCo) whose average held NaN or Inf, and was used.",
	},
}

// Counted is a rank's report of a number to add to a counter.
type Counted struct {
	GroupRank int64
	Name      string // one of Counters
	Number    int64
}

// Validate returns why a server would refuse the report.
func (c Counted) Validate() error {
	if _, known := Counters[c.Name]; !known {
		return fmt.Errorf("no counter of a rank is named %q, only: %s", c.Name, strings.Join(slices.Sorted(maps.Keys(Counters)), ", "))
	}
	if c.Number < 0 {
		return fmt.Errorf("counter %q: number=%d must be at least 0", c.Name, c.Number)
	}
	return nil
}
