// Package membership is what a manager server needs to be a member of a job: quorums, and notices of what happens to the other
// members. Package lighthouses implements it with the job's lighthouses.
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
	// Attend sends heartbeats until that fails or ctx ends. It calls reached whenever one arrived. interval is the time between
	// two of them, unless the other side asks for another one.
	Attend(ctx context.Context, interval time.Duration, reached func()) error
	// Close ends the connection, and every call with it.
	Close() error
}

// NoticeSource is a Membership that learns of notices.
type NoticeSource interface {
	// Notices has a value for each; it is closed with the membership.
	Notices() <-chan Notice
}

// Witness is a Membership that takes reports of its group. Its calls do not block.
type Witness interface {
	// Suspect reports a failed collective, and the suspected member; empty: not known.
	Suspect(quorumID int64, replicaID string)
	// Incomplete reports that the group takes part in nothing until it asks again.
	Incomplete(reason string)
	// SayProgress answers ProgressAsked.
	SayProgress(p round.Progress)
	// Fenced reports whether the group was silent for so long that it may count as failed.
	Fenced() bool
}

// Leaver is a Membership that takes the announcement of an end that is no failure.
type Leaver interface {
	// Leave announces that the group has ended its last step, and returns when no peer needs it any more: they have ended
	// that step, too. It may be called several times, at the same time.
	Leave(ctx context.Context) error
}

// Finisher is a Membership that takes the announcement that the training is complete.
type Finisher interface {
	// Finish makes the end of the membership say so. A lighthouse that hears it of all groups forgets the job's past.
	Finish()
}

// Reporter is a Membership that shows people how its group recovers. Its calls do not wait.
type Reporter interface {
	SayHealing(p HealProgress)
	SayRecovered(r Recovered)
}

// HealProgress is how far the state of a peer has arrived, at a rank or, towards the lighthouse, at all of the group. It and
// Recovered are for people to see: nothing depends on them.
type HealProgress struct {
	GroupRank       int64
	Received, Total int64 // bytes
}

// Recovered is what a heal, or the failure of a peer, cost one rank.
type Recovered struct {
	GroupRank int64
	Healed    bool  // else: a peer failed, and this group has committed a step since
	QuorumID  int64 // that failed; 0 for a heal
	Step      int64 // that it is at now
	Bytes     int64 // of the state that came
	StepsLost int64
	Phases    []PhaseTime // in their order
}

// PhaseTime is what a phase of a recovery took.
type PhaseTime struct {
	Phase   string
	Seconds float64
}
