package sim

import (
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
)

var (
	seedFlag  = flag.Int64("seed", -1, "play the history of this seed only, and print it")
	linesFlag = flag.Int("lines", 60, "lines of a history that are printed, and of the servers' log")
	slotsFlag = flag.Int("slots", 0, "groups of the job; 0: as the seed says")
	seedsFlag = flag.Int("seeds", 0, "histories of TestTheRulesHold; 0: as many as there is time for")
	tapeFlag  = flag.Int64("tape", -1, "with -run Mistakes/none -v: print the events of all machines in "+
		"the history of this seed, with their actions")
	soakFlag = flag.Duration("soak", 0, "play histories for so long (TestSoak)")
)

func TestMain(m *testing.M) {
	flag.Parse()
	if run := flag.Lookup("test.run"); *seedFlag >= 0 && run.Value.String() == "" {
		if err := run.Value.Set("^TestSeed$"); err != nil { // -seed selects one history
			panic(err)
		}
	}
	slog.SetDefault(slog.New(slog.DiscardHandler)) // a history has the log of its servers
	testmain.Run(m)
}

// budget returns how many histories a test plays: n/3, with FULL=1 ten times n, and few with the race
// detector.
func budget(n int) int {
	switch {
	case testmain.Race():
		return max(1, n/5)
	case testmain.Full():
		return 10 * n
	}
	return max(1, n/3)
}

func TestTheRulesHold(t *testing.T) {
	t.Parallel()
	seeds := *seedsFlag
	if seeds == 0 {
		seeds = budget(60)
	}
	var rounds, faults, heals, elapsed atomic.Int64
	t.Cleanup(func() {
		t.Logf("%d histories: %d quorums, %d faults, %d heals, in %s of their own time", seeds, rounds.Load(),
			faults.Load(), heals.Load(),
			time.Duration(elapsed.Load()).Round(time.Second))
	})
	for seed := range uint64(seeds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			st := hold(t, draw(seed, *slotsFlag))
			rounds.Add(int64(st.rounds))
			faults.Add(int64(st.faults))
			heals.Add(int64(st.heals))
			elapsed.Add(int64(st.elapsed))
		})
	}
}

// TestSeed plays one history: go test ./sim -seed N
func TestSeed(t *testing.T) {
	if *seedFlag < 0 {
		t.Skip("-seed names none")
	}
	t.Log("\n" + hold(t, draw(uint64(*seedFlag), *slotsFlag)).print(*linesFlag))
}

// TestSoak plays histories for -soak, from -seed on, or from a random one.
func TestSoak(t *testing.T) {
	if *soakFlag == 0 {
		t.Skip("-soak says how long")
	}
	first := rand.Uint64() >> 16
	if *seedFlag >= 0 {
		first = uint64(*seedFlag)
	}
	start := time.Now()
	rounds, faults, seed := 0, 0, uint64(0)
	for ; time.Since(start) < *soakFlag; seed++ {
		st := hold(t, draw(first+seed, *slotsFlag))
		rounds, faults = rounds+st.rounds, faults+st.faults
	}
	fmt.Printf("%s: seeds %d to %d, %d quorums, %d faults, no rule broken\n",
		time.Since(start).Round(time.Second), first, first+seed-1, rounds, faults)
}

// A group that claims to know a later quorum, and never shows it, is refused. The others continue without it.
func TestAGroupThatClaimsAQuorumDoesNotStopTheOthers(t *testing.T) {
	t.Parallel()
	for seed := range uint64(budget(6)) {
		s := claims(draw(seed, 4+int(seed%2)))
		require.Equal(t, len(s.faults), hold(t, s).faults)
	}
}

// claims changes a setup: first one group claims quorums that it cannot show and, after it has had the time
// to come back, the next one.
func claims(s setup) setup {
	s.onlyClaims, s.policy.MinReplicas, s.straggle, s.faults = true, 1, 0, nil
	for i := range 2 {
		s.faults = append(s.faults, fault{
			at: time.Duration(10+60*i) * time.Second, kind: claim, slots: 1 << ((int(s.seed) + i) % s.slots),
			lasts: 30 * time.Second,
		})
	}
	return s
}

