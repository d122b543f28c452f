package round

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/torchft/torchft/go/quorum"
)

// maxWorldSize bounds the memory that a machine allocates for its ranks; no replica group comes near it.
const maxWorldSize = 1 << 20

// Validate names every field that is out of range, its value, and what is allowed.
func (g Group) Validate() error {
	if g.ReplicaID == "" {
		return fmt.Errorf("replica_id is empty: it must name the replica group")
	}
	if g.WorldSize < 1 || g.WorldSize > maxWorldSize {
		return fmt.Errorf("world_size is %d: it must be from 1 to %d", g.WorldSize, maxWorldSize)
	}
	return nil
}

// Machine gathers the ranks of one replica group for quorums and votes. It is a state machine for one
// goroutine: Step takes an event, and returns the actions that follow from it.
//
// Invariants: each waiter is answered exactly once, with a result or a failure; a gathering never waits for a
// rank that is known to be absent; at most one request to the lighthouse is pending.
type Machine struct {
	group  Group
	ranks  []rank
	absent []int // ranks that no request waits for, in order; rank.absent has the reason

	gathering     gathering
	round         uint64 // number of the latest request to the lighthouse
	knownQuorumID int64  // largest quorum_id that the lighthouse has answered with

	ballot ballot

	standing standing
	needs    string // why the next quorum is needed; empty: it is not
	// a quorum that was called while a request to the lighthouse was pending: perhaps the next one; 0: none
	toStop int64
	broken int64 // the last quorum of which a member failed

	draining bool // the group was asked to leave, and its ranks learn it with the next quorum

	now    time.Time // of the last event
	closed *Failure  // set once the server shuts down
}

// rank is the state of one rank between its requests.
type rank struct {
	metadata  string          // where it serves its checkpoint
	announced bool            // metadata is set
	last      Request         // its last request for a quorum
	absent    *Failure        // why no request waits for it; nil: it is present
	begun     quorum.Phase    // the phase that its script has begun; Unsaid: none
	votes     int             // up to firstSteps
	took      []time.Duration // its own work in the last steps, at most quorum.PaceSteps
	host      string          // its load, clock, temperature
	activity
}

// NewMachine returns the machine of one replica group. The group must be valid.
func NewMachine(g Group) *Machine {
	return &Machine{
		group:     g,
		ranks:     make([]rank, g.WorldSize),
		gathering: gathering{asked: make([]*QuorumAsked, g.WorldSize)},
		ballot:    ballot{votes: make([]*Voted, g.WorldSize)},
	}
}

// Step takes one event and returns the actions, in the order in which they must be done. The shell watches
// the deadlines, and feeds Withdrawn when one passes.
func (m *Machine) Step(event Event, now time.Time) []Action {
	m.now = now
	switch e := event.(type) {
	case QuorumAsked:
		return m.quorumAsked(e)
	case QuorumKnown:
		return m.quorumKnown(e)
	case Voted:
		return m.voted(e)
	case Called:
		return m.called(e)
	case Reached:
		return m.reached()
	case RoundKnown:
		return m.roundKnown(e)
	case MemberFailed:
		m.quorumBroke(e.QuorumID)
	case Drained:
		m.draining = true
	case DrainAsked:
		return m.drainAsked()
	case ProgressAsked:
		m.forgetProgress()
	case RankProgressed:
		m.rankProgressed(e)
	case RankWorked:
		m.rankWorked(e)
	case MetadataAsked:
		return m.metadataAsked(e)
	case Withdrawn:
		return append(m.quorumWithdrawn(e), m.voteWithdrawn(e)...)
	case RankDisconnected:
		return m.rankDisconnected(e)
	case StillDisconnected:
		return m.stillDisconnected(e)
	case RankBack:
		if e.GroupRank >= 0 && e.GroupRank < m.group.WorldSize {
			m.expect(e.GroupRank)
		}
	case Closed:
		return m.close(e)
	}
	return nil
}

