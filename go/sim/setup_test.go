package sim

import (
	"math/rand/v2"
	"time"

	"github.com/torchft/torchft/go/quorum"
)

// setup has what a seed determines: the job, the network, the faults with their times. It does not determine
// the order in which goroutines run.
type setup struct {
	seed uint64
	// places for groups; when a group fails, another one may start in its place, with a new replica_id
	slots int
	ranks int // of each group
	// faults begin within this time; the history ends when the job has settled after the last one
	length time.Duration

	disk          bool // the lighthouse keeps its state on disk
	policy        quorum.Policy
	tick          time.Duration // quorum_tick_ms
	quorumTimeout time.Duration // of a rank's quorum call
	timeout       time.Duration // of heals, collectives and votes
	compute       time.Duration // average duration of a step, without its waits
	heal          time.Duration // duration of a transfer of the state
	// longest time that a group takes from its start to its first request, such as to load a model
	load     time.Duration
	initSync bool // groups begin with different weights, and take over one group's at step 0

	delay    time.Duration // average delay of a message
	straggle float64       // fraction of the messages that take twenty times as long

	faults []fault // in the order of their times

	upstream     slots // the slots with groups of upstream: unary calls, with the fields that upstream sends
	replay       bool  // groups replay a step in which a member failed
	onlyFailures bool  // all faults are failures of groups: no step that a live group has computed is lost
	onlyClaims   bool  // all faults are claims: the other groups continue
	// no rank loses more steps than the faults so far may cost (fault.cost); for faults that are far apart
	countLosses bool
	failIn      phase  // some groups fail in this phase of a replay; idle: none
	mistake     string // a planted mistake in the model of the ranks
}

// draw returns the setup of a seed. If n is 0, the seed also determines the number of groups. The times fit
// the constants of the servers.
func draw(seed uint64, n int) setup {
	r := rand.New(rand.NewPCG(seed, 1))
	if n == 0 {
		n = 2 + r.IntN(4)
	}
	between := func(least, most time.Duration) time.Duration {
		return least + time.Duration(r.Int64N(int64(most-least)+1))
	}
	s := setup{
		seed:   seed,
		slots:  n,
		ranks:  1,
		length: 50 * time.Second,
		policy: quorum.Policy{
			MinReplicas:      1 + r.IntN(n/2+1),
			JoinTimeout:      between(2*time.Second, 4*time.Second),
			HeartbeatTimeout: between(2*time.Second, 5*time.Second),
			SuspectGrace:     200 * time.Millisecond,
		},
		tick:          100 * time.Millisecond,
		quorumTimeout: between(20*time.Second, 40*time.Second),
		compute:       between(200*time.Millisecond, 600*time.Millisecond),
		heal:          between(0, time.Second),
		delay:         between(200*time.Microsecond, 10*time.Millisecond),
		disk:          r.IntN(2) == 0,
		initSync:      r.IntN(2) == 0,
		replay:        r.IntN(2) == 0,
	}
	s.timeout = s.policy.HeartbeatTimeout + between(3*time.Second, 8*time.Second)
	if r.IntN(4) == 0 {
		s.ranks = 2
	}
	if r.IntN(4) == 0 {
		s.straggle = 2e-3
	}
	if r.IntN(4) == 0 {
		s.policy.StalledAfter = between(8*s.compute, 16*s.compute)
		s.policy.EjectStalledAfter = s.policy.StalledAfter + between(0, s.timeout)
	}
	if r.IntN(4) == 0 {
		s.load = between(time.Second, 10*time.Second)
	}
	switch seed % 6 {
	case 0:
		s.drawFaults(6*time.Second, crash) // any number of processes at once
	case 2, 5:
		s.drawFaults(6*time.Second, killLighthouse, vanishLighthouse, cutLighthouse, cutLighthouse,
			cutLighthouse, cutUp, cutDown, vanish)
	default:
		s.drawFaults(2500 * time.Millisecond)
	}
	return s
}

// bound returns the time after the last fault within which every live group must commit a step. An earlier
// request may be pending for quorumTimeout, then two ranks may wait for each other for timeout, and as a
// consequence each of these waits may happen once more. A silent connection is closed after 20 s.
func (s *setup) bound() time.Duration {
	return s.policy.HeartbeatTimeout + s.policy.JoinTimeout +
		3*(s.quorumTimeout+s.timeout+3*s.compute+s.heal+s.load) + 41*time.Second
}

// replays reports whether the group of a slot announces that it replays failed steps.
func (s *setup) replays(slot int) bool { return s.replay && !s.upstream.has(slot) }

// mix hashes two numbers to one.
func mix(a, b uint64) uint64 {
	a ^= b + 0x9e3779b97f4a7c15 + a<<6 + a>>2
	a *= 0xbf58476d1ce4e5b9
	a ^= a >> 29
	a *= 0x94d049bb133111eb
	return a ^ a>>32
}
