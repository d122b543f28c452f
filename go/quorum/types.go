// Package quorum is the lighthouse's machine. It decides which members are alive, which of them are in the
// next quorum, and when that quorum is formed.
//
// It is pure. Time is an argument, requests and timers are events, answers are actions; sockets, clocks and
// goroutines live in package lighthouse. The same machine runs in production and in the simulation.
package quorum

import (
	"slices"
	"time"
)

// Quorum is the set of groups that train a step together. It is immutable once delivered.
type Quorum struct {
	ID      int64
	Members []Member // ordered by ReplicaID
	Created time.Time
	// Stands: its members train on in it, without a request for each step, until the lighthouse calls the
	// next quorum (standing.go).
	Stands bool
	// Speeds are those of the members, in order, by which they cut a batch (speeds.go); nil: equal ones.
	Speeds  []int64
	Skipped []string // units of batches that the members leave out, from this step on (poison.go)
}

// At returns the quorum at a later step, when all of its members are in this state.
func (q *Quorum) At(state State) *Quorum {
	later := *q
	later.Members = slices.Clone(q.Members)
	for i := range later.Members {
		later.Members[i].SetState(state)
	}
	return &later
}

// WaiterID identifies one pending request; the shell chooses it and never uses it twice.
type WaiterID uint64

// Event is something that happened to the lighthouse.
type Event interface{ isEvent() }

type (
	// Asked: a member requests to be in the next quorum. The request counts as a heartbeat.
	Asked struct {
		Waiter WaiterID
		Member Member
		// KnownQuorumID is the last quorum the member was in, 0 if none or unknown. A restarted
		// lighthouse continues above it, so that ids never repeat in the life of a job.
		KnownQuorumID int64
		Recallable    bool // it answers a Recall
		// Number grows with each request of the member, retries included; 0 if the member does not number
		// them. A request with a smaller number than an earlier one was delayed: its content is outdated, and
		// the member does not wait for its answer.
		Number uint64
		Run    string // of its launcher; empty: it names none
	}
	// Greeted: a member begins a stream, which upstream members do not. It counts as a heartbeat.
	Greeted struct {
		ReplicaID string
		Term      int64 // the highest that the member has received from a lighthouse (term.go)
		// Known is the round that the member received last. It is recalled at the greeting, before there is a
		// request: the member may be training in it.
		Known Claim
		// the quorum that stands for the member, in which it trains on without requests; 0: none
		StandsIn int64
		Step     int64 // the step that the member is in
	}
	// Recalled: a member, the disk, or the log of a cluster shows the last quorum that it knows.
	Recalled struct {
		Kept           // by the disk or the log, but for the copies (Copied)
		Quorum *Quorum // of a member: all that it received in its last round
		From   string  // the member that shows it, which must have been in it; empty: the disk or the log
	}
	// Copied: what the keepers of the job's hosts hold, or what the disk or the log says that they held.
	Copied struct {
		Copies             // the newest; without hosts: they hold none
		Reporting []string // hosts whose keepers report
	}
	// Withdrawn: a request ended on the side of its member: its deadline passed, or its connection broke. It
	// gets no answer.
	Withdrawn struct {
		ReplicaID string
		Waiter    WaiterID
	}
	// Beat: a heartbeat.
	Beat struct {
		ReplicaID string
		Call      bool  // it is a call, and not a message on the stream of a member
		Step      int64 // the step that the member is in while its quorum stands; 0: not reported
		Phase     Phase
		For       time.Duration // how long it has been in that phase
		Pace      Pace
	}
	// Stopped: a member's answer to Call: the first step of that quorum that none of its ranks was allowed to
	// begin.
	Stopped struct {
		ReplicaID string
		QuorumID  int64
		Step      int64
	}
	// Parting: a member has left a quorum that stands. The others may wait for it in a step.
	Parting struct {
		ReplicaID string
		QuorumID  int64
		Step      int64 // it has committed the steps before this one
		Reason    string
	}
	// Changes: a member has to tell the others something that goes into their next quorum, and its present
	// one stands.
	Changes struct{ ReplicaID, Reason string }
	// Disconnected: the last stream of a member broke: its process ended, or the network was cut. Its pending
	// requests were withdrawn before. The member is a suspect from then on, and fails unless there is a sign
	// of life within the grace.
	Disconnected struct{ ReplicaID string }
	// Incomplete: a rank of the group has failed. The group counts as failed until it asks again.
	Incomplete struct{ ReplicaID, Reason string }
	// Suspected: a collective of a quorum failed in the reporter's group. Suspect is the peer that broke it,
	// empty if the reporter does not know. The report is a sign of life of the reporter.
	Suspected struct {
		Reporter, Suspect string
		QuorumID          int64
	}
	// Checked: the result of a Check.
	Checked struct {
		ReplicaID string
		QuorumID  int64
		Reached   bool
		Reason    string // if it was not reached
	}
	// Progressed: a member's answer to AskProgress.
	Progressed struct {
		ReplicaID string
		Progress  Progress
	}
	// Raised: an exception ends a member.
	Raised struct {
		ReplicaID string
		Digest    Digest
		Device    bool   // it is an error of the device, which may be broken
		Skip      string // the unit, which the groups are to leave out if it repeats; empty: the job stops
		Text      string // the traceback
	}
	// Limited: an operator sets Policy.MaxReplicas.
	Limited struct{ MaxReplicas int }
	// Drained: an operator or a scheduler requests that a member leaves.
	Drained struct{ ReplicaID, Reason string }
	// Leaving: a member has ended its last step, and will not ask again.
	Leaving struct {
		ReplicaID string
		Step      int64 // the first step that it does not take part in; 0: not reported
	}
	// ShuttingDown: a member shuts its manager server down. The end of its stream is no failure then.
	ShuttingDown struct {
		ReplicaID string
		Finished  bool // its training is complete: the group was not preempted, and will not be restarted
		End       End  // if finished
	}
	// Slept: the lighthouse itself was stopped for a time, and handled no messages. For is how far the
	// machine's time went on meanwhile: less than the whole time if the host was suspended, since the
	// monotonic clock stood still.
	Slept struct{ For time.Duration }
	// Woken: the time of the latest Wake has come.
	Woken struct{}
	// Tick: quorum_tick_ms passed.
	Tick struct{}
)

