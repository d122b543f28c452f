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

// budget is n in full, else a sixth of it, and less where everything is ten times as slow.
func budget(n, underRace int) int {
	if testmain.Race() {
		return underRace
	}
	if testmain.Full() {
		return n
	}
	return max(n/6, underRace)
}

// shrinkTries are the runs that may make a planted mistake's history shorter: only in full it must get as short as it can.
func shrinkTries() int {
	if testmain.Full() && !testmain.Race() {
		return 400
	}
	return 6
}

// hold runs the history of a seed and fails the test if a rule does not hold in it.
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

// A list of lighthouses, and many cuts of groups from some of them. In a third some groups have no streams.
func TestSeveralLighthousesNeverTearAJobApart(t *testing.T) {
	t.Parallel()
	for seed := range uint64(budget(60, 6)) {
		s := Draw(1000+seed, 0, 300)
		several(&s)
		s.Lighthouses = 2 + int(seed%2)
		if seed%3 == 0 {
			s.Streamless = 0b110
		}
		r := hold(t, s)
		require.Positive(t, r.FaultsHit)
	}
}

// Groups of two lighthouses that go from one to the other and back, and end meanwhile. In one of the histories an operator waived
// those that had ended, while the one that had not went on at the other lighthouse.
func TestARestlessJobHasOneBranch(t *testing.T) {
	t.Parallel()
	for seed := range uint64(budget(8, 1)) {
		s := Draw(353+seed, 0, 200)
		restless(&s)
		hold(t, s)
	}
	s := Draw(360, 2, 200)
	restless(&s)
	hold(t, s)
	for seed := range uint64(budget(45, 2)) { // more groups
		s := Draw(5000+seed, 0, 200)
		restless(&s)
		hold(t, s)
	}
}

// A group that says it knows of a later quorum, and never shows it, is refused by name. The others go on without it.
func TestAGroupThatClaimsAQuorumStopsNobody(t *testing.T) {
	t.Parallel()
	for seed := range uint64(budget(60, 2)) {
		s := Draw(seed, 0, 150)
		claims(&s)
		r := hold(t, s)
		require.Equal(t, len(s.Faults), r.FaultsHit)
	}
}

// Histories in which each member once returned to the first lighthouse when it liked: some were refused there and stayed
// away from it for a while, so that they never went at the same time again, and each part was too small.
func TestMembersGoBackTogether(t *testing.T) {
	s := Draw(1275, 6, 60)
	s.Lighthouses, s.Ranks, s.Policy.MinReplicas = 2, 1, 1
	s.Loss, s.Duplicate, s.Straggle = 0, 0, 0
	s.Faults = []Fault{
		{Round: 10, Kind: CutLighthouse, Slots: 0b101001, For: 2 * time.Second, Of: 1},
		{Round: 20, Kind: KillLighthouse, For: time.Second, Of: 1},
	}
	require.Equal(t, 2, hold(t, s).FaultsHit)
	hold(t, Draw(345, 16, 1000))
}

