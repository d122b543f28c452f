package sim

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"time"
)

// slots is a set of slots, with one bit for each.
type slots uint64

func (s slots) has(i int) bool { return s>>i&1 == 1 }

func (s slots) String() string {
	var names []string
	for i := range 64 {
		if s.has(i) {
			names = append(names, machineOf(i))
		}
	}
	return strings.Join(names, " ")
}

// faultKind is the kind of a fault.
type faultKind int

const (
	crash     faultKind = iota // processes of groups are killed; their hosts close the connections
	vanish                     // hosts of groups vanish, without a sign to the others
	rankFails                  // rank n of groups ends, and then its group
	leave                      // groups shut down properly
	// the lighthouse is killed, and started again, with its state if that is on disk
	killLighthouse
	vanishLighthouse // the host of the lighthouse vanishes
	partition        // groups are cut off from the lighthouse and from all other groups
	cutLighthouse    // groups are cut off from the lighthouse only
	// messages of groups do not reach the lighthouse until the fault is over
	cutUp
	cutDown         // messages of the lighthouse do not reach groups
	cutPeers        // groups are cut off from the other groups, not from the lighthouse
	cutPeersOneWay  // messages of groups do not reach the other groups
	pause           // groups are stopped: SIGSTOP, or a snapshot of a virtual machine
	pauseLighthouse // the lighthouse is stopped, as seen from outside
	slow            // groups compute and answer slowly
	noise           // connections break, again and again
	// the next collective of groups fails at its end, when peers may have finished
	flaky
	loseVote // the next decision does not reach the last rank of groups
	// the connection of the last rank of groups to its manager server breaks
	dropRank
	shrinkOnly // groups set shrink_only for n steps
	// groups do not reach their collective, while their manager servers are alive
	stall
	accuse // groups falsely report a failed collective with a healthy peer
	drain  // an operator requests that groups leave
	signal // rank n of groups is asked to leave, as by SIGTERM
	finish // the training of all groups is complete; another one begins
	claim  // groups falsely claim to know a later quorum, and show none

	faultKinds
	drawnKinds = claim // kinds from here on are not drawn: a test requests them
)

var faultWords = [faultKinds]string{
	"crash", "vanish", "a rank fails", "leave", "the lighthouse is killed",
	"the host of the lighthouse vanishes",
	"partition", "cut from the lighthouse", "cut towards the lighthouse",
	"cut on the way back from the lighthouse",
	"cut from peers", "cut towards peers", "pause", "the lighthouse pauses", "slow", "noise",
	"the next collective fails",
	"the decision is lost", "a connection of a rank breaks", "shrink_only", "stall", "accuse a peer", "drain",
	"a rank is asked to leave", "the training ends", "claim a quorum",
}

// fault is one fault. It begins at a time of the history, and affects the groups in slots.
type fault struct {
	at    time.Duration
	kind  faultKind
	slots slots
	lasts time.Duration
	n     int64
}

func (f fault) String() string {
	s := fmt.Sprintf("at %s: %s", f.at.Round(time.Millisecond), faultWords[f.kind])
	if f.slots != 0 {
		s += " (" + f.slots.String() + ")"
	}
	if f.lasts > 0 {
		s += fmt.Sprintf(" for %s", f.lasts.Round(time.Millisecond))
	}
	if f.n != 0 {
		s += fmt.Sprintf(" [%d]", f.n)
	}
	return s
}

// drawFaults draws a schedule: on average one fault in each interval, some of them in bursts. If kinds are
// given, only of these.
func (s *setup) drawFaults(interval time.Duration, kinds ...faultKind) {
	r := rand.New(rand.NewPCG(s.seed, 4))
	s.faults = nil
	for at := 5 * time.Second; ; {
		burst := 1
		if r.IntN(3) == 0 {
			burst = 2 + r.IntN(3)
		}
		at += time.Duration(r.Int64N(int64(2*interval) * int64(burst)))
		if at > s.length {
			return
		}
		for range burst {
			kind := faultKind(r.IntN(int(drawnKinds)))
			if kind == finish && r.IntN(4) > 0 { // it stops all groups
				kind = leave
			}
			if len(kinds) > 0 {
				kind = kinds[r.IntN(len(kinds))]
			}
			f := s.drawFault(r, kind)
			f.at = at
			at += time.Duration(r.Int64N(int64(4 * s.compute)))
			s.faults = append(s.faults, f)
		}
	}
}

func (s *setup) drawFault(r *rand.Rand, kind faultKind) fault {
	f := fault{kind: kind, lasts: time.Duration(r.Int64N(int64(s.timeout))), slots: 1 << r.IntN(s.slots)}
	if r.IntN(8) == 0 {
		f.slots = slots(1 + r.IntN(1<<s.slots-1)) // many at once
	}
	if r.IntN(4) == 0 {
		f.lasts += s.policy.HeartbeatTimeout + s.policy.JoinTimeout
	}
	switch kind {
	case killLighthouse, vanishLighthouse, pauseLighthouse, noise, finish:
		f.slots = 0
	case rankFails, signal:
		f.n = r.Int64N(int64(s.ranks))
	case shrinkOnly:
		f.n = int64(1 + r.IntN(5))
	}
	switch kind {
	case flaky, loseVote, dropRank, shrinkOnly, accuse, drain, signal:
		f.lasts = 0
	}
	return f
}

// cost returns how many steps a fault may cost each rank, in the affected groups and in the others:
// docs/internals/correctness.md has the table. Some faults cost steps repeatedly while they last.
func (f *fault) cost(s *setup) int {
	switch f.kind {
	case pauseLighthouse, shrinkOnly, accuse, drain, signal:
		return 0
	case crash, rankFails, leave, finish:
		// the step whose data a peer was still receiving, and the next one, whose quorum already included the
		// failed group
		return 2
	case cutPeers, cutPeersOneWay, slow:
		return 2 + int(f.lasts/s.timeout)
	case flaky:
		return s.ranks
	case noise:
		return math.MaxInt32 // each broken connection is a fault
	default:
		return 1
	}
}

// rough reports whether the rules with a time limit are suspended while the fault lasts. A group that stays
// slow makes the others lose each step if it computes for longer than they wait.
func (f *fault) rough() bool {
	switch f.kind {
	case pause, pauseLighthouse, slow, noise, stall, claim:
		return f.lasts > 0
	}
	return false
}

// ofNetwork reports whether the fault changes which messages arrive, or how fast.
func (f *fault) ofNetwork() bool {
	return f.kind >= partition && f.kind <= cutPeersOneWay || f.kind == slow
}

// unclear reports whether a group that lives may count as failed at the lighthouse because of the fault:
// rules about who is healthy are not checked meanwhile, and for a while afterwards.
func (f *fault) unclear() bool {
	switch f.kind {
	case rankFails, pause, pauseLighthouse, noise, dropRank:
		return true
	}
	return f.ofNetwork() && f.kind != slow
}