// Each kind of fault alone, for a long time: the groups that can continue do so, and the others come back
// when it ends.
func TestEachFaultForLong(t *testing.T) {
	t.Parallel()
	for kind := range faultKinds {
		t.Run(faultWords[kind], func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(budget(1)) {
				s := draw(seed, 5)
				s.faults = []fault{{at: 10 * time.Second, kind: kind, slots: 0b00011,
					lasts: s.bound() + 30*time.Second, n: 1}}
				require.Equal(t, 1, hold(t, s).faults)
			}
		})
	}
}

// countLosses returns the setup of a job whose lost steps are counted: no step is replayed, and there are no
// random faults.
func countLosses(seed uint64) setup {
	s := draw(seed, 3+int(seed%3))
	s.replay, s.countLosses, s.straggle, s.faults = false, true, 0, nil
	s.policy.MinReplicas = 1 // otherwise a step with a healing group is lost if there are too few others
	s.policy.StalledAfter, s.policy.EjectStalledAfter = 0, 0
	return s
}

// No group loses more steps by a fault than the table of docs/internals/correctness.md allows for its kind,
// at any moment of a step.
func TestEachFaultCostsAtMostItsSteps(t *testing.T) {
	t.Parallel()
	for kind := range faultKinds {
		t.Run(faultWords[kind], func(t *testing.T) {
			t.Parallel()
			lost := 0
			for seed := range uint64(budget(3)) {
				s := countLosses(seed)
				f := s.drawFault(rand.New(rand.NewPCG(seed, 6)), kind)
				f.at = 10*time.Second + time.Duration(seed)*77*time.Millisecond
				if f.slots != 0 {
					f.slots = 1 << (seed % uint64(s.slots))
				}
				s.faults = []fault{f}
				lost += hold(t, s).lost
			}
			if (&fault{kind: kind}).cost(&setup{timeout: 1, ranks: 1}) == 0 {
				require.Zero(t, lost)
			}
		})
	}
}

// Faults that are far apart cost together no more than the sum of what each of them may cost alone.
func TestFaultsFarApartCostNoMoreThanTheirSum(t *testing.T) {
	t.Parallel()
	lost := 0
	for seed := range uint64(budget(4)) {
		s := countLosses(seed)
		r := rand.New(rand.NewPCG(seed, 7))
		for i := range 8 {
			kind := faultKind(r.IntN(int(drawnKinds)))
			if kind == noise {
				kind = crash
			}
			f := s.drawFault(r, kind)
			f.at, f.slots = time.Duration(1+i)*60*time.Second+f.at, f.slots&-f.slots
			s.faults = append(s.faults, f)
		}
		lost += hold(t, s).lost
	}
	require.NotZero(t, lost)
}

// Groups that reached one step in different quorums have different weights. That needs no eviction: a group
// that asks late, or first in a job, trains in a quorum alone while the others form the next one. Our groups
// compare the quorums of their last commits; for upstream groups, which compare only steps, the lighthouse
// does.
func TestTheGapOfTheUpstreamProtocolIsClosed(t *testing.T) {
	t.Parallel()
	for seed := range uint64(budget(10)) {
		for _, upstream := range []slots{0, ^slots(0)} {
			s := draw(seed, 0)
			apart(&s)
			s.upstream = upstream
			hold(t, s)
		}
	}
}

// apart lets groups of a job form quorums without the others.
func apart(s *setup) {
	s.policy.MinReplicas, s.policy.JoinTimeout, s.initSync = 1, 100*time.Millisecond, false
	s.delay, s.straggle = 2*time.Millisecond, 0
	s.policy.StalledAfter, s.policy.EjectStalledAfter = 0, 0
	s.faults = []fault{{at: 3 * time.Second, kind: cutLighthouse, slots: 1,
		lasts: s.policy.HeartbeatTimeout + 2*time.Second}}
	s.compute = 3 * time.Second
}