func (Asked) isEvent()        {}
func (Greeted) isEvent()      {}
func (Recalled) isEvent()     {}
func (Copied) isEvent()       {}
func (Withdrawn) isEvent()    {}
func (Stopped) isEvent()      {}
func (Parting) isEvent()      {}
func (Changes) isEvent()      {}
func (Beat) isEvent()         {}
func (Disconnected) isEvent() {}
func (Incomplete) isEvent()   {}
func (Suspected) isEvent()    {}
func (Checked) isEvent()      {}
func (Progressed) isEvent()   {}
func (Raised) isEvent()       {}
func (Limited) isEvent()      {}
func (Drained) isEvent()      {}
func (Leaving) isEvent()      {}
func (ShuttingDown) isEvent() {}
func (Slept) isEvent()        {}
func (Woken) isEvent()        {}
func (Tick) isEvent()         {}

// Action is something the shell must do.
type Action interface{ isAction() }

type (
	// Deliver answers all these waiters with the same quorum.
	Deliver struct {
		Waiters []WaiterID
		Quorum  *Quorum
		Waited  time.Duration // since the first of them asked, without stops of the lighthouse
	}
	// Redeliver answers a waiter with the latest quorum: its member is in it, and the first answer, which may
	// have been that of an earlier lighthouse, was lost (redeliver.go).
	Redeliver struct {
		Waiter WaiterID
		Quorum *Quorum
	}
	// Refuse answers a waiter that gets no quorum.
	Refuse struct {
		Waiter WaiterID
		Why    Refusal
		Reason string
	}
	// Welcome answers the greeting of a member. Earlier actions of the same event are not for the new stream.
	Welcome struct {
		ReplicaID string
		Term      int64 // of this lighthouse
		// who requested that the member leaves, in case it missed the Drain; empty: it is not drained
		Draining string
	}
	// RefuseStream ends the stream that a member just began: this lighthouse does not lead any more.
	RefuseStream struct {
		ReplicaID string
		Reason    string
	}
	// Call asks members whose quorum stands at which step they can stop; each answers with Stopped.
	Call struct {
		QuorumID   int64
		ReplicaIDs []string
		Reason     string
	}
	// Round tells these members the first step that needs another quorum: they train on until then, and ask.
	Round struct {
		QuorumID   int64
		Step       int64
		ReplicaIDs []string
	}
	// Over tells a member that the quorum that stands for it does so no longer: it missed the report while it
	// had no stream.
	Over struct {
		QuorumID  int64
		ReplicaID string
		Reason    string
	}
	// Advanced reports that a quorum that stands has come to another step.
	Advanced struct {
		QuorumID int64
		Step     int64
		Members  int
	}
	// Recall asks a member for the quorum that it knows. The shell answers with Recalled, or not at all.
	Recall struct {
		ReplicaID string
		QuorumID  int64
	}
	// Report tells people something, in the log and in the history of the job.
	Report struct {
		What      Subject
		QuorumID  int64  // 0: it is about none
		Step      int64  // of that quorum, when it began
		ReplicaID string // empty: it is about the job
		Reason    string
	}
	// Keep makes the shell keep the state of the job. It comes before the Deliver of a new quorum, and when a
	// member has shown one.
	Keep struct{ Kept }
	// Changed reports that the set of members or the quorum_id changed, for the log and the dashboard.
	Changed struct {
		Quorum *Quorum
		Joined []string
		Left   []string
		Reason string
	}
	// Failed reports that a member of the latest quorum has failed. The others must stop waiting for it.
	Failed struct {
		QuorumID  int64
		ReplicaID string
		// it has done its part of the steps before this one, as far as is known: these may still end
		Step   int64
		Cause  Cause
		Reason string
	}
	// Stalled reports that a member of the latest quorum makes no progress while the others wait for it.
	Stalled struct {
		QuorumID  int64
		ReplicaID string
		Reason    string
	}
	// Check asks for a sign of life of a member that its peers suspect; the shell answers with Checked.
	Check struct {
		ReplicaID string
		Address   string // of its manager server
		QuorumID  int64
	}
	// AskProgress asks members for their progress; each answers with Progressed.
	AskProgress struct{ ReplicaIDs []string }
	// Judged answers Raised.
	Judged struct {
		ReplicaID string
		Verdict   string // why the job stops; empty: the member may be started again
	}
	// Drain asks a member to leave at the end of a step. It answers with Leaving when it does.
	Drain struct{ ReplicaID, Reason string }
	// Release lets a member that left end its process: its peers have received all data of its last step.
	Release struct{ ReplicaID string }
	// Wake asks for Woken at a time. It replaces an earlier Wake.
	Wake struct{ At time.Time }
)

