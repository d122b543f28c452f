package round

import (
	"slices"

	"github.com/torchft/torchft/go/quorum"
)

// Request is what a rank says when it asks for the next quorum. The tags are the names of QuorumRequest in
// torchft/_records.py, which it travels from as JSON.
type Request struct {
	GroupRank          int64  `json:"group_rank"`
	Step               int64  `json:"step"`
	CheckpointMetadata string `json:"checkpoint_metadata"` // where others fetch this rank's state
	ShrinkOnly         bool   `json:"shrink_only"`
	InitSync           bool   `json:"init_sync"`
	CommitFailures     int64  `json:"commit_failures"`
	CommittedQuorumID  int64  `json:"committed_quorum_id"` // in which this rank's weights were made; -1: in none since it began, 0: it does not say
	Handle             string `json:"reconfigure_handle"`  // of this rank's process group, if it has one
	GroupWorldSize     int64  `json:"group_world_size"`    // as this rank believes; 0 does not say
	// ReplaysFailedSteps: this rank keeps what it reduces, see quorum.Member.
	ReplaysFailedSteps bool `json:"replays_failed_steps"`
	// Drain: a signal asked this rank to leave. It is not merged, since the lighthouse gets that when the group leaves:
	// the machine remembers it, as the lighthouse's Drained.
	Drain bool `json:"drain"`
}

// sameRequest reports whether two requests of a rank differ in nothing but who waits, and for how long.
func sameRequest(a, b QuorumAsked) bool { return a.Request == b.Request }

// merge adds to a group's record what its ranks say, in rank order. agree is false if they differ in the step, or in the
// quorum in which its weights were made.
//
// The step of a group is that of its slowest rank. Ranks differ after one of them failed to heal, or missed that a step was committed;
// with the smallest step the group is behind, and heals as a whole. The committed quorum is -1 then (none), so it heals even if the
// other groups are at that smallest step.
func merge(member quorum.Member, ranks []*QuorumAsked) (_ quorum.Member, agree bool) {
	first := ranks[0]
	agree = true
	member.ReplaysFailedSteps = true
	member.Step, member.CommittedQuorumID = first.Step, first.CommittedQuorumID
	silent := slices.ContainsFunc(ranks, func(a *QuorumAsked) bool { return a.CommittedQuorumID == 0 })
	handles := make([]string, 0, len(ranks))
	for _, a := range ranks {
		agree = agree && a.Step == first.Step && (silent || a.CommittedQuorumID == first.CommittedQuorumID)
		member.Step = min(member.Step, a.Step)
		member.ShrinkOnly = member.ShrinkOnly || a.ShrinkOnly
		member.ReplaysFailedSteps = member.ReplaysFailedSteps && a.ReplaysFailedSteps
		member.CommitFailures = max(member.CommitFailures, a.CommitFailures)
		if a.Handle != "" {
			handles = append(handles, a.Handle)
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
	return member, agree
}
