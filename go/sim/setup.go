package sim

import (
	"math/rand/v2"
	"time"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
)

// Setup is all that a run depends on: the same setup gives the same history, to the byte.
type Setup struct {
	Seed   uint64
	Rounds int // quorums until the faults end, all is repaired, and the run with it
	Slots  int // places for groups; a group may fail and another begin in its place, under a new replica_id
	Ranks  int // of each group

	Lighthouses int  // in the list of the groups; 0 is 1
	Disk        bool // they keep their state on disk

	Policy            quorum.Policy
	QuorumTick        time.Duration
	HeartbeatInterval time.Duration
	QuorumTimeout     time.Duration // of a rank's quorum call
	Timeout           time.Duration // of heals, collectives and votes
	Keepalive         time.Duration // until a client notices that its request was lost
	Compute           time.Duration // a step without its waits, on average
	Heal              time.Duration // that a state is on its way
	Slack             time.Duration // that the shells of real servers take on top (go/sim/servers)
	InitSync          bool          // groups begin with weights of their own, and take over one group's at step 0

	Delay     time.Duration // of a message, on average
	Loss      float64       // how many messages do not arrive
	Duplicate float64       // how many arrive twice
	Straggle  float64       // how many take twenty times as long, and are overtaken

	Faults []Fault // in the order of Round

	// Upstream are the slots whose groups say nothing that upstream does not say: not in which quorum
	// they committed, and no numbers of requests. Where there are several lighthouses, they know the first.
	Upstream Slots
	// Calls are those whose groups say all that ours say, and keep no stream: in calls, which may overtake each other.
	Calls Slots

	// Streamless are those that know several lighthouses, and whose streams something on the way answers with UNIMPLEMENTED:
	// they make calls, too, and are to be refused.
	Streamless Slots

	// Replay: groups reduce a step again in which a member failed, but for those that are Upstream.
	Replay bool
	// OnlyFailures: no fault is anything else, and all messages arrive. Then no step is lost that a live group computed.
	OnlyFailures bool
	// OnlyClaims: no fault is anything but Claim, of few groups at a time. Then the others go on.
	OnlyClaims bool
	// CountLosses: no rank loses more steps than the faults up to then may cost. For faults that are far apart.
	CountLosses bool
	// ReplayFailure: in this phase of a replay some groups fail, as long as others live.
	ReplayFailure phase

	mistake mistake
	drawn   int // the slots that Draw was asked for
}

// machine of the lighthouse and of a group, as the simulation knows them.
type (
	lighthouseMachine interface {
		Step(quorum.Event, time.Time) []quorum.Action
		Describe(time.Time) quorum.Status
		Remembers() (replicas, waiters int)
	}
	groupMachine interface {
		Step(round.Event, time.Time) []round.Action
	}
)

// mistake is a hook for tests: it puts something between the simulation and the machines, or makes the model of
// the ranks do something wrong. The zero value makes none.
type mistake struct {
	name          string
	lighthouse    func(*quorum.Machine) lighthouseMachine
	group         func(round.Group, *round.Machine) groupMachine
	policy        func(quorum.Policy) quorum.Policy
	start         func(time.Time) time.Time // of a lighthouse's clock when it begins
	replayBehind  bool                      // a step is reduced again whatever the quorum says
	replaySums    bool                      // what a reduction left is reduced again, not what was kept
	silentIsEnded bool                      // a host that cannot be asked is taken for one that says that the process has ended
	setup         func(*Setup)              // of the histories in which it is looked for
	keepState     bool                      // a group that heals goes to the step and keeps its weights
	long          bool                      // no short history has it
	anySize       bool                      // what the lighthouse remembers is not looked at
}

// Draw makes the setup of a seed: a cluster, its settings, its network, and a fault for every fiftieth round. With
// slots 0 the seed decides on the size, too, from 2 groups to 16, and on whether there are many more faults.
func Draw(seed uint64, slots, rounds int) Setup {
	r := rand.New(rand.NewPCG(seed, 1))
	asked := slots
	every := 38 // rounds for a fault; the rounds at the end, in which all is repaired, have none
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
		s.Compute *= 6 // some meet at equal steps after they were apart, because steps take longer than outages
	}
	if r.IntN(2) == 0 {
		s.Loss, s.Duplicate, s.Straggle = 2e-4, 1e-3, 2e-3
	}
	s.Lighthouses, s.Disk = 1, r.IntN(2) == 0
	if r.IntN(3) == 0 {
		s.Lighthouses = 2 + r.IntN(maxLighthouses-1)
	}
	if s.Lighthouses == 1 && r.IntN(5) == 0 {
		s.Calls = Slots(r.Uint64())
	}
	if n := mix(seed, 7); s.Lighthouses > 1 && n%3 == 0 { // enough are left
		s.Streamless = Slots(n>>8) << s.Policy.MinReplicas
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

// bound is how long after the last fault every group that lives must have committed a step. A rank may hold a
// request of before for QuorumTimeout, and then be one of two that wait for each other's Timeout; the fallout of
// that costs each such wait once more.
func (s Setup) bound() time.Duration {
	bound := s.Policy.HeartbeatTimeout + s.Policy.JoinTimeout + 3*(s.QuorumTimeout+s.Timeout+3*s.Compute+s.Heal) + time.Second + s.Slack
	if s.Lighthouses > 1 {
		// Those who were sent on stay away from a lighthouse for up to 16 heartbeat timeouts.
		bound += 24 * s.Policy.HeartbeatTimeout
	}
	return bound
}
