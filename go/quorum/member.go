package quorum

import (
	"bytes"
	"slices"
)

// Member is the record that a replica group sends with its request to take part in the next step. The tags
// are the names of QuorumMember in torchft/_records.py, which has upstream's fields.
type Member struct {
	ReplicaID      string `json:"replica_id"`
	Address        string `json:"address"` // of the group's manager server
	StoreAddress   string `json:"store_address"`
	Step           int64  `json:"step"`
	WorldSize      uint64 `json:"world_size"` // ranks in the group
	ShrinkOnly     bool   `json:"shrink_only"`
	Data           string `json:"data"` // the user's JSON, forwarded unchanged
	CommitFailures int64  `json:"-"`
	// CommittedQuorumID is the id of the quorum in which the weights of Step were committed, by this group or
	// by the source of its heal. It is -1 if no quorum has committed them since the group started, and 0 if
	// the group does not report the id (upstream managers do not).
	CommittedQuorumID int64 `json:"-"`
	// ReplaysFailedSteps: the ranks of the group keep the gradients that they reduce. When a peer fails, they
	// need not compute the step again: they reduce the kept gradients with the remaining groups.
	ReplaysFailedSteps bool `json:"-"`
	// AsksEachStep: the group asks for each step, so that a quorum with it never stands. A failure between
	// two of its steps, which may take minutes (LocalSGD), costs none then.
	AsksEachStep bool `json:"-"`
	// CutsBySpeed: its loader cuts a batch by the speeds of the groups (Quorum.Speeds), if those of all do.
	CutsBySpeed bool `json:"-"`
	// reconfigure handles, one per group rank; empty if the group runs version 0.2.0
	Handles []string `json:"-"`
	// Layouts: a digest and the size of what each rank reduces, or a single one that all ranks have; empty:
	// not known. Rank i reduces with rank i of the other groups, so these must be equal in all groups.
	Layouts []string `json:"-"`
	Unknown []byte   `json:"-"` // wire fields that this version does not know, forwarded unchanged
}

// State has the fields of a member that may change from step to step. A member sends them with each request.
type State struct {
	Step              int64
	CommittedQuorumID int64
	CommitFailures    int64
}

// State returns the fields that may change from step to step.
func (m *Member) State() State { return State{m.Step, m.CommittedQuorumID, m.CommitFailures} }

// SetState is the inverse of State.
func (m *Member) SetState(s State) {
	m.Step, m.CommittedQuorumID, m.CommitFailures = s.Step, s.CommittedQuorumID, s.CommitFailures
}

// SameButState reports whether two members are equal in all fields but those of their State.
func (m *Member) SameButState(o *Member) bool {
	return m.ReplicaID == o.ReplicaID && m.Address == o.Address && m.StoreAddress == o.StoreAddress &&
		m.WorldSize == o.WorldSize && m.ShrinkOnly == o.ShrinkOnly &&
		m.ReplaysFailedSteps == o.ReplaysFailedSteps && m.AsksEachStep == o.AsksEachStep &&
		m.CutsBySpeed == o.CutsBySpeed && m.Data == o.Data &&
		slices.Equal(m.Handles, o.Handles) && slices.Equal(m.Layouts, o.Layouts) &&
		bytes.Equal(m.Unknown, o.Unknown)
}

// SameMembers reports whether two quorums have the same members in the same order, apart from their states.
func (q *Quorum) SameMembers(o *Quorum) bool {
	if len(q.Members) != len(o.Members) {
		return false
	}
	for i := range q.Members {
		if !q.Members[i].SameButState(&o.Members[i]) {
			return false
		}
	}
	return true
}
