package sim

import (
	"math/rand/v2"
	"time"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
)

// Setup has everything that a run depends on: the same setup gives the same history, byte for byte.
type Setup struct {
	Seed   uint64
	Rounds int // quorums with faults; then all faults end, and the run ends after the time in which the job must recover (bound)
	Slots  int // places for groups; when a group fails, another one may start in its place, with a new replica_id
	Ranks  int // of each group

	Disk    bool // the lighthouse keeps its state on disk
	Cluster bool // each start of the lighthouse is that of the next leader of a cluster, with the state in the log and the next term

	Policy            quorum.Policy
	QuorumTick        time.Duration
	HeartbeatInterval time.Duration
	QuorumTimeout     time.Duration // of a rank's quorum call
	Timeout           time.Duration // of heals, collectives and votes
	Keepalive         time.Duration // time until a client notices that its request was lost
	Compute           time.Duration // average duration of a step, without its waits
	Heal              time.Duration // duration of a transfer of the state
	Slack             time.Duration // additional time that real servers take (go/sim/servers)
	InitSync          bool          // groups begin with different weights, and take over one group's at step 0

	Delay     time.Duration // average delay of a message
	Loss      float64       // fraction of the messages that are lost
	Duplicate float64       // fraction that arrives twice
	Straggle  float64       // fraction that takes twenty times as long, and is overtaken by others

	Faults []Fault // in the order of Round

	// Upstream are the slots whose groups send only the fields of upstream managers, without the quorum in which they committed and
	// without request numbers.
	Upstream Slots
	// Calls are the slots whose groups send all fields of our managers, but by calls instead of on a stream. Calls may overtake
	// each other.
	Calls Slots

	// Replay: groups that are not Upstream replay a step in which a member failed.
	Replay bool
	// OnlyFailures: all faults are failures of groups, and all messages arrive. Then no step that a live group has computed is
	// lost.
	OnlyFailures bool
	// OnlyClaims: all faults are Claim, of few groups at a time. Then the other groups continue.
	OnlyClaims bool
	// CountLosses: the checker also checks that no rank loses more steps than the faults so far may cost (Fault.cost). For faults
	// that are far apart.
	CountLosses bool
	// ReplayFailure: some groups fail in this phase of a replay, unless they are the only remaining one.
	ReplayFailure phase

	mistake mistake
	drawn   int // the argument `slots` of Draw
}

// The machines of a lighthouse and of a group, as the simulation uses them.
type (
	lighthouseMachine interface {
		Step(quorum.Event, time.Time) []quorum.Action
		Remembers() (members, waiters int)
	}
	groupMachine interface {
		Step(round.Event, time.Time) []round.Action
	}
)

// mistake is a hook for tests: it wraps the machines, or makes the model of the ranks do something wrong, which the rules must
// find. The zero value changes nothing.
type mistake struct {
	name         string
	lighthouse   func(*quorum.Machine) lighthouseMachine
	group        func(round.Group, *round.Machine) groupMachine
	policy       func(quorum.Policy) quorum.Policy
	start        func(time.Time) time.Time // changes the time at which a lighthouse's clock begins
	replayBehind bool                      // a step is replayed although the quorum does not allow it
	replaySums   bool                      // a replay reduces the result of the failed reduction instead of the kept gradients
	setup        func(*Setup)              // changes the setups of the histories in which the rules must find the mistake
	keepState    bool                      // a healing group takes over the step but keeps its weights
	long         bool                      // only long histories show it
	anySize      bool                      // the rule about the lighthouse's memory is not checked
}

// Draw returns the setup of a seed: a cluster, its settings, its network, and a fault for every fiftieth round. If slots is 0, the
// seed also determines the size, from 2 to 16 groups, and whether there are many more faults.
func Draw(seed uint64, slots, rounds int) Setup {
	r := rand.New(rand.NewPCG(seed, 1))
	asked := slots
	every := 38 // rounds per fault; less than 50, since the last rounds have none
	if size := r.IntN(24); slots == 0 {
		slots = 16
		if size < 18 {
			slots = 2 + size%6
		}
		if r.IntN(4) == 0 {
			every = 6
		}
	}
	between := func(least, most time.Duration) time.Duration {
		return least + time.Duration(r.Int64N(int64(most-least)+1))
	}
	s := Setup{
		drawn:  asked,
		Seed:   seed,
		Rounds: rounds,
		Slots:  slots,
		Ranks:  1,
		Policy: quorum.Policy{
			MinReplicas:      1 + r.IntN(slots/2+1),
			JoinTimeout:      between(50*time.Millisecond, 400*time.Millisecond),
			HeartbeatTimeout: between(300*time.Millisecond, 800*time.Millisecond),
			SuspectGrace:     between(10*time.Millisecond, 100*time.Millisecond),
		},
		QuorumTick:        between(20*time.Millisecond, 100*time.Millisecond),
		HeartbeatInterval: 100 * time.Millisecond,
		QuorumTimeout:     between(1200*time.Millisecond, 2500*time.Millisecond),
		Timeout:           between(500*time.Millisecond, 1200*time.Millisecond),
		Keepalive:         between(100*time.Millisecond, 400*time.Millisecond),
		Compute:           between(10*time.Millisecond, 50*time.Millisecond),
		InitSync:          r.IntN(2) == 0,
		Replay:            mix(seed, 3)%2 == 0,
		Delay:             between(200*time.Microsecond, 2*time.Millisecond),
	}
	if r.IntN(4) == 0 {
		s.Ranks = 2
	}
	if r.IntN(5) == 0 {
		s.Compute *= 6 // steps take longer than outages: separated groups may meet again at equal steps
	}
	if r.IntN(2) == 0 {
		s.Loss, s.Duplicate, s.Straggle = 2e-4, 1e-3, 2e-3
	}
	s.Disk, s.Cluster = r.IntN(2) == 0, r.IntN(3) == 0
	if r.IntN(5) == 0 {
		s.Calls = Slots(r.Uint64())
	}
	if r.IntN(2) == 0 {
		s.Policy.StalledAfter = between(4*s.Compute, 8*s.Compute)
		if r.IntN(2) == 0 {
			s.Policy.EjectStalledAfter = s.Policy.StalledAfter + between(0, s.Timeout)
		}
	}
	s.Faults = drawFaults(r, s, every)
	return s
}

// bound returns the time after the last fault within which every live group must commit a step. An earlier request may be pending
// for QuorumTimeout, then two ranks may wait for each other for Timeout, and as a consequence each of these waits may happen once
// more.
func (s Setup) bound() time.Duration {
	return s.Policy.HeartbeatTimeout + s.Policy.JoinTimeout + 3*(s.QuorumTimeout+s.Timeout+3*s.Compute+s.Heal) + time.Second + s.Slack
}
