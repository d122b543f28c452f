package quorum

import (
	"fmt"
	"time"
)

// tally has the counts on which compute bases its decision. The roster keeps them up to date, so that a
// decision after a request costs the same with ten groups and with ten thousand.
type tally struct {
	healthy int // members with a heartbeat younger than the timeout
	// healthy members that count as alive only because they were in the last quorum: they have sent nothing
	// since
	presumed   int
	present    int // healthy members of the previous quorum
	candidates int // healthy members with a pending request
	shrinkers  int // candidates whose request has shrink_only

	previous           int // members of the previous quorum, 0 if there was none
	previousCandidates int // candidates among them

	waited time.Duration // since the first candidate joined
	// joining is how long the others have had to join: since the first candidate of the previous quorum
	// joined or, if there is none, the first of all candidates. The waiting time of a new member does not
	// count: it asks in the middle of a step, and the first member that completes the step must not continue
	// with the new one alone while the other members are about to ask.
	joining time.Duration
}

// cause is the reason why there is a quorum, or why there is none yet.
type cause int

const (
	noRequest      cause = iota
	tooFew               // fewer than min_replicas may be in it
	noMajority           // it could be the smaller half of a split
	awaitingOthers       // possible, but a healthy member may still ask
	// possible, but a member knows a later round, which the lighthouse has to learn first
	pastUnknown
	// possible, but below the step that the job had reached, and a member with that step may come
	behindJob
	forbidden    // below the step that the job had reached, and the policy forbids that
	fastPath     // every previous member asked
	allAsked     // every healthy member asked
	joinTimedOut // the rest did not ask in time

	causes // their number
)

// decision is the result of compute, and of the checks after it. It contains numbers, from which String makes
// a text on demand: most decisions ("not yet") are never shown.
type decision struct {
	cause  cause
	shrink bool // only members of the previous quorum may be in it
	policy Policy
	tally  tally

	detail  string // the reason in words, for causes that the tally does not explain
	regress string // why the job regresses; empty if it does not
	behind  string // why it begins before a copy that hosts hold; empty if it does not

	// the members of the quorum, or of the one that is not allowed yet; in order unless changed
	in      []*record
	changed bool // in differs from the members of the latest quorum
}

// ready reports whether there is a quorum.
func (d decision) ready() bool { return d.cause >= fastPath }

// unknown returns the decision to wait, because a member knows a later round.
func (d decision) unknown(round Claim) decision {
	d.cause, d.detail = pastUnknown, fmt.Sprintf("a member knows of a later round, of quorum %d, and is "+
		"asked for it", round.QuorumID)
	return d
}

// compute decides whether the candidates are a quorum, as far as their numbers show.
//
// Invariants:
//
//  1. A quorum needs the requests of all members of the previous one, or of more than half of the healthy
//     members. So if two parts of a job reach the lighthouse but not each other, the smaller part gets no
//     quorum.
//  2. It has at least min_replicas members, unless all members of the previous quorum ask.
//  3. Unless all members of the previous quorum ask, a healthy member without a request is waited for until
//     join_timeout_ms after the first request of a member of the previous quorum (tally.joining): it may be
//     in the middle of a step.
//  4. The result depends on counts and the policy only. The checks that look at the members themselves come
//     after it, and can only forbid what it allows (Machine.decide).
func compute(p Policy, t tally) decision {
	d := decision{policy: p, tally: t}
	// Without a previous quorum there is nothing to shrink from: a fresh lighthouse must let a job start.
	d.shrink = t.shrinkers > 0 && t.previous > 0

	switch {
	case t.candidates == 0:
		d.cause = noRequest
	case t.previous > 0 && t.previousCandidates == t.previous:
		// The previous quorum obeyed the rules below, and all of its members ask.
		d.cause = fastPath
	case d.eligible() < p.MinReplicas:
		d.cause = tooFew
	case 2*t.candidates <= t.healthy:
		// All candidates count, also those that shrink_only leaves out: the rule compares the members that
		// ask here with the others.
		d.cause = noMajority
	case t.candidates == t.healthy:
		d.cause = allAsked
	case t.joining >= p.JoinTimeout && t.presumed == 0:
		d.cause = joinTimedOut
	default:
		d.cause = awaitingOthers
	}
	return d
}

// eligible returns how many candidates may be in the quorum.
func (d decision) eligible() int {
	if d.shrink {
		return d.tally.previousCandidates
	}
	return d.tally.candidates
}

// String returns the reason in words, the same for the log, the dashboard and the tests.
func (d decision) String() string {
	if d.detail != "" {
		return d.detail
	}
	t := d.tally
	shrink := ""
	if d.shrink {
		shrink = " (shrink_only: of the previous quorum)"
	}
	switch d.cause {
	case noRequest:
		return "no member asks for a quorum"
	case tooFew:
		return fmt.Sprintf("%s asked%s, min_replicas is %d", memberCount(d.eligible()), shrink,
			d.policy.MinReplicas)
	case noMajority:
		return fmt.Sprintf("%d of %s asked, more than half are needed", t.candidates, healthy(t.healthy))
	case awaitingOthers:
		if t.presumed > 0 {
			return fmt.Sprintf("%d of %s asked, still expected back within heartbeat_timeout_ms: %d of the "+
				"last quorum",
				t.candidates, healthy(t.healthy), t.presumed)
		}
		return fmt.Sprintf("%d of %s asked, the others have %s left to join (join_timeout_ms)",
			t.candidates, healthy(t.healthy), (d.policy.JoinTimeout - t.joining).Round(time.Millisecond))
	case fastPath:
		return fmt.Sprintf("every member of the previous quorum asked (%d), %d in the quorum%s",
			t.previous, d.eligible(), shrink)
	case allAsked:
		return fmt.Sprintf("every healthy member asked (%d), %d in the quorum%s", t.healthy, d.eligible(),
			shrink)
	case joinTimedOut:
		return fmt.Sprintf("%d of %s asked before join_timeout_ms passed, %d in the quorum%s",
			t.candidates, healthy(t.healthy), d.eligible(), shrink)
	default:
		return fmt.Sprintf("unknown cause %d", int(d.cause))
	}
}

func memberCount(n int) string {
	if n == 1 {
		return "1 member"
	}
	return fmt.Sprintf("%d members", n)
}

func healthy(n int) string {
	if n == 1 {
		return "1 healthy member"
	}
	return fmt.Sprintf("%d healthy members", n)
}
