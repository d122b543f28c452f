package recovery

import (
	"fmt"
	"slices"
	"strings"

	"github.com/torchft/torchft/go/quorum"
)

// View is a quorum from the point of view of one of its groups. Results that are the same for all ranks of
// the group are computed once. That matters for groups of thousands of ranks: each member then has thousands
// of handles, of which each rank needs one.
type View struct {
	members  []quorum.Member // in order
	complete []bool          // by member: it has a handle for each of its ranks
	common   Result
	upToDate []int // members at MaxStep
}

// NewView fails if the group is not in the quorum.
func NewView(replicaID string, q *quorum.Quorum) (*View, error) {
	members := inOrder(q.Members)
	self := slices.IndexFunc(members, func(m quorum.Member) bool { return m.ReplicaID == replicaID })
	if self < 0 {
		return nil, fmt.Errorf("member %s is not in quorum %d of %d members", replicaID, q.ID, len(members))
	}

	r := Result{
		QuorumID:         q.ID,
		ReplicaRank:      int64(self),
		ReplicaWorldSize: int64(len(members)),
		MaxStep:          members[0].Step,
		CommitFailures:   members[0].CommitFailures,
		ReplicaIDs:       make([]string, len(members)),
	}
	complete := make([]bool, len(members))
	for i, m := range members {
		complete[i] = uint64(len(m.Handles)) == m.WorldSize && !slices.Contains(m.Handles, "")
		r.ReplicaIDs[i] = m.ReplicaID
		r.MaxStep = max(r.MaxStep, m.Step)
		r.CommitFailures = max(r.CommitFailures, m.CommitFailures)
	}

	r.CommittedQuorumID = newest(members, r.MaxStep)
	upToDate := make([]int, 0, len(members))
	for i, m := range members {
		// A member that committed MaxStep in an older quorum may have other weights: not up to date (newest).
		if m.Step != r.MaxStep || r.CommittedQuorumID != 0 && m.CommittedQuorumID != r.CommittedQuorumID {
			continue
		}
		if i == self {
			rank := int64(len(upToDate))
			r.MaxReplicaRank = &rank
		}
		upToDate = append(upToDate, i)
	}
	r.MaxWorldSize = int64(len(upToDate))
	r.Skipped = q.Skipped
	if q.HasSpeeds() {
		r.Speeds = q.Speeds
		for _, i := range upToDate {
			r.MaxSpeeds = append(r.MaxSpeeds, q.Speeds[i])
		}
	}
	return &View{members: members, complete: complete, common: r, upToDate: upToDate}, nil
}

// Compute returns the part of one rank of the group: its index, its store, and the source or targets of its
// heal. With initSync, all groups of a job at step 0 take over the state of one of them, so that they need
// not start with equal weights. The results of several ranks share slices: do not change them.
//
// Groups of other versions compute the same from the same quorum, so every index below is part of the
// protocol. Compute fails if group_rank is negative.
func (v *View) Compute(groupRank int64, initSync bool) (Result, error) {
	if groupRank < 0 {
		return Result{}, fmt.Errorf("group_rank is %d: it must be at least 0", groupRank)
	}
	r := v.common
	r.ReconfigureHandles, r.ReplicasWithoutHandles = v.handles(groupRank)

	// The primary is the member at whose store the rank meets its peers. The ranks of a group have different
	// primaries, so that the stores share the load.
	primary := v.upToDate[groupRank%r.MaxWorldSize]
	r.StoreAddress = v.members[primary].StoreAddress

	assign(&r, v.members, v.upToDate, primary, groupRank, initSync && r.MaxStep == 0)
	r.Replay = replays(v.members, r, initSync)
	return r, nil
}

// newest returns the latest quorum in which a member at this step has committed the step. Two groups can
// reach one step in different quorums, each without the other, and then hold different weights. So the group
// with the older quorum is behind.
//
// If a member does not announce its quorum (upstream members do not), the result is 0, and only steps are
// compared: that member compares only steps, and all members must compute the same plan.
func newest(members []quorum.Member, step int64) int64 {
	latest := int64(-1)
	for i := range members {
		m := &members[i]
		if m.CommittedQuorumID == 0 {
			return 0
		}
		if m.Step == step {
			latest = max(latest, m.CommittedQuorumID)
		}
	}
	return latest
}