func (Deliver) isAction()      {}
func (Redeliver) isAction()    {}
func (Refuse) isAction()       {}
func (Welcome) isAction()      {}
func (RefuseStream) isAction() {}
func (Recall) isAction()       {}
func (Call) isAction()         {}
func (Round) isAction()        {}
func (Over) isAction()         {}
func (Advanced) isAction()     {}
func (Report) isAction()       {}
func (Keep) isAction()         {}
func (Changed) isAction()      {}
func (Failed) isAction()       {}
func (Stalled) isAction()      {}
func (Check) isAction()        {}
func (AskProgress) isAction()  {}
func (Judged) isAction()       {}
func (Drain) isAction()        {}
func (Release) isAction()      {}
func (Wake) isAction()         {}

// Subject is what a Report is about.
type Subject int

const (
	ClaimDoubted    Subject = iota // a claim of a member that this lighthouse ignores
	MemberRefused                  // a member that no quorum of this job may include, at each of its requests
	MemberStraggles                // a member of the latest quorum has become slower than the others
	QuorumAwaited                  // requests have been pending for long; each reason once in a wait
	CopyAwaited                    // a quorum waits for hosts: it would begin before the copy that they hold
	JobRegressed                   // a quorum whose steps are below those that the job had reached
	JobStops                       // started again as it is, it would end with the same exception
	UnitSkipped                    // all groups leave out a unit of a batch, which would end each of them
)

// Cause is why a member counts as failed: the label of a metric.
type Cause string

const (
	Silent      Cause = "silent"      // no sign of life for too long
	Connection  Cause = "connection"  // its connection broke, and it did not come back
	RankFailed  Cause = "rank"        // one of its ranks has failed
	Unreachable Cause = "unreachable" // its peers lost the connection to it, and it gives no sign of life
	NoProgress  Cause = "stalled"     // it made no progress, and was evicted
	Unanswered  Cause = "unanswered"  // it did not answer the call of the next quorum
	Parted      Cause = "parted"      // its peers wait for it in a step whose quorum it did not receive

	// ShutDown is no failure: the member ended itself.
	ShutDown Cause = "shutdown"
	// Parts is no failure: the member asks for another quorum, while the others train on in the one that
	// stands.
	Parts Cause = "parts"
)

// Causes are all causes that are failures.
var Causes = []Cause{Silent, Connection, RankFailed, Unreachable, NoProgress, Unanswered, Parted}

// Refusal is why a waiter gets no quorum. It travels with the error up to Python, which goes by some of them.
type Refusal string

const (
	Overtaken  Refusal = "overtaken"  // its member has made a newer request
	Replaced   Refusal = "replaced"   // another process asks with the same replica_id
	Behind     Refusal = "behind"     // its step is below the job's, and the policy forbids a regression
	Left       Refusal = "left"       // its member has left
	Unbelieved Refusal = "unbelieved" // it claims to know a quorum far ahead, and does not show it
	// its group has another world_size than the other groups, or reduces other tensors
	Misfit   Refusal = "misfit"
	Poisoned Refusal = "poisoned" // the job stops
	Held     Refusal = "held"     // it is a standby, and its deadline has passed
	Unneeded Refusal = "unneeded" // it is a standby that was asked to leave
	// the training of its run is complete, or it is a standby and all groups have completed theirs
	Ended Refusal = "ended"
)
