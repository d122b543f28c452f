// Package round is the manager server's machine: it gathers the ranks of one replica group for a quorum and for a commit
// vote, and answers every waiting rank, whether the round succeeds, fails or times out.
//
// It is pure: time is an argument, RPCs and broken connections are events, answers are actions.
package round

import (
	"time"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/recovery"
)

// WaiterID names one waiting request; the shell chooses it and never uses it twice.
type WaiterID uint64

// Group is what one manager server knows about its replica group from the start.
type Group struct {
	ReplicaID    string
	Address      string // of this manager server, announced to the others
	StoreAddress string
	WorldSize    int64 // ranks in the group
}

// Event is something that happened to the manager server.
type Event interface{ isEvent() }

type (
	// QuorumAsked: a rank waits for the next quorum.
	QuorumAsked struct {
		Request
		Waiter   WaiterID
		Deadline time.Time // of this rank's wait
	}
	// QuorumKnown: the lighthouse answered a round, or failed to.
	QuorumKnown struct {
		Round   uint64
		Quorum  *quorum.Quorum // nil if Failure is set
		Failure *Failure
	}
	// Voted: a rank says whether its step may be committed, and waits for the group's decision.
	Voted struct {
		Waiter       WaiterID
		GroupRank    int64
		Step         int64
		ShouldCommit bool
		// Fenced: the group was silent for so long that the others may have gone on without it.
		Fenced bool
	}
	// Evicted: the group counts as failed in a quorum. The others go on without it, so that it commits nothing more of it.
	Evicted struct {
		QuorumID int64
		Reason   string
	}
	// Drained: the lighthouse wants the group to leave, as a rank may (Request.Drain). From the next quorum on its ranks are told, all in the same one.
	Drained struct{}
	// ProgressAsked: the lighthouse wants to know what the group does. The shell asks the ranks, and Machine.Progress when
	// it has waited long enough.
	ProgressAsked struct{}
	// RankProgressed: a rank says what it does between a quorum and the vote.
	RankProgressed struct {
		GroupRank int64
		Waits     bool   // for other groups
		What      string // for people
	}
	// MetadataAsked: someone asks where a rank serves its checkpoint. Answered at once.
	MetadataAsked struct {
		Waiter    WaiterID
		GroupRank int64
	}
	// GaveUp: a waiter's deadline passed, or its call was cancelled. It ends the gathering, and is answered
	// with Fail like its siblings: the reason says whom it waited for. A shell that answered it already
	// drops that.
	GaveUp struct {
		Waiter  WaiterID
		Timeout bool
	}
	// RankDisconnected: the last connection of a rank broke.
	RankDisconnected struct{ GroupRank int64 }
	// StillDisconnected: a while has passed since. A connection that merely broke is back by now.
	StillDisconnected struct{ GroupRank int64 }
	// RankBack: a rank that was gone has a connection again.
	RankBack struct{ GroupRank int64 }
	// Closed: the server shuts down; every waiter is answered with this reason.
	Closed struct{ Reason string }
)

func (QuorumAsked) isEvent()       {}
func (QuorumKnown) isEvent()       {}
func (Voted) isEvent()             {}
func (Evicted) isEvent()           {}
func (Drained) isEvent()           {}
func (ProgressAsked) isEvent()     {}
func (RankProgressed) isEvent()    {}
func (MetadataAsked) isEvent()     {}
func (GaveUp) isEvent()            {}
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
	// CancelLighthouse ends the request of a round that nobody waits for any more.
	CancelLighthouse struct{ Round uint64 }
	// AnswerQuorum answers one rank with its own result.
	AnswerQuorum struct {
		Waiter WaiterID
		Result recovery.Result
	}
	// AnswerVote answers one rank with the group's decision.
	AnswerVote struct {
		Waiter       WaiterID
		ShouldCommit bool
	}
	// AnswerMetadata answers MetadataAsked.
	AnswerMetadata struct {
		Waiter   WaiterID
		Metadata string
	}
	// TellIncomplete tells the lighthouse that the group takes part in nothing until it asks again.
	TellIncomplete struct{ Reason string }
	// Discarded reports why a step is not committed for which all ranks voted, for the log.
	Discarded struct {
		Step   int64
		Reason string
	}
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
func (AnswerMetadata) isAction()   {}
func (TellIncomplete) isAction()   {}
func (Discarded) isAction()        {}
func (Fail) isAction()             {}

// Kind classes a failure; internal/rpc maps each to one gRPC status code.
type Kind int

const (
	KindInvalid     Kind = iota // the request can never succeed: INVALID_ARGUMENT
	KindTimeout                 // a deadline passed: DEADLINE_EXCEEDED
	KindAborted                 // a sibling rank or a newer attempt ended this round: ABORTED
	KindUnavailable             // shutting down, or the lighthouse is gone: UNAVAILABLE
	KindInternal                // everything else: INTERNAL
)

// Failure is why a waiter got no answer, in words for people.
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
	}
	return "unknown"
}
