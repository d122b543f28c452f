package quorum

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Copies is the newest complete copy of the job's state that the keepers of hosts have told of. It outlives
// the groups: after all of them have failed, the next ones go on from it.
type Copies struct {
	Step   int64 `json:"step"`
	Quorum int64 `json:"quorum"` // in which the step was committed
	// the hosts that held it when a keeper last told of this or a later step, in order
	Hosts []string `json:"hosts"`
}

// later orders copies by their history, and then by their steps: a quorum that began at an earlier step has a
// larger id.
func (c Copies) later(than Copies) int {
	return cmp.Or(cmp.Compare(c.Quorum, than.Quorum), cmp.Compare(c.Step, than.Step))
}

// copiesPause is how often the newest copy is kept. Keepers tell what they have as often.
const copiesPause = 2 * time.Second

// copies knows the newest copy, so that a quorum that would begin before its step is noticed, and names the
// hosts that are missing.
//
// Invariants:
//
//  1. A copy counts only after the first quorum, which tells to which history it belongs.
//  2. A later copy replaces an earlier one, and no report that lacks it does: its host may come back.
//  3. A quorum that begins before the step of a copy gives it up, and all of that history. So a copy from
//     before the latest quorum, of a step after its begin, does not count: it was given up, by this
//     lighthouse or by one that has left no state, or it is another job's.
type copies struct {
	newest  Copies
	missing []string  // hosts that hold it, whose keepers do not report
	kept    Copies    // as it was kept last
	keptAt  time.Time // when that was
}

// told takes what the keepers report, and returns whether the newest copy is to be kept now.
func (c *copies) told(e Copied, latest Past, now time.Time) bool {
	ofJob := e.Quorum >= latest.ID || e.Quorum > 0 && e.Step <= latest.Step
	if ofJob && e.later(c.newest) >= 0 {
		c.newest = e.Copies
	}
	c.missing = nil
	for _, host := range c.newest.Hosts {
		if !slices.Contains(e.Reporting, host) {
			c.missing = append(c.missing, host)
		}
	}
	if c.newest.later(c.kept) <= 0 || now.Sub(c.keptAt) < copiesPause {
		return false
	}
	c.kept, c.keptAt = c.newest, now
	return true
}

// known reports whether keepers have told of a copy.
func (c *copies) known() bool { return c.newest.Quorum > 0 }

// behind returns why a quorum of members at these steps would begin before a copy that exists; empty if it
// would not.
func (c *copies) behind(step int64) string {
	if !c.known() || step >= c.newest.Step {
		return ""
	}
	where := "on " + strings.Join(c.newest.Hosts, ", ")
	if len(c.missing) > 0 {
		where += "; missing of these hosts: " + strings.Join(c.missing, ", ")
	}
	return fmt.Sprintf("the members that ask are at step %d at most, and copies in memory of step %d are %s",
		step, c.newest.Step, where)
}

// abandon gives the copy up: the job has begun before it.
func (c *copies) abandon() { *c = copies{} }
