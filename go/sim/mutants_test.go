package sim

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
)

var (
	mutantsFlag = flag.Bool("mutants", false, "compile the machines with each of the mistakes in mutants_test.go, and look for it")
	mutantFlag  = flag.String("mutant", "", "the machines are compiled with this mistake: find it (what -mutants runs)")
)

// Planted mistakes in the machines: a text of their source, and its replacement. The source files are not changed: the compiler
// reads modified copies (go test -overlay).
var mutants = []struct {
	name     string
	file     string // relative to the parent folder
	old, new string
	setup    func(*Setup) // changes the setup of the histories that are searched for the mistake
	found    []string     // one of these rules must find it
	long     bool         // only long histories show it
}{
	{
		"no fence", "round/vote.go", `if why := m.mayNotCommit(fenced); commit && why != "" {`, `if why := m.mayNotCommit(fenced); false && why != "" {`,
		many(6), []string{ruleEvicted}, false,
	},
	{
		"evicted groups commit", "round/vote.go", `case m.evicted != nil && m.latest.is(m.evicted.QuorumID):`, `case m.evicted != nil && false:`,
		many(6), []string{ruleEvicted}, false,
	},
	{
		"the fence is of an older quorum", "round/vote.go", `m.latest.is(m.evicted.QuorumID):`, `m.latest.quorum != nil && m.evicted.QuorumID < m.latest.quorum.ID:`,
		many(6), []string{ruleEvicted, ruleProgress}, false,
	},
	{
		"no member notifies", "round/failed.go", "place != own && between < notifiers;", "place != own && between < 0;",
		many(6, CutLighthouse, CutUp, Stall), []string{ruleEvicted}, false,
	},
	{
		"reports of the quorum before not forwarded", "round/failed.go", "	case m.before.is(e.QuorumID):", "	case m.before.is(e.QuorumID) && false:",
		func(s *Setup) { s.Ranks = 2; many(3, CutUp, CutLighthouse, Slow)(s) }, []string{ruleEvicted}, true,
	},
	{
		"votes count in the next attempt", "round/gather.go", "if m.ballot.count > 0 {", "if m.ballot.count > len(m.ranks) {",
		func(s *Setup) { s.Ranks = 2; many(6, LoseVote, DropRank, Flaky, Slow)(s) }, []string{ruleVote, ruleWaiters, ruleEqual}, false,
	},
	{
		"one report is enough for a check", "quorum/suspicion.go", "2*(s.unnamed+s.named[r.id]) > others", "2*(s.unnamed+s.named[r.id]) > min(others, 0)",
		many(6, Accuse, Flaky, Pause), []string{ruleCause}, false,
	},
	{
		"one liar evicts a peer", "quorum/suspicion.go", "if e.Reached || s.past.latest == nil", "if s.past.latest == nil",
		many(6, Accuse, CutPeers, Pause), []string{ruleCause}, false,
	},
	{
		"reports of the quorum before count", "quorum/form.go", "	m.suspicion.forget()\n", "",
		many(6, Accuse, Flaky), []string{ruleCause}, false,
	},
	{
		"released too early", "quorum/drain.go", "	if !r.previous {", "	if true {",
		many(6, Drain), []string{ruleRelease}, false,
	},
	{
		"released at the next tick", "quorum/drain.go", "return r.alive() && !r.waiting() })", "return false })",
		func(s *Setup) { s.Compute *= 6; many(6, Drain)(s) }, []string{ruleRelease}, false,
	},
	{
		"Slept ignored", "quorum/machine.go", "		m.roster.forgive(slept.For)\n", "",
		many(6, PauseLighthouse, ClockLighthouse), []string{ruleCause, ruleMajority, ruleMemory, ruleForms}, false,
	},
	{
		"a failed rank ignored", "quorum/machine.go", "m.fail(r, RankFailed, e.Reason)", "_ = r",
		func(s *Setup) { s.Ranks = 2; many(6, DropRank, RankFails)(s) }, []string{ruleForms, ruleMajority, ruleMemory, ruleCause}, false,
	},
	{
		"evicted members stay evicted", "quorum/roster.go", `		r.out = ""
		r.requests = append`, `		r.requests = append`,
		many(6, DropRank, Stall, Drain), []string{ruleForms, ruleMajority, ruleMembers, ruleNewcomer, ruleMemory, ruleProgress}, false,
	},
	{
		"suspicion outlasts a return", "quorum/roster.go", "	r.lastBeat = now\n	s.trust(r)\n", "	r.lastBeat = now\n",
		many(6), []string{ruleCause, ruleMajority, ruleForms, ruleMemory}, false,
	},
	{
		"waiting members named as stalled", "quorum/progress.go", "if !r.alive() || r.waiting() || p.Waits {", "if !r.alive() || r.waiting() {",
		many(6, Stall, Slow, CutPeers), []string{ruleCause}, false,
	},
	{
		"newcomers' waits count", "quorum/compute.go", "case t.joining >= p.JoinTimeout", "case t.waited >= p.JoinTimeout",
		many(6, Crash, Leave, Slow), []string{ruleMajority}, false,
	},
	{
		"half of the healthy suffice", "quorum/compute.go", "case 2*t.candidates <= t.healthy:", "case 2*t.candidates < t.healthy:",
		many(6, CutLighthouse, Slow, Pause), []string{ruleMajority}, false,
	},
	{
		"no wait for members ahead", "quorum/memory.go", "case m.mayCome() && (m.behind.IsZero()", "case m.mayCome() && false && (m.behind.IsZero()",
		func(s *Setup) { s.Policy.MinReplicas = 1; many(6)(s) }, []string{ruleBehind}, true,
	},
	{
		"older weights count as the newest", "recovery/compute.go", "latest = max(latest, m.CommittedQuorumID)", "latest = min(max(latest, 0), m.CommittedQuorumID)",
		func(s *Setup) {
			s.Policy.MinReplicas = 1
			many(8, Partition, CutLighthouse, LoseVote)(s)
		},
		[]string{ruleHeal, ruleEqual}, false,
	},
	{
		"endless waits for an unshown quorum", "quorum/recall.go", "s.id > s.past.latestID() && now.Sub(s.since)", "s.id > s.past.latestID() || now.Sub(s.since)",
		claims, []string{ruleUnshown, ruleForms}, false,
	},
	{
		"a rank's signal ignored", "round/gather.go", "	m.draining = m.draining || e.Drain\n", "",
		many(6, Signal), []string{ruleDrained}, false,
	},
	{
		"a finished training is kept", "quorum/machine.go", "if m.past.latest == nil || slices", "if true || slices",
		finishes, []string{ruleFinished, ruleMemory, ruleForms}, false,
	},
	{
		"any shutdown finishes the training", "quorum/machine.go", "return !r.finished })", "return !r.ending })",
		finishes, []string{ruleMemory, ruleBehind, ruleForms, ruleMajority, ruleNewcomer, ruleMembers}, false,
	},
}

