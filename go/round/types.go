// Package round is the manager server's machine: it gathers the ranks of one replica group for a quorum and
// for a commit vote, and answers every waiting rank, whether the round succeeds, fails or times out.
//
// It is pure: time is an argument, RPCs and broken connections are events, answers are actions.
package round

import (
	"time"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/recovery"
)

// WaiterID identifies one pending request; the shell chooses it and never uses it twice.
type WaiterID uint64

// Group has the properties of a replica group that its manager server knows from the start.
type Group struct {
	ReplicaID    string
	Address      string // of this manager server, announced to the others
	StoreAddress string
	WorldSize    int64 // ranks in the group
}

// Event is something that happened to the manager server.
type Event interface{ isEvent() }

type (
	// QuorumAsked: a rank requests the next quorum.
	QuorumAsked struct {
		Request
		Waiter   WaiterID
		Deadline time.Time // until when the lighthouse may take to answer
	}
	// QuorumKnown: the lighthouse answered a round, or failed to.
	QuorumKnown struct {
		Round   uint64
		Quorum  *quorum.Quorum // nil if Failure is set
		Failure *Failure
	}
	// Voted: a rank votes on whether its step may be committed, and waits for the group's decision.
	Voted struct {
		Waiter       WaiterID
		GroupRank    int64
		Step         int64
		ShouldCommit bool
	}
	// MemberFailed: a member, which may be this group, counts as failed in a quorum, and the others continue
	// without it.
	MemberFailed struct {
		QuorumID  int64
		ReplicaID string
		Reason    string
	}
	// Called: the lighthouse calls the quorum after this one.
	Called struct{ QuorumID int64 }
	// Reached: the group has a stream with a lighthouse, which may not have received earlier reports.
	Reached struct{}
	// RoundKnown: the first step that needs another quorum than this one.
	RoundKnown struct {
		QuorumID int64
		Step     int64
	}
	// Drained: the lighthouse requests that the group leaves. All ranks learn it with the next quorum.
	Drained struct{}
	// DrainAsked: a rank requests it. The request may be lost, so Request.Drain repeats it.
	DrainAsked struct{}
	// ProgressAsked: the lighthouse asks for the group's progress. The shell asks the ranks, waits for their
	// answers for a while, and calls Machine.Progress.
	ProgressAsked struct{}
	// RankProgressed: a rank's answer to ProgressAsked, or the beginning or end of a phase.
	RankProgressed struct {
		GroupRank int64
		Waits     bool   // it waits for other groups
		What      string // its activity, in words
		Phase     quorum.Phase
		// Nobody has asked: the rank's script begins this phase or, if it is Unsaid, ends the one before.
		Begins bool
	}
	// RankWorked: a rank reports how long it has worked in each of its last steps without waiting for others.
	RankWorked struct {
		GroupRank int64
		Took      []time.Duration
		Host      string // its load, clock, temperature
	}
	// MetadataAsked: a client requests the address of a rank's checkpoint. It is answered at once.
	MetadataAsked struct {
		Waiter    WaiterID
		GroupRank int64
	}
	// Withdrawn: the deadline of a waiter passed, or its call was cancelled. The gathering or the vote to
	// which the waiter belongs ends, and all of its waiters get Fail with a reason that names the missing
	// ranks. If the shell has already answered this waiter, it ignores the Fail.
	Withdrawn struct {
		Waiter  WaiterID
		Timeout bool
	}
	// RankDisconnected: the last connection of a rank broke.
	RankDisconnected struct{ GroupRank int64 }
	// StillDisconnected: the grace for reconnecting is over.
	StillDisconnected struct{ GroupRank int64 }
	// RankBack: a rank has reconnected.
	RankBack struct{ GroupRank int64 }
	// Closed: the server shuts down; every waiter is answered with this reason.
	Closed struct{ Reason string }
)