// Histories that broke a rule for other reasons: docs/correctness.md, "Found mistakes".
func TestHistoriesThatOnceBrokeARule(t *testing.T) {
	t.Parallel()
	hold(t, Draw(382, 16, 1000))  // what a member reached was forgotten when it was silent for long
	hold(t, Draw(432, 16, 1000))  // the checker's own: a lighthouse forgot a group, and its clock was set back
	hold(t, Draw(11930, 0, 1000)) // the only one that knew of a quorum failed
	for _, seed := range []uint64{4399, 5231} {
		s := Draw(seed, 0, 300) // a member did not hear of a new term
		several(&s)
		s.Lighthouses = 3
		hold(t, s)
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

// Each kind of fault alone, for a long time: whoever can go on does, and the rest returns.
func TestEachFaultForLong(t *testing.T) {
	t.Parallel()
	for kind := range faultKinds {
		t.Run(faultWords[kind], func(t *testing.T) {
			for seed := range uint64(budget(3, 1)) {
				s := Draw(seed, 5, 120)
				s.Faults = []Fault{{Round: 20, Kind: kind, Slots: 0b00011, For: 2 * s.bound(), N: 1}}
				s.Rounds = 2000 // more than the others have while it lasts
				if kind.ofLighthouse() {
					s.Faults[0].Slots = 0
				}
				r := hold(t, s)
				require.Equal(t, 1, r.FaultsHit)
			}
		})
	}
}

// The upstream protocol compares steps and nothing else. Groups that reached one step apart from each other then go
// on together with different weights, and nobody notices. Not even a fault is needed: a group that is slow to ask, or
// the first of a job to ask, trains in a quorum of its own while the others form the next one.
func TestTheGapOfTheUpstreamProtocolIsClosed(t *testing.T) {
	t.Parallel()
	apart := func(s *Setup) {
		s.Policy.MinReplicas = 1
		s.Compute = 300 * time.Millisecond
		s.Policy.JoinTimeout = min(s.Policy.JoinTimeout, 250*time.Millisecond)
		s.Policy.StalledAfter, s.Policy.EjectStalledAfter = 0, 0
	}
	upstream, first := hunt(t, 200, 60, 200, func(s *Setup) { apart(s); s.Lighthouses, s.Upstream = 1, ^Slots(0) })
	require.NotNil(t, first, "the upstream protocol has no gap any more?")
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

// A group that joins waits for as long as the others are in a step, and so for longer than join_timeout_ms. The first of
// them that asks again must not go on with the newcomer alone: where a heal takes longer than join_timeout_ms too, they
// would take turns, each of them healing while another one is left out, for as long as the job lasts.
func TestGroupsDoNotTakeTurnsToHeal(t *testing.T) {
	t.Parallel()
	for seed := range uint64(budget(60, 6)) {
		s := Draw(seed, 3+int(seed%4), 300)
		s.Faults, s.Loss, s.Duplicate, s.Straggle = nil, 0, 0, 0
		s.Lighthouses, s.Ranks, s.Calls, s.InitSync = 1, 1, 0, true
		s.Policy.MinReplicas, s.Policy.JoinTimeout = 1, 60*time.Millisecond
		s.Compute, s.Heal = 10*time.Millisecond, 300*time.Millisecond
		s.Policy.StalledAfter, s.Policy.EjectStalledAfter = 0, 0 // a heal is no stall
		r := hold(t, s)
		require.LessOrEqual(t, r.Heals, uint64(3*s.Slots), "seed %d: %d groups, no fault", seed, s.Slots)
	}
}

// Nor do halves of a job take turns to train where join_timeout_ms is shorter than a step: those who waited for the others
// once were more than half of the healthy with the first of them that asked again. Each quorum then broke the one before,
// and some groups never committed.
func TestAJoinTimeoutBelowAStepDoesNotSplitAJob(t *testing.T) {
	t.Parallel()
	for seed := range uint64(budget(300, 10)) {
		s := Draw(seed, 0, 200)
		s.Lighthouses = 1
		s.Policy.MinReplicas, s.Policy.JoinTimeout = s.Slots/2+1, 60*time.Millisecond
		s.Compute = 200 * time.Millisecond
		s.Policy.StalledAfter, s.Policy.EjectStalledAfter = 0, 0
		hold(t, s)
	}
}

// In a job with upstream groups all decide by steps, as those do: whatever they then miss, they agree on who takes part.
func TestAMixedJobAgreesOnWhoTakesPart(t *testing.T) {
	t.Parallel()
	missed := 0
	for seed := range uint64(budget(60, 6)) {
		s := Draw(seed, 0, 300)
		s.Lighthouses, s.Upstream = 1, 0b1010101010101010
		s.Duplicate = 0 // upstream requests have no numbers that would mark a late one
		s.Faults = slices.DeleteFunc(s.Faults, func(f Fault) bool { return f.Kind == Noise })
		if b := Run(s, nil).Broken; b != nil {
			require.Equal(t, ruleEqual, b.Rule, "seed %d: %v", seed, b)
			missed++
		}
	}
	t.Logf("the gap of the upstream protocol was hit in %d histories", missed)
}

// A lighthouse whose clock is behind after a restart, and which only newcomers ask, knows of no id: only what it kept
// on disk could show it. As soon as a member of before asks, ids go on above.
func TestAClockThatIsBehindIsNotSurvivedByMemoryAlone(t *testing.T) {
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
	start, said := time.Now(), time.Now()
	var rounds, faults int
	var heals, seed uint64
	report := func() {
		fmt.Printf("%s: seeds %d to %d, %d quorums (%.0f a second), %d faults, %d heals, no rule broken\n",
			time.Since(start).Round(time.Second), first, first+seed, rounds, float64(rounds)/time.Since(start).Seconds(), faults, heals)
	}
	for ; time.Since(start) < *soakFlag; seed++ {
		r := hold(t, Draw(first+seed, *slotsFlag, *roundsFlag))
		rounds, faults, heals = rounds+r.Rounds, faults+r.FaultsHit, heals+r.Heals
		if time.Since(said) > 10*time.Second {
			said = time.Now()
			report()
		}
	}
	report()
}

// BenchmarkRounds is the cost of a quorum of 16 groups, all checks included, with a fault in every fiftieth:
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