// refuse returns why a request of a rank can never succeed; nil if it can.
func (m *Machine) refuse(groupRank int64) *Failure {
	if m.closed != nil {
		return m.closed
	}
	if groupRank < 0 || groupRank >= m.group.WorldSize {
		return &Failure{KindInvalid, fmt.Sprintf("group_rank is %d: replica group %s has ranks 0 to %d",
			groupRank, m.group.ReplicaID, m.group.WorldSize-1)}
	}
	return nil
}

func (m *Machine) metadataAsked(e MetadataAsked) []Action {
	if m.closed != nil {
		return []Action{Fail{e.Waiter, *m.closed}}
	}
	if e.GroupRank >= 0 && e.GroupRank < m.group.WorldSize && m.ranks[e.GroupRank].announced {
		return []Action{AnswerMetadata{e.Waiter, m.ranks[e.GroupRank].metadata}}
	}
	known := m.where(func(r int) bool { return m.ranks[r].announced })
	return []Action{Fail{e.Waiter, Failure{KindInvalid, fmt.Sprintf(
		"rank %d of replica group %s has announced no checkpoint; known: %s", e.GroupRank, m.group.ReplicaID,
		known)}}}
}

// rankDisconnected fails the gathering and the vote that need the rank. Until it asks again, no request waits
// for it: the other ranks would wait until their deadlines.
func (m *Machine) rankDisconnected(e RankDisconnected) []Action {
	if m.closed != nil || e.GroupRank < 0 || e.GroupRank >= m.group.WorldSize {
		return nil
	}
	failed := Failure{KindAborted, fmt.Sprintf("rank %d of replica group %s has failed: its connection broke",
		e.GroupRank, m.group.ReplicaID)}
	m.miss(e.GroupRank, &failed)
	return append(m.endGathering(failed), m.endBallot(failed)...)
}

// stillDisconnected reports the incomplete group to the lighthouse, so that no other group waits for it.
func (m *Machine) stillDisconnected(e StillDisconnected) []Action {
	if m.closed != nil || e.GroupRank < 0 || e.GroupRank >= m.group.WorldSize {
		return nil
	}
	if absent := m.ranks[e.GroupRank].absent; absent != nil {
		m.standing.ends() // the lighthouse learns it from the report
		return []Action{ReportIncomplete{absent.Reason}}
	}
	return nil
}

func (m *Machine) close(e Closed) []Action {
	if m.closed != nil {
		return nil
	}
	m.closed = &Failure{KindUnavailable, e.Reason}
	return append(m.endGathering(*m.closed), m.endBallot(*m.closed)...)
}

// hopeless returns why a gathering cannot become complete: one of its missing ranks is absent. It is nil if
// all missing ranks may still ask.
func (m *Machine) hopeless(present func(rank int) bool) *Failure {
	for _, r := range m.absent {
		if !present(r) {
			return m.ranks[r].absent
		}
	}
	return nil
}

// miss marks a rank as absent; expect removes the mark.
func (m *Machine) miss(groupRank int64, why *Failure) {
	m.ranks[groupRank].absent = why
	if i, found := slices.BinarySearch(m.absent, int(groupRank)); !found {
		m.absent = slices.Insert(m.absent, i, int(groupRank))
	}
}

func (m *Machine) expect(groupRank int64) {
	if m.ranks[groupRank].absent == nil {
		return
	}
	m.ranks[groupRank].absent = nil
	if i, found := slices.BinarySearch(m.absent, int(groupRank)); found {
		m.absent = slices.Delete(m.absent, i, i+1)
	}
}

// where lists the ranks for which holds is true, for reasons and errors.
func (m *Machine) where(holds func(rank int) bool) string {
	const most = 16 // bounds the ranks in a message
	var names []string
	more := 0
	for r := range m.ranks {
		switch {
		case !holds(r):
		case len(names) < most:
			names = append(names, fmt.Sprint(r))
		default:
			more++
		}
	}
	switch {
	case len(names) == 0:
		return "none"
	case more > 0:
		return fmt.Sprintf("%s and %d more", strings.Join(names, ", "), more)
	}
	return strings.Join(names, ", ")
}
