package sim

import (
	"fmt"
	"strings"

	"github.com/torchft/torchft/go/quorum"
)

// describe returns a quorum as text: each member, its step, and the quorum of its last commit.
func describe(q *quorum.Quorum) string {
	var b strings.Builder
	for i, m := range q.Members {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s at step %d", m.ReplicaID, m.Step)
		if m.CommittedQuorumID > 0 {
			fmt.Fprintf(&b, " of quorum %d", m.CommittedQuorumID)
		}
		if m.CommitFailures > 0 {
			fmt.Fprintf(&b, " (%d failed)", m.CommitFailures)
		}
	}
	return b.String()
}
