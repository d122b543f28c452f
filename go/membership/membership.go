// Package membership defines the interfaces through which a manager server takes part in a job: it requests quorums, and receives
// notices about other members. Package lighthouses implements them with the job's lighthouses.
package membership

import (
	"context"
	"time"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
)

// Membership forms the quorums of a replica group. It may implement further interfaces of this package.
type Membership interface {
	// Quorum waits for a quorum with m in it. knownQuorumID is the last quorum of the member, 0 if none.
	Quorum(ctx context.Context, m quorum.Member, knownQuorumID int64) (*quorum.Quorum, error)
	// Attend sends heartbeats until one fails or ctx ends. It calls reached after each successful one. interval is the time between
	// two heartbeats, unless the other side asks for another interval.
	Attend(ctx context.Context, interval time.Duration, reached func()) error
	// Close ends the connection, and every call with it.
	Close() error
}

// NoticeSource is a Membership that receives notices.
type NoticeSource interface {
	// Notices returns the channel of all notices; it is closed with the membership.
	Notices() <-chan Notice
}

// Witness is a Membership that accepts reports from its group. Its methods do not block.
type Witness interface {
	// Suspect reports a failed collective, and the suspected member; empty if it is not known.
	Suspect(quorumID int64, replicaID string)
	// Incomplete reports that a rank of the group has failed: the group counts as failed until it asks again.
	Incomplete(reason string)
	// ReportProgress answers ProgressAsked.
	ReportProgress(p round.Progress)
}

// Standing is a Membership whose quorums stand until the next one is called. Its methods do not block.
type Standing interface {
	// Trains records the quorum that stands for the group, and the step that it is in; 0: none stands.
	Trains(quorumID, step int64)
	// Stop answers Called with the first step of that quorum that no rank was allowed to begin.
	Stop(quorumID, step int64)
	// Part reports that the group has left a quorum that stands, in a step in which the others may wait for it.
	Part(quorumID, step int64, reason string)
	// NeedQuorum asks for the call of the next quorum.
	NeedQuorum(reason string)
	// RequestDrain reports that a rank was asked to drain the group.
	RequestDrain(reason string)
}

// Leaver is a Membership to which a group can announce that it leaves, so that its end is no failure.
type Leaver interface {
	// Leave announces that the group has completed its last step. It returns when the group's peers have completed that step too,
	// and no longer need its data. It may be called several times, also concurrently.
	Leave(ctx context.Context) error
}

// Finisher is a Membership to which a group can announce that its training is complete.
type Finisher interface {
	// Finish makes Close announce that the training is complete. A lighthouse that has received this announcement from all groups of
	// a job forgets the job's past.
	Finish()
}

// Reporter is a Membership that displays the progress and the cost of its group's recoveries. Its methods do not block.
type Reporter interface {
	ReportHealing(p HealProgress)
	ReportRecovered(r Recovered)
}

// HealProgress is how much of a peer's state has arrived, at one rank or, in a report to the lighthouse, at the whole group. It and
// Recovered are for display: no decision depends on them.
type HealProgress struct {
	GroupRank       int64
	Received, Total int64 // bytes
}

// Recovered is the cost of a heal, or of the failure of a peer, for one rank.
type Recovered struct {
	GroupRank int64
	Healed    bool  // a heal; otherwise a peer failed, and this group has committed a step since
	QuorumID  int64 // of the quorum in which the peer failed; 0 for a heal
	Step      int64 // the present step of the group
	Bytes     int64 // of the received state
	StepsLost int64
	Phases    []PhaseTime // in the order in which they took place
}

// PhaseTime is the duration of a phase of a recovery.
type PhaseTime struct {
	Phase   string
	Seconds float64
}