// mutate returns the source of a file with the mistake in it.
func mutate(t *testing.T, file, old, replacement string) string {
	t.Helper()
	source, err := os.ReadFile(filepath.Join("..", file))
	require.NoError(t, err)
	require.Equal(t, 1, strings.Count(string(source), old), "%s has %q once", file, old)
	return strings.Replace(string(source), old, replacement, 1)
}

// The sources still contain the texts that the mutants replace.
func TestTheMutantsFitTheMachines(t *testing.T) {
	require.GreaterOrEqual(t, len(mutants), 10)
	for _, m := range mutants {
		mutate(t, m.file, m.old, m.new)
	}
}

// TestMutantsOfTheMachinesAreFound compiles each mutant, which takes a while: go test ./sim -mutants
func TestMutantsOfTheMachinesAreFound(t *testing.T) {
	if !*mutantsFlag {
		t.Skip("-mutants runs it")
	}
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			testmain.RunWith(t, filepath.Join("..", m.file), mutate(t, m.file, m.old, m.new), "TestFindMutant", "-mutant="+m.name)
		})
	}
}

// TestFindMutant runs in machines that were compiled with a mistake.
func TestFindMutant(t *testing.T) {
	for _, m := range mutants {
		if m.name != *mutantFlag {
			continue
		}
		findMistake(t, mistake{name: m.name, setup: m.setup, long: m.long}, m.found)
		return
	}
	if *mutantFlag != "" {
		require.Fail(t, "no such mutant", *mutantFlag)
	}
	t.Skip("-mutants runs it")
}
