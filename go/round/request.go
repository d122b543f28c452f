package round

import (
	"slices"

	"github.com/torchft/torchft/go/quorum"
)

// Request is a rank's request for the next quorum.
type Request struct {
	GroupRank int64
	Step      int64
	// the address at which healing ranks fetch this rank's state
	CheckpointMetadata string
	ShrinkOnly         bool
	InitSync           bool
	CommitFailures     int64
	// the quorum in which this rank's weights were committed; -1: none since the group began, 0: not reported
	CommittedQuorumID int64
	ReconfigureHandle string // of this rank's process group, if it has one
	GroupWorldSize    int64  // as configured for this rank; 0: not reported
	// ReplaysFailedSteps: this rank keeps its gradients, and can reduce them again (quorum.Member).
	ReplaysFailedSteps bool
	// AsksEachStep: no quorum of this rank's group stands (quorum.Member).
	AsksEachStep bool
	// CutsBySpeed: this rank's loader cuts a batch by the speeds of the groups (quorum.Member).
	CutsBySpeed bool
	// Layout has a digest of the tensors that this rank reduces, and their size (quorum.Member.Layouts);
	// empty: not known.
	Layout string
	// Drain: a signal requested that this rank's group leaves. It is not sent to the lighthouse: the machine
	// keeps it, like the lighthouse's Drained, and the lighthouse learns of it when the group leaves.
	Drain bool
}

// announces returns the part of a request that the other groups learn with the next quorum, and that does not
// change by a step.
func (r Request) announces() Request {
	r.Step, r.CommittedQuorumID, r.CommitFailures, r.CheckpointMetadata, r.Drain = 0, 0, 0, "", false
	return r
}

// sameRequest reports whether two requests of a rank differ only in their waiters and deadlines.
func sameRequest(a, b QuorumAsked) bool { return a.Request == b.Request }

// merge returns the group's request, made from the requests of its ranks, in rank order. agree is false if
// they differ in the step, or in the quorum in which their weights were committed.
//
// The step of a group is its slowest rank's. Ranks differ after one of them failed to heal, or did not
// receive a decision to commit. With the smallest step the group is behind, and heals as a whole. The
// committed quorum is then -1 (none), so that it heals even if the other groups are at that smallest step.
func merge(member quorum.Member, ranks []*QuorumAsked) (_ quorum.Member, agree bool) {
	first := ranks[0]
	agree = true
	member.ReplaysFailedSteps, member.CutsBySpeed = true, true
	member.Step, member.CommittedQuorumID = first.Step, first.CommittedQuorumID
	silent := slices.ContainsFunc(ranks, func(a *QuorumAsked) bool { return a.CommittedQuorumID == 0 })
	handles := make([]string, 0, len(ranks))
	layouts := make([]string, 0, len(ranks))
	for _, a := range ranks {
		agree = agree && a.Step == first.Step && (silent || a.CommittedQuorumID == first.CommittedQuorumID)
		member.Step = min(member.Step, a.Step)
		member.ShrinkOnly = member.ShrinkOnly || a.ShrinkOnly
		member.AsksEachStep = member.AsksEachStep || a.AsksEachStep
		member.ReplaysFailedSteps = member.ReplaysFailedSteps && a.ReplaysFailedSteps
		member.CutsBySpeed = member.CutsBySpeed && a.CutsBySpeed
		member.CommitFailures = max(member.CommitFailures, a.CommitFailures)
		if a.ReconfigureHandle != "" {
			handles = append(handles, a.ReconfigureHandle)
		}
		if a.Layout != "" {
			layouts = append(layouts, a.Layout)
		}
	}
	switch {
	case silent:
		member.CommittedQuorumID = 0
	case !agree:
		member.CommittedQuorumID = -1
	}
	if len(handles) == len(ranks) { // peers use handles only if all ranks have one
		member.Handles = handles
	}
	if len(layouts) == len(ranks) {
		member.Layouts = layouts
		if !slices.ContainsFunc(layouts, func(layout string) bool { return layout != layouts[0] }) {
			member.Layouts = layouts[:1]
		}
	}
	return member, agree
}