// In a job with upstream groups, all groups decide by steps, as the upstream ones do.
func TestAMixedJobKeepsTheRules(t *testing.T) {
	t.Parallel()
	for seed := range uint64(budget(6)) {
		s := draw(seed, 0)
		s.upstream, s.replay = 0b10101, false
		hold(t, s)
	}
}

// The request of a joining group is pending while the others are in a step, which may be longer than
// join_timeout_ms. The first of the others that asks again must not form a quorum with the joining group
// alone. If heals take longer than join_timeout_ms as well, the groups would take turns for the rest of the
// job: one heals, and another one is left out.
func TestGroupsDoNotTakeTurnsToHeal(t *testing.T) {
	t.Parallel()
	for seed := range uint64(budget(6)) {
		s := draw(seed, 3+int(seed%3))
		s.ranks, s.initSync, s.straggle, s.faults = 1, true, 0, nil
		s.policy.MinReplicas, s.policy.JoinTimeout = 1, 60*time.Millisecond
		s.compute, s.heal = 200*time.Millisecond, 2*time.Second
		s.policy.StalledAfter, s.policy.EjectStalledAfter = 0, 0
		require.LessOrEqual(t, hold(t, s).heals, 3*s.slots, "seed %d: %d groups, no fault", seed, s.slots)
	}
}

// Two halves of a job must not take turns to train if join_timeout_ms is shorter than a step.
func TestAJoinTimeoutBelowAStepDoesNotSplitAJob(t *testing.T) {
	t.Parallel()
	for seed := range uint64(budget(6)) {
		s := draw(seed, 0)
		s.policy.MinReplicas, s.policy.JoinTimeout, s.compute = s.slots/2+1, 60*time.Millisecond,
			2*time.Second
		s.delay, s.straggle = 2*time.Millisecond, 0
		s.policy.StalledAfter, s.policy.EjectStalledAfter = 0, 0
		hold(t, s)
	}
}

// A standby takes the place of a group that fails, and the failed one is the standby when it has come back.
func TestStandbysTakeThePlacesOfFailedGroups(t *testing.T) {
	t.Parallel()
	for seed := range uint64(budget(6)) {
		s := onlyFailures(seed)
		s.slots = 3 + int(seed%2)
		s.policy.MaxReplicas = s.slots - 1
		s.onlyFailures = false // a quorum of which a standby is in is another one
		s.drawFaults(6*time.Second, crash, vanish)
		hold(t, s)
	}
}

// onlyFailures draws a job whose groups fail at any moment, one or several at once, and come back.
func onlyFailures(seed uint64) setup {
	s := draw(seed, 2+int(seed%4))
	s.replay, s.onlyFailures, s.straggle = true, true, 0
	s.policy.MinReplicas = 1
	s.policy.StalledAfter, s.policy.EjectStalledAfter = 0, 0
	s.drawFaults(4*time.Second, crash, crash, vanish, leave)
	return s
}

// No step that a live group has computed is lost when groups fail: at any moment, one or several at once, in
// each phase of a replay, and while others join.
func TestAFailureCostsNoStep(t *testing.T) {
	t.Parallel()
	for p, name := range map[phase]string{
		idle: "in a step", agreeing: "while its ranks agree", awaiting: "before the quorum",
		working: "while it connects",
		voting:  "before the decision",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			replays, failures := 0, 0
			for seed := range uint64(max(2, budget(4))) {
				s := onlyFailures(seed)
				s.failIn = p
				st := hold(t, s)
				require.Zero(t, st.notReplayed)
				replays, failures = replays+st.replays, failures+st.failures[p]
			}
			t.Logf("%d replays, %d failures in this phase of a replay", replays, failures)
			require.NotZero(t, replays)
		})
	}
}

// Without replay the same failures cost steps.
func TestWithoutReplayAFailureCostsSteps(t *testing.T) {
	t.Parallel()
	lost := 0
	for seed := range uint64(3) {
		s := onlyFailures(seed)
		s.replay, s.onlyFailures = false, false
		lost += hold(t, s).lost
	}
	require.NotZero(t, lost)
}
