// Package recovery computes from a quorum the part of one rank in it: its replica rank, its rendezvous store,
// and the source or targets of its heal. It is a pure function of its arguments, so every member of a quorum
// computes the same plan.
package recovery

// Result is the part of one rank in a quorum.
type Result struct {
	QuorumID         int64
	ReplicaRank      int64 // of this group among the quorum's members
	ReplicaWorldSize int64
	// the source to which this group is assigned; empty and nil unless it heals
	RecoverSrcManagerAddress string
	RecoverSrcReplicaRank    *int64
	RecoverDstReplicaRanks   []int64 // the groups that heal from this one
	// AdditionalSourceAddresses are the manager servers of additional sources, if this group heals. Blocks
	// that are equal to those of the assigned source are fetched from them, too. An upstream group is never
	// one of them.
	AdditionalSourceAddresses []string
	HelpDstReplicaRanks       []int64 // the groups for which this one is an additional source
	StoreAddress              string  // rendezvous store of this rank
	MaxStep                   int64
	MaxReplicaRank            *int64 // among the members at MaxStep; nil if this group is behind
	MaxWorldSize              int64  // members at MaxStep
	Heal                      bool
	CommitFailures            int64 // the largest number that a member reports
	// CommittedQuorumID is the quorum in which the members that are up to date committed their step; after a
	// heal it is also this group's. -1: none, 0: a member does not announce it.
	CommittedQuorumID int64
	// Replay: a group that kept its gradients of a failed attempt at MaxStep reduces them again.
	Replay bool
	// Draining: the group was asked to drain, and this is its last step. The manager server sets this field;
	// Compute does not.
	Draining               bool
	ReplicaIDs             []string
	ReconfigureHandles     []string // of this group rank, one per member in order; empty unless all sent them
	ReplicasWithoutHandles []string // replica_ids of the members that sent none
	Speeds                 []int64  // of the members, in order; nil: equal
	MaxSpeeds              []int64  // of those at MaxStep
	Skipped                []string // units that the groups leave out
}
