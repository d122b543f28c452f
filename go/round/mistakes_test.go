package round

import (
	"flag"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
)

type mistake struct {
	name, file, old, new string
	by                   []string // only these events, and delays, happen in the histories that are searched
}

// mistakes are planted in the machines, as in go/sim/mistakes_test.go: a text of the source is replaced while
// a test compiles it, and $ is the condition that this mistake is to be made. The histories of few members
// (histories_test.go) must find each.
var mistakes = []mistake{
	// The lighthouse.
	{
		"the round is the smallest answer", "quorum/standing.go", "			s.round = max(s.round, r.stop)\n",
		"			if s.round = max(s.round, r.stop); $ {\n				for _, o := range " +
			"s.past.members {\n					if o.alive() {\n						s.round = " +
			"min(s.round, o.stop)\n					}\n				}\n			}\n",
		[]string{"has another setting", "gets notices late"},
	},
	{
		"the round is named before all have answered", "quorum/standing.go",
		"if s.called.IsZero() || len(s.awaited) > 0 ||",
		"if s.called.IsZero() || len(s.awaited) > map[bool]int{true: 1}[$] ||",
		[]string{"has another setting", "gets notices late"},
	},
	{
		"newcomers cause no call", "quorum/standing.go", "	if !r.previous && !r.held && !s.shrinks() {\n",
		"	if !r.previous && !r.held && !s.shrinks() && !$ {\n",
		[]string{"joins"},
	},
	{
		"newcomers that asked before the restart cause no call", "quorum/standing.go",
		"	if t := s.roster.counts; s.why != \"\"", "	if t := s.roster.counts; $ || s.why != \"\"",
		[]string{"joins", "sees the lighthouse restart", "reconnects"},
	},

	{
		"a lost step notifies nobody", "quorum/standing.go",
		"	s.failed = append(s.failed, failure{r, Parts, reason})\n",
		"	if $ {\n		return\n	}\n	s.failed = append(s.failed, failure{r, Parts, reason})\n",
		[]string{"loses its step"},
	},
	{
		"no member is called again", "quorum/standing.go", "	if s.called.IsZero() || !r.previous ||",
		"	if s.called.IsZero() || $ || !r.previous ||",
		[]string{"has another setting", "reconnects"},
	},

	{
		"a request below the round is pending", "quorum/machine.go",
		"if m.standing.asked(m.roster.members[id], e) {",
		"if m.standing.asked(m.roster.members[id], e) && !$ {",
		[]string{"has another setting", "is heard late"},
	},
	{
		"a redelivered quorum does not stand", "quorum/redeliver.go", "		m.standing.redelivered(r)\n",
		"		if !$ {\n			m.standing.redelivered(r)\n		}\n",
		[]string{"sees the lighthouse restart", "gets its answer late"},
	},

	{
		"a drained member gets no lost answer", "quorum/redeliver.go", " || !r.alive() ||",
		" || !r.alive() || $ && r.draining != \"\" ||",
		[]string{"is drained", "reconnects"},
	},
	{
		"a quorum with a drained member stands", "quorum/standing.go", " r.draining != \"\" ||",
		" r.draining != \"\" && !$ ||",
		[]string{"is drained"},
	},
	{
		"a drain causes no call", "quorum/machine.go",
		"		m.standing.wants(e.ReplicaID + \" is asked to leave\")\n",
		"		if !$ {\n			m.standing.wants(e.ReplicaID + \" is asked to leave\")\n		}\n",
		[]string{"is drained"},
	},
	{
		"a member whose quorum is over is not told", "quorum/standing.go",
		"latest := s.past.latestID(); r.standsIn < latest {",
		"latest := s.past.latestID(); r.standsIn < latest && !$ {",
		[]string{"is cut off for a time"},
	},
	// The group.
	{
		"a group trains on after its answer", "round/standing.go",
		"	if s.quorum == nil || s.called && step+1 >= s.round {",
		"	if s.quorum == nil || s.called && step+1 >= s.round && !($ && s.round == 0) {",
		[]string{"has another setting"},
	},
	{
		"a group answers with a step that it has begun", "round/standing.go", "max(s.allowed+1, s.round)}",
		"max(s.allowed+map[bool]int64{false: 1}[$], s.round)}",
		[]string{"has another setting"},
	},
	{
		"a call that overtakes its quorum is forgotten", "round/standing.go", "	if called {\n",
		"	if called && !$ {\n",
		[]string{"has another setting", "gets its answer late"},
	},

	{
		"a group that asks does not train on", "round/standing.go",
		"	if g.count == 0 || s.allowed+1 >= s.round {",
		"	if g.count == 0 || s.allowed+1 >= s.round || $ {",
		[]string{"has another setting", "gets notices late"},
	},

	{
		"a member's failure ends nothing in the group", "round/standing.go",
		"	if m.standing.is(quorumID) {\n", "	if m.standing.is(quorumID) && !$ {\n",
		[]string{"is killed", "is cut off for a time"},
	},
}

var mistakeFlag = flag.String("mistake", "", "TestAMistakeIsFound: the name of the planted mistake")

// The page has the number of mistakes.
func TestTheMistakesAreCounted(t *testing.T) {
	require.Equal(t, []string{strconv.Itoa(len(mistakes))},
		testmain.Row(t, "internals/correctness.md", "go/round/mistakes_test.go", ", "))
}

func TestMistakesAreFound(t *testing.T) {
	testmain.Slow(t)
	if testmain.Race() {
		return // no mistake is a race
	}
	t.Parallel()
	sources := testmain.Sources{}
	for _, m := range mistakes {
		sources.Plant(t, m.name, m.file, m.old, m.new)
	}
	binary := sources.Compile(t)
	for _, m := range mistakes {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			test := exec.CommandContext(t.Context(), binary, "-test.run=^TestAMistakeIsFound$", "-test.v", "-mistake="+m.name) //nolint:gosec // this test
			out, err := test.CombinedOutput()
			require.NoError(t, err, "%s", out)
			_, found, _ := strings.Cut(string(out), "found as: ")
			t.Log(strings.SplitN(found, "\n", 2)[0])
		})
	}
}

// TestAMistakeIsFound runs in a binary with all mistakes, and looks for one of them.
func TestAMistakeIsFound(t *testing.T) {
	i := slices.IndexFunc(mistakes, func(m mistake) bool { return m.name == *mistakeFlag })
	if i < 0 {
		t.Skip("-mistake names none")
	}
	found, played := "", 0
	search(101, 3, func(s scenario) bool {
		if slices.ContainsFunc(s.deviations, func(d deviation) bool {
			return d.event >= 0 &&
				!slices.Contains(mistakes[i].by, events[d.event].name)
		}) {
			return true
		}
		played++
		_, found = s.play(false)
		return found == ""
	})
	require.NotEmpty(t, found, "no history of %d finds it", played)
	t.Logf("found as: %s, in history %d", found, played)
}
