package quorum

import (
	"slices"
	"time"
)

// The part of the slow model (model_test.go) that decides whether there is a quorum, and of which members.

func (m *model) evaluate(now time.Time) (*Quorum, []WaiterID) {
	candidates := m.candidates(now)
	previous := map[string]bool{}
	if m.latest != nil {
		for _, member := range m.latest.Members {
			previous[member.ReplicaID] = true
		}
	}
	shrink := false
	for _, c := range candidates {
		shrink = shrink || c.ShrinkOnly
	}
	var in []Member
	for id, c := range candidates {
		if !shrink || len(previous) == 0 || previous[id] {
			in = append(in, c)
		}
	}
	slices.SortFunc(in, func(a, b Member) int {
		if a.ReplicaID < b.ReplicaID {
			return -1
		}
		return 1
	})

	fast := len(previous) > 0
	for id := range previous {
		if _, ok := candidates[id]; !ok {
			fast = false
		}
	}
	if !fast {
		first, former := now, false
		for id, joined := range m.joined {
			switch {
			case previous[id] && !former: // members of the latest quorum count before all others
				first, former = joined, true
			case previous[id] == former && joined.Before(first):
				first = joined
			}
		}
		healthy, presumed := 0, false
		for id := range m.beats {
			if m.healthy(id, now) {
				healthy++
				presumed = presumed || m.facts[id].presumed
			}
		}
		enough := len(in) >= m.policy.MinReplicas
		majority := float64(len(candidates)) > float64(healthy)/2
		all := len(candidates) == healthy
		if !enough || !majority || !all && (now.Sub(first) < m.policy.JoinTimeout || presumed) {
			if len(candidates) == 0 {
				m.behind = time.Time{}
			}
			return nil, nil
		}
	}
	if m.wanted.Newer(m.round()) && now.Sub(m.since) < m.policy.HeartbeatTimeout {
		return nil, nil
	}
	if !fast && m.mustWaitForTheStep(in, candidates, now) {
		return nil, nil
	}
	m.behind = time.Time{}
	if m.wanted != (Claim{}) {
		for _, id := range m.claimants(now) {
			m.facts[id].unshown = true
			m.does("doubted", id)
		}
		m.wanted, m.since = Claim{}, time.Time{}
	}

	m.lowerSteps(in)
	same := len(in) == len(previous)
	failures, unsure := false, false
	for _, member := range in {
		same = same && previous[member.ReplicaID]
		failures = failures || member.CommitFailures > 0
		// The members of an adopted quorum must say that they are in it.
		unsure = unsure || m.latest != nil && m.adopted &&
			m.newest(member.ReplicaID).KnownQuorumID != m.latest.ID
	}
	q := &Quorum{Members: in, Created: now}
	if same && !failures && !m.broken && !m.rejoined && !unsure && m.highest <= m.latest.ID {
		q.ID = m.latest.ID
	} else {
		m.highest = max(m.highest, m.floor) + 1
		q.ID = m.highest
	}
	m.next(now, same)
	m.release()
	m.latest, m.adopted, m.shrunk, m.broken, m.rejoined = q, false, len(in) < len(candidates), false, false

	var answered []WaiterID
	var left []Asked
	for _, a := range m.waiting {
		if slices.ContainsFunc(in,
			func(member Member) bool { return member.ReplicaID == a.Member.ReplicaID }) {
			answered = append(answered, a.Waiter)
			m.facts[a.Member.ReplicaID].returned = false
		} else {
			left = append(left, a)
		}
	}
	m.waiting = left
	m.joined = map[string]time.Time{}
	m.look(now)
	return q, answered
}

// lowerSteps lowers the steps of members that may have other weights than the latest quorum's members at
// their step.
func (m *model) lowerSteps(in []Member) {
	largest, silent := int64(0), false
	for _, member := range in {
		if silent = silent || member.CommittedQuorumID == 0; m.knowsWeights(member) {
			largest = max(largest, member.Step)
		}
	}
	lowered := map[string]bool{}
	for i, member := range in {
		if silent && largest > 0 && member.Step == largest && !m.knowsWeights(member) {
			in[i].Step = largest - 1
			lowered[member.ReplicaID] = true
		}
	}
	m.lowered = lowered
}

func (m *model) knowsWeights(member Member) bool {
	if m.latest == nil {
		return false
	}
	for _, before := range m.latest.Members {
		if before.ReplicaID == member.ReplicaID {
			return !m.lowered[member.ReplicaID] || member.CommittedQuorumID == 0 ||
				member.CommittedQuorumID != before.CommittedQuorumID
		}
	}
	return false
}

// mustWaitForTheStep reports whether the job had reached a larger step than all members of the quorum, and a
// live member may have it.
func (m *model) mustWaitForTheStep(in []Member, candidates map[string]Member, now time.Time) bool {
	if m.latest == nil {
		return false
	}
	reached, has := int64(0), int64(0)
	lives := false
	for _, member := range m.latest.Members {
		reached = max(reached, member.Step)
		_, here := candidates[member.ReplicaID]
		lives = lives || !here && m.healthy(member.ReplicaID, now)
	}
	for _, member := range in {
		has = max(has, member.Step)
	}
	older := has < m.newestCopy().Step && !slices.ContainsFunc(in,
		func(member Member) bool { return m.member(member.ReplicaID) })
	if !older && (has >= reached || !lives) {
		return false
	}
	if m.behind.IsZero() {
		m.behind = now
	}
	if now.Sub(m.behind) < m.policy.HeartbeatTimeout {
		return true
	}
	if older {
		m.copies = nil
	}
	return false
}

// newestCopy returns the newest copy that keepers have told of, and that has not been given up.
func (m *model) newestCopy() (newest Copies) {
	for _, c := range m.copies {
		if c.Quorum > newest.Quorum || c.Quorum == newest.Quorum && c.Step >= newest.Step {
			newest = c
		}
	}
	return newest
}
