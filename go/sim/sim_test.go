package sim

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
)

var (
	seedFlag   = flag.Int64("seed", -1, "replay the history of this seed, and print it, shrunk, if a rule is broken")
	linesFlag  = flag.Int("lines", 0, "with -seed: print so many of the last lines of the history")
	slotsFlag  = flag.Int("slots", 0, "groups of the cluster; 0: as the seed says")
	roundsFlag = flag.Int("rounds", 1000, "quorums of one history")
	soakFlag   = flag.Duration("soak", 0, "simulate for so long (TestSoak)")
)

// budget returns how many histories a test plays: n with FULL=1, otherwise a sixth of n, but at least underRace; with the race
// detector, which makes them ten times as slow, underRace.
func budget(n, underRace int) int {
	if testmain.Race() {
		return underRace
	}
	if testmain.Full() {
		return n
	}
	return max(n/6, underRace)
}

// shrinkTries bounds the runs that shorten the history of a planted mistake. Only with FULL=1 it has to become as short as possible.
func shrinkTries() int {
	if testmain.Full() && !testmain.Race() {
		return 400
	}
	return 6
}

// hold runs the history of a setup and fails the test if a rule does not hold in it.
func hold(t *testing.T, s Setup) Result {
	t.Helper()
	r := Run(s, nil)
	if b := r.Broken; b != nil {
		small := Shrink(s, b.Rule, 2000)
		t.Fatalf("%v\nreplay it: go test ./sim -seed %d -slots %d -rounds %d\nshrunk:\n%s",
			b, s.Seed, s.drawn, s.Rounds, History(small, 100))
	}
	return r
}

func TestTheRulesHold(t *testing.T) {
	t.Parallel()
	var rounds, faults, heals int
	for seed := range uint64(budget(150, 15)) {
		r := hold(t, Draw(seed, *slotsFlag, *roundsFlag))
		rounds, faults, heals = rounds+r.Rounds, faults+r.FaultsHit, heals+int(r.Heals)
	}
	t.Logf("%d quorums, %d faults, %d heals", rounds, faults, heals)
}

// A group that claims to know a later quorum, and never shows it, is refused. The others continue without it.
func TestAGroupThatClaimsAQuorumDoesNotStopTheOthers(t *testing.T) {
	t.Parallel()
	for seed := range uint64(budget(60, 2)) {
		s := Draw(seed, 0, 150)
		claims(&s)
		r := hold(t, s)
		require.Equal(t, len(s.Faults), r.FaultsHit)
	}
}

// TestSeed replays one history: go test ./sim -seed N
func TestSeed(t *testing.T) {
	if *seedFlag < 0 {
		t.Skip("-seed names none")
	}
	s := Draw(uint64(*seedFlag), *slotsFlag, *roundsFlag)
	if *linesFlag > 0 {
		t.Log("\n" + History(s, *linesFlag))
	}
	r := hold(t, s)
	t.Logf("%d quorums, %d faults, %d heals, hash %016x", r.Rounds, r.FaultsHit, r.Heals, r.Hash)
}

func TestASeedRepeatsItsHistoryToTheByte(t *testing.T) {
	t.Parallel()
	for seed := range uint64(budget(6, 2)) {
		s := Draw(seed, 0, 300)
		first, text := Run(s, nil), History(s, 1<<20)
		require.Equal(t, first, Run(s, nil))
		require.Equal(t, text, History(s, 1<<20))
		other := Draw(seed+1000, s.Slots, 300)
		require.NotEqual(t, Run(s, nil).Hash, Run(other, nil).Hash)
	}
}

// Each kind of fault alone, for a long time: the groups that can continue do so, and the others come back when it ends.
func TestEachFaultForLong(t *testing.T) {
	t.Parallel()
	for kind := range faultKinds {
		t.Run(faultWords[kind], func(t *testing.T) {
			for seed := range uint64(budget(3, 1)) {
				s := Draw(seed, 5, 120)
				s.Faults = []Fault{{Round: 20, Kind: kind, Slots: 0b00011, For: 2 * s.bound(), N: 1}}
				s.Rounds = 2000 // more rounds than the other groups have while the fault lasts
				if kind.ofLighthouse() {
					s.Faults[0].Slots = 0
				}
				r := hold(t, s)
				require.Equal(t, 1, r.FaultsHit)
			}
		})
	}
}

// The upstream protocol compares steps only. Groups that reached the same step in different quorums then continue together with
// different weights, unnoticed. That needs no fault: a group that asks late, or first in a job, trains in a quorum alone while the
// others form the next one.
func TestTheGapOfTheUpstreamProtocolIsClosed(t *testing.T) {
	t.Parallel()
	apart := func(s *Setup) {
		s.Policy.MinReplicas = 1
		s.Compute = 300 * time.Millisecond
		s.Policy.JoinTimeout = min(s.Policy.JoinTimeout, 250*time.Millisecond)
		s.Policy.StalledAfter, s.Policy.EjectStalledAfter = 0, 0
	}
	upstream, first := hunt(t, 200, 60, 200, func(s *Setup) { apart(s); s.Upstream = ^Slots(0) })
	require.NotNil(t, first, "the gap of the upstream protocol was not found")
	require.Equal(t, ruleEqual, first.Rule)
	require.Empty(t, upstream.Faults)
	t.Logf("as upstream does:\n%s", History(upstream, 60))

	upstream.Upstream = 0
	require.Nil(t, Run(upstream, nil).Broken)
	for seed := range uint64(budget(200, 20)) {
		s := Draw(seed, 0, 60)
		apart(&s)
		hold(t, s)
	}
}