func (QuorumAsked) isEvent()       {}
func (QuorumKnown) isEvent()       {}
func (Voted) isEvent()             {}
func (MemberFailed) isEvent()      {}
func (Called) isEvent()            {}
func (Reached) isEvent()           {}
func (RoundKnown) isEvent()        {}
func (Drained) isEvent()           {}
func (DrainAsked) isEvent()        {}
func (ProgressAsked) isEvent()     {}
func (RankProgressed) isEvent()    {}
func (RankWorked) isEvent()        {}
func (MetadataAsked) isEvent()     {}
func (Withdrawn) isEvent()         {}
func (RankDisconnected) isEvent()  {}
func (StillDisconnected) isEvent() {}
func (RankBack) isEvent()          {}
func (Closed) isEvent()            {}

// Action is something the shell must do.
type Action interface{ isAction() }

type (
	// AskLighthouse starts the one request of this round. The shell answers with QuorumKnown.
	AskLighthouse struct {
		Round         uint64
		Member        quorum.Member
		KnownQuorumID int64
		Deadline      time.Time
	}
	// CancelLighthouse cancels the request of a round that has ended.
	CancelLighthouse struct{ Round uint64 }
	// AnswerQuorum answers one rank with its own result.
	AnswerQuorum struct {
		Waiter WaiterID
		Result *recovery.Result
	}
	// AnswerVote answers one rank with the group's decision.
	AnswerVote struct {
		Waiter       WaiterID
		ShouldCommit bool
		Stands       bool // the quorum stands for the next step: the rank need not ask for one
	}
	// Stop answers Called: the first step that none of the ranks was allowed to begin.
	Stop struct {
		QuorumID int64
		Step     int64
	}
	// Part tells the lighthouse that the group leaves the quorum that stands: others may wait for it.
	Part struct {
		QuorumID int64
		Step     int64 // the steps before this one are committed
		Reason   string
	}
	// NeedQuorum asks the lighthouse to call the next quorum.
	NeedQuorum struct{ Reason string }
	// RequestDrain tells the lighthouse that a rank was asked to drain the group.
	RequestDrain struct{}
	// AnswerMetadata answers MetadataAsked.
	AnswerMetadata struct {
		Waiter   WaiterID
		Metadata string
	}
	// ReportIncomplete reports to the lighthouse that a rank has failed, so that the group counts as failed
	// until it asks again.
	ReportIncomplete struct{ Reason string }
	// Fail answers one waiter with an error.
	Fail struct {
		Waiter  WaiterID
		Failure Failure
	}
)

func (AskLighthouse) isAction()    {}
func (CancelLighthouse) isAction() {}
func (AnswerQuorum) isAction()     {}
func (AnswerVote) isAction()       {}
func (Stop) isAction()             {}
func (Part) isAction()             {}
func (NeedQuorum) isAction()       {}
func (RequestDrain) isAction()     {}
func (AnswerMetadata) isAction()   {}
func (ReportIncomplete) isAction() {}
func (Fail) isAction()             {}

// Kind classifies a failure; internal/wire maps each to one gRPC status code, and some to a refusal of the
// lighthouse, by which Python goes.
type Kind int

const (
	KindInvalid     Kind = iota // the request can never succeed: INVALID_ARGUMENT
	KindTimeout                 // a deadline passed: DEADLINE_EXCEEDED
	KindAborted                 // a sibling rank or a newer attempt ended this round: ABORTED
	KindUnavailable             // shutting down, or the lighthouse is not reached: UNAVAILABLE
	KindInternal                // everything else: INTERNAL
	KindHeld                    // quorum.Held
	KindUnneeded                // quorum.Unneeded
	KindEnded                   // quorum.Ended
	KindPoisoned                // quorum.Poisoned
)

// Failure is the reason why a request failed.
type Failure struct {
	Kind   Kind
	Reason string
}

func (k Kind) String() string {
	switch k {
	case KindInvalid:
		return "invalid"
	case KindTimeout:
		return "timeout"
	case KindAborted:
		return "aborted"
	case KindUnavailable:
		return "unavailable"
	case KindInternal:
		return "internal"
	case KindHeld:
		return string(quorum.Held)
	case KindUnneeded:
		return string(quorum.Unneeded)
	case KindEnded:
		return string(quorum.Ended)
	case KindPoisoned:
		return string(quorum.Poisoned)
	}
	return "unknown"
}
