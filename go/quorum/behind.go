package quorum

import "slices"

// Two groups can reach one step in different quorums, each without the other, and then hold different
// weights: a member that was evicted may commit a step that the others make again in the next quorum. Members
// that report the quorum of their last commit find out by themselves which of them is behind (package
// recovery). In a quorum with a member that does not report it (upstream's), all compare only steps. Then the
// lighthouse decides, and sends a smaller step for the group that is behind.
//
// Invariant: in such a quorum, a member that was not in the latest one is not at the step of a member that
// was, unless that step is 0. The members of the latest quorum that are at one step hold equal weights: all
// others heal. A heal may fail. Of a member that reports its last commit it is known, and it stays behind; an
// upstream member counts as healed. Otherwise the groups that have healed could never be as many as
// min_replicas.

// lowerSteps sends a smaller step for members that are at the step of members of the latest quorum, and may
// have other weights. If their weights were equal after all, their heal was unnecessary.
func (m *memory) lowerSteps(members []Member, in []*record) {
	silent := slices.ContainsFunc(members, func(o Member) bool { return o.CommittedQuorumID == 0 })
	reached := int64(0)
	for i, r := range in {
		if silent && m.inStep(r, &members[i]) {
			reached = max(reached, members[i].Step)
		}
	}
	for i, r := range in {
		behind := reached > 0 && members[i].Step == reached && !m.inStep(r, &members[i])
		if r.behind = behind; behind {
			members[i].Step--
		}
	}
}

// inStep reports whether a member has the weights of the latest quorum's members at its step.
func (m *memory) inStep(r *record, asked *Member) bool {
	if !r.previous {
		return false
	}
	i, _ := m.latest.Place(r.id)
	then := m.latest.Members[i].CommittedQuorumID
	return !r.behind || asked.CommittedQuorumID == 0 || asked.CommittedQuorumID != then
}
