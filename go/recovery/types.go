// Package recovery turns a quorum into what one rank has to do: its ranks, its rendezvous store, and who
// heals from whom. It is a pure function of its arguments, so every member of a quorum computes the same plan.
package recovery

// Source is a group that can serve its state to one that heals.
type Source struct {
	ReplicaRank    int64
	ManagerAddress string
}

// Result is what one rank has to do about a quorum.
type Result struct {
	QuorumID         int64
	ReplicaRank      int64 // of this group among the quorum's members
	ReplicaWorldSize int64
	// Sources is empty unless this group heals. The first one is assigned to it, in the published package too.
	Sources               []Source
	RecoverDstReplicaRank []int64 // the groups that heal from this one
	// Helpers are the manager servers of further sources, who offer the same step to this group if it heals. What they
	// have byte for byte as the assigned one spares that one. Groups of the published package do not help.
	Helpers            []string
	HelpDstReplicaRank []int64 // the groups that this one helps
	StoreAddress       string  // rendezvous store of this rank
	MaxStep            int64
	MaxReplicaRank     *int64 // among the members at MaxStep; nil if this group is behind
	MaxWorldSize       int64  // members at MaxStep
	Heal               bool
	CommitFailures     int64 // the largest any member reports
	// CommittedQuorumID is in which quorum the state of the members that are up to date was made: after a heal
	// it is that of this group. -1: in none, 0: somebody in the quorum does not say.
	CommittedQuorumID int64
	// Replay: a group that kept what it reduced in an attempt at MaxStep that failed reduces it again in this quorum.
	Replay bool
	// Draining: the group was asked to leave, and this is its last step. It is not of the quorum: the manager server adds it.
	Draining       bool
	ReplicaIDs     []string
	Handles        []string // of this group rank, one per member in order; empty unless all sent them
	WithoutHandles []string // replica_ids of the members that sent none
}