// The request of a joining group is pending while the others are in a step, which may be longer than join_timeout_ms. The first of the
// others that asks again must not form a quorum with the joining group alone. If heals take longer than join_timeout_ms as well, the
// groups would take turns for the rest of the job: one heals, and another one is left out.
func TestGroupsDoNotTakeTurnsToHeal(t *testing.T) {
	t.Parallel()
	for seed := range uint64(budget(60, 6)) {
		s := Draw(seed, 3+int(seed%4), 300)
		s.Faults, s.Loss, s.Duplicate, s.Straggle = nil, 0, 0, 0
		s.Ranks, s.Calls, s.InitSync = 1, 0, true
		s.Policy.MinReplicas, s.Policy.JoinTimeout = 1, 60*time.Millisecond
		s.Compute, s.Heal = 10*time.Millisecond, 300*time.Millisecond
		s.Policy.StalledAfter, s.Policy.EjectStalledAfter = 0, 0 // a healing group must not count as stalled
		r := hold(t, s)
		require.LessOrEqual(t, r.Heals, uint64(3*s.Slots), "seed %d: %d groups, no fault", seed, s.Slots)
	}
}

// Two halves of a job must not take turns to train if join_timeout_ms is shorter than a step. By an earlier rule, the waiting half
// and the first of the others that asked again were more than half of the healthy groups. Each quorum then aborted the step of the
// previous one, and some groups never committed.
func TestAJoinTimeoutBelowAStepDoesNotSplitAJob(t *testing.T) {
	t.Parallel()
	for seed := range uint64(budget(300, 10)) {
		s := Draw(seed, 0, 200)
		s.Policy.MinReplicas, s.Policy.JoinTimeout = s.Slots/2+1, 60*time.Millisecond
		s.Compute = 200 * time.Millisecond
		s.Policy.StalledAfter, s.Policy.EjectStalledAfter = 0, 0
		hold(t, s)
	}
}

// In a job with upstream groups, all groups decide by steps, as the upstream ones do. Different weights at one step may remain
// undetected, but all groups agree on the participants.
func TestAMixedJobAgreesOnTheParticipants(t *testing.T) {
	t.Parallel()
	missed := 0
	for seed := range uint64(budget(60, 6)) {
		s := Draw(seed, 0, 300)
		s.Upstream = 0b1010101010101010
		s.Duplicate = 0 // upstream requests have no numbers that would show that one is late
		s.Faults = slices.DeleteFunc(s.Faults, func(f Fault) bool { return f.Kind == Noise })
		if b := Run(s, nil).Broken; b != nil {
			require.Equal(t, ruleEqual, b.Rule, "seed %d: %v", seed, b)
			missed++
		}
	}
	t.Logf("the gap of the upstream protocol was hit in %d histories", missed)
}

// A lighthouse without a disk whose clock is behind after a restart may repeat ids if only new members ask: they do not know the
// earlier ids. As soon as an earlier member asks, new ids are above all used ones.
func TestWithoutADiskAClockThatIsBehindRepeatsIDs(t *testing.T) {
	_, first := hunt(t, 200, 400, 0, func(s *Setup) {
		s.mistake.start = func(time.Time) time.Time { return epoch }
	})
	require.NotNil(t, first)
	require.Contains(t, []string{ruleIDs, ruleOneSet}, first.Rule)
}

// TestSoak simulates for -soak, from a random seed on.
func TestSoak(t *testing.T) {
	if *soakFlag == 0 {
		t.Skip("-soak says how long")
	}
	first := rand.Uint64() >> 16
	if *seedFlag >= 0 {
		first = uint64(*seedFlag)
	}
	start, reportedAt := time.Now(), time.Now()
	var rounds, faults int
	var heals, seed uint64
	report := func() {
		fmt.Printf("%s: seeds %d to %d, %d quorums (%.0f a second), %d faults, %d heals, no rule broken\n",
			time.Since(start).Round(time.Second), first, first+seed, rounds, float64(rounds)/time.Since(start).Seconds(), faults, heals)
	}
	for ; time.Since(start) < *soakFlag; seed++ {
		r := hold(t, Draw(first+seed, *slotsFlag, *roundsFlag))
		rounds, faults, heals = rounds+r.Rounds, faults+r.FaultsHit, heals+r.Heals
		if time.Since(reportedAt) > 10*time.Second {
			reportedAt = time.Now()
			report()
		}
	}
	report()
}

// BenchmarkRounds measures a round of 16 groups, including all checks, with a fault in every fiftieth round:
//
//	go test ./sim -run - -bench Rounds -benchtime 1000000x -timeout 0
func BenchmarkRounds(b *testing.B) {
	b.ReportAllocs()
	done, faults := 0, 0
	for seed := uint64(0); done < b.N; seed++ {
		r := Run(Draw(seed, 16, 1000), nil)
		if r.Broken != nil {
			b.Fatal(seed, r.Broken)
		}
		done += r.Rounds
		faults += r.FaultsHit
	}
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(done), "us/round")
	b.ReportMetric(float64(done)/float64(faults), "rounds/fault")
}