// replays decides whether a group reduces its kept gradients of a failed step again. They must have been
// computed from the weights that it has now. If another group has committed the step, this one is behind and
// heals instead. Otherwise all groups at max_step have equal weights, so kept and newly computed gradients
// may be averaged.
//
// If a member does not announce ReplaysFailedSteps, it computes the step again, and so do all groups: in a
// replay they would wait in the collective until that member has computed, perhaps longer than the
// collective's timeout. At the first step with initSync no group replays: the ranks of a group have different
// primaries, and would come to different decisions.
func replays(members []quorum.Member, r Result, initSync bool) bool {
	silent := slices.ContainsFunc(members, func(m quorum.Member) bool { return !m.ReplaysFailedSteps })
	firstStep := initSync && r.MaxStep == 0 && len(members) > 1
	return r.MaxReplicaRank != nil && !r.Heal && !silent && !firstStep
}

// assign distributes the groups that must heal over the sources. All ranks of a group agree on the groups
// that heal, except at step 0 with initSync, where each rank has its own primary (fromPrimary). The group
// rank shifts the assignment, so that the ranks of a target heal from different sources.
func assign(
	r *Result, members []quorum.Member, sources []int, primary int, groupRank int64, fromPrimary bool,
) {
	if fromPrimary {
		sources = []int{primary}
	}
	healing := int64(0) // number of groups that heal, before group i
	next := 0           // number of sources before group i
	for i := range members {
		if next < len(sources) && sources[next] == i {
			next++
			continue
		}
		first := (healing + groupRank%int64(len(sources))) % int64(len(sources))
		healing++

		if sources[first] == int(r.ReplicaRank) {
			r.RecoverDstReplicaRanks = append(r.RecoverDstReplicaRanks, int64(i))
		}
		additional := additionalTo(members, sources, first)
		if slices.Contains(additional, int(r.ReplicaRank)) {
			r.HelpDstReplicaRanks = append(r.HelpDstReplicaRanks, int64(i))
		}
		if int64(i) != r.ReplicaRank {
			continue
		}
		for _, i := range additional {
			r.AdditionalSourceAddresses = append(r.AdditionalSourceAddresses, members[i].Address)
		}
		source := int64(sources[first])
		r.Heal = true
		r.RecoverSrcReplicaRank, r.RecoverSrcManagerAddress = &source, members[source].Address
	}
}

// mostAdditional limits the additional sources of one target: with four sources its own network is the
// bottleneck.
const mostAdditional = 3

// additionalTo returns the additional sources of a target: the sources after the assigned one, in a ring, so
// that the load is spread evenly. Only a member that announces a committed quorum supports this; upstream
// members announce none.
func additionalTo(members []quorum.Member, sources []int, assigned int64) []int {
	var additional []int
	for j := 1; j < len(sources) && j <= mostAdditional; j++ {
		i := sources[(int(assigned)+j)%len(sources)]
		if members[i].CommittedQuorumID != 0 {
			additional = append(additional, i)
		}
	}
	return additional
}

// handles returns the handles of one group rank, in the order of the members. If a member has none (version
// 0.2.0), the list is nil, and all members connect through the store: otherwise the members with handles
// would wait forever for the members without. missing names the members without a handle.
func (v *View) handles(groupRank int64) (list, missing []string) {
	list = make([]string, len(v.members))
	for i := range v.members {
		m := &v.members[i]
		if !v.complete[i] || groupRank >= int64(len(m.Handles)) {
			missing = append(missing, m.ReplicaID)
			continue
		}
		list[i] = m.Handles[groupRank]
	}
	if missing != nil {
		return nil, missing
	}
	return list, nil
}

// inOrder returns the members sorted by replica_id. Lighthouses send them sorted, but the protocol does not
// require it.
func inOrder(members []quorum.Member) []quorum.Member {
	byID := func(a, b quorum.Member) int { return strings.Compare(a.ReplicaID, b.ReplicaID) }
	if slices.IsSortedFunc(members, byID) {
		return members
	}
	return slices.SortedStableFunc(slices.Values(members), byID)
}
