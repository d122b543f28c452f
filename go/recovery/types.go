// Package recovery computes from a quorum the part of one rank in it: its replica rank, its rendezvous store,
// and the source or targets of its heal. It is a pure function of its arguments, so every member of a quorum
// computes the same plan.
package recovery

import "reflect"

// Source is a group that can serve its state to a healing group.
type Source struct {
	ReplicaRank    int64
	ManagerAddress string
}

// Result is the part of one rank in a quorum. It is passed as JSON to QuorumResult in torchft/_records.py;
// the tags are the names of that class's fields. An omitted field has the default of the class: an empty list
// or None.
type Result struct {
	QuorumID         int64 `json:"quorum_id"`
	ReplicaRank      int64 `json:"replica_rank"` // of this group among the quorum's members
	ReplicaWorldSize int64 `json:"replica_world_size"`
	// Sources is empty unless this group heals. The first one is the assigned source, as in upstream. Only
	// the first one is sent to ranks and passed to Python; the others are used in Go only.
	Sources []Source `json:"-"`
	// the groups that heal from this one
	RecoverDstReplicaRank []int64 `json:"recover_dst_replica_ranks,omitempty"`
	// AdditionalSources are the manager servers of additional sources, if this group heals. Blocks that are
	// equal to those of the assigned source are fetched from them, too. An upstream group is never one of
	// them.
	AdditionalSources []string `json:"additional_source_addresses,omitempty"`
	// the groups for which this one is an additional source
	HelpDstReplicaRank []int64 `json:"help_dst_replica_ranks,omitempty"`
	StoreAddress       string  `json:"store_address"` // rendezvous store of this rank
	MaxStep            int64   `json:"max_step"`
	// among the members at MaxStep; nil if this group is behind
	MaxReplicaRank *int64 `json:"max_replica_rank"`
	MaxWorldSize   int64  `json:"max_world_size"` // members at MaxStep
	Heal           bool   `json:"heal"`
	CommitFailures int64  `json:"commit_failures"` // the largest number that a member reports
	// CommittedQuorumID is the quorum in which the members that are up to date committed their step; after a
	// heal it is also this group's. -1: none, 0: a member does not announce it.
	CommittedQuorumID int64 `json:"committed_quorum_id"`
	// Replay: a group that kept its gradients of a failed attempt at MaxStep reduces them again.
	Replay bool `json:"replay"`
	// Draining: the group was asked to drain, and this is its last step. The manager server sets this field;
	// Compute does not.
	Draining   bool     `json:"draining"`
	ReplicaIDs []string `json:"replica_ids,omitempty"`
	// of this group rank, one per member in order; empty unless all sent them
	Handles []string `json:"reconfigure_handles,omitempty"`
	// replica_ids of the members that sent none
	WithoutHandles []string `json:"replicas_without_handles,omitempty"`
	Speeds         []int64  `json:"speeds,omitempty"`     // of the members, in order; nil: equal
	Skipped        []string `json:"skipped,omitempty"`    // units that the groups leave out
	MaxSpeeds      []int64  `json:"max_speeds,omitempty"` // of those at MaxStep
}

// SameButStep reports whether two results differ in nothing but the step.
func (r *Result) SameButStep(o *Result) bool {
	then := *o
	then.MaxStep = r.MaxStep
	return reflect.DeepEqual(r, &then)
}
