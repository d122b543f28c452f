// Package quorum is the lighthouse's machine: who is alive, who waits, who is in the next quorum, and why.
//
// It is pure. Time is an argument, requests and timers are events, answers are actions; sockets, clocks and
// goroutines live in package lighthouse. The same machine runs in production and in the simulation.
package quorum

import "time"

// Member is one replica group as it asks to take part in the next step.
type Member struct {
	ReplicaID      string
	Address        string // of the group's manager server
	StoreAddress   string
	Step           int64
	WorldSize      uint64 // ranks in the group
	ShrinkOnly     bool
	Data           string // the user's JSON, handed on as it is
	CommitFailures int64
	Handles        []string // reconfigure handles, one per group rank; empty for peers of 0.2.0
	Unknown        []byte   // wire fields this version does not know, handed on as they are
}

// Quorum is the set of groups that train a step together. It is immutable once delivered.
type Quorum struct {
	ID      int64
	Members []Member // ordered by ReplicaID
	Created time.Time
}

// WaiterID names one waiting request; the shell chooses it and never uses it twice.
type WaiterID uint64

// Event is something that happened to the lighthouse.
type Event interface{ isEvent() }

type (
	// Asked: a member wants to be in the next quorum and waits for it. It counts as a heartbeat.
	Asked struct {
		Waiter WaiterID
		Member Member
		// KnownQuorumID is the last quorum the member was in, 0 if none or unknown. A restarted
		// lighthouse continues above it, so that ids never repeat in the life of a job.
		KnownQuorumID int64
	}
	// GaveUp: a waiter's deadline passed, or its connection broke. It is no candidate any more.
	GaveUp struct{ Waiter WaiterID }
	// Beat: a heartbeat.
	Beat struct{ ReplicaID string }
	// Tick: quorum_tick_ms passed.
	Tick struct{}
)

func (Asked) isEvent()  {}
func (GaveUp) isEvent() {}
func (Beat) isEvent()   {}
func (Tick) isEvent()   {}

// Action is something the shell must do.
type Action interface{ isAction() }

type (
	// Deliver answers all these waiters with the same quorum.
	Deliver struct {
		Waiters []WaiterID
		Quorum  *Quorum
	}
	// Changed reports that the set of members or the quorum_id changed, for the log and the dashboard.
	Changed struct {
		Quorum *Quorum
		Joined []string
		Left   []string
		Reason string
	}
	// Waiting reports why there is no quorum, once for each new reason, for the log.
	Waiting struct{ Reason string }
)

func (Deliver) isAction() {}
func (Changed) isAction() {}
func (Waiting) isAction() {}
