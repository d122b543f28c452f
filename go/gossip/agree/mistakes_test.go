package agree

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
)

var (
	mistakesFlag = flag.Bool("agree.mistakes", false, "compile agree.go with each mistake: histories find it")
	mistakeFlag  = flag.String("agree.mistake", "", "agree.go is compiled with this mistake: find it")
)

// safety has the rules that are checked against two live views. A mistake that allows two live views may
// break any of them first.
var safety = []string{ruleLive, ruleShared, ruleFollows, ruleRemembered}

// mistakes are planted in the machine. Each edit is a text of agree.go and its replacement. found has rules;
// a history must break one of them. The compiler reads the changed file instead of agree.go (go test
// -overlay).
var mistakes = []struct {
	name  string
	edits [][2]string
	found []string
}{
	{
		"any view follows any other one",
		[][2]string{{"if here > 0 && (2*here > all ||", "if true || here > 0 && (2*here > all ||"}},
		safety,
	},
	{
		"joined views are not remembered",
		[][2]string{{"append(m.joined[:len(m.joined):len(m.joined)], m.formed)", "[]*View{m.formed}"}},
		safety,
	},
	{
		"the last joined view alone is remembered",
		[][2]string{{"m.joined = append(m.joined, next)", "m.joined = []*View{next}"}},
		safety,
	},
	{
		"half is enough",
		[][2]string{{"2*here == all && v.Has(*oldest)", "2*here == all"}},
		safety,
	},
	{
		"members that have left are not counted, whatever they joined",
		[][2]string{{"gone && joined <= f.Number", "gone && joined <= mostNumber"}},
		safety,
	},
	{
		"news of a formed view ends later ones",
		[][2]string{{"return a.Number <= v.Number }", "return a.Number >= 0 }"}},
		safety,
	},
	{
		"half of the seeds are enough to found a job",
		[][2]string{{"if 2*count > len(m.cfg.Seeds) {", "if 2*count >= len(m.cfg.Seeds) {"}},
		safety,
	},
	{
		"new members found another job",
		[][2]string{{"if why := m.founds(v); why != \"\" {", "if why := m.founds(v); why == \"never\" {"}},
		safety,
	},
	{
		"two views of one number are joined",
		[][2]string{{`next.Number, next.digest = next.Number+1, ""`, `next.digest = ""`}},
		[]string{ruleJoined, ruleShared},
	},
	{
		"a view is formed when all but one have joined it",
		[][2]string{{"if len(m.missing(v)) == 0 {", "if len(m.missing(v)) <= 1 {"}},
		[]string{ruleTaken},
	},
	{
		"a view is taken when another one is formed",
		[][2]string{{"f.Digest() == m.note.Digest && f.Number == m.note.Wants", "f.Number == m.note.Wants"}},
		[]string{ruleTogether},
	},
	{
		"a member that has left asks",
		[][2]string{{
			"\tif m.note.Left {\n\t\treturn\n\t}\n\tm.taken, m.note.Asks = nil, true",
			"\tm.taken, m.note.Asks = nil, true",
		}},
		[]string{ruleJoined},
	},
	{
		"members that have left are counted",
		[][2]string{{"gone && joined <= f.Number", "gone && joined <= 0*f.Number"}},
		[]string{ruleTogether},
	},
	{
		"a failure is not reported",
		[][2]string{{`why = q.Name + " does not answer"`, `why = ""`}},
		[]string{ruleTogether},
	},
	{
		"a member stays in the view that it has joined when its list changes",
		[][2]string{{"if next.Digest() == m.note.Digest {",
			"if next.Digest() == m.note.Digest || !m.note.Left {"}},
		[]string{ruleTogether},
	},
}

// mistaken returns the source of the machine with the mistake of this number.
func mistaken(t *testing.T, number int) string {
	t.Helper()
	text, err := os.ReadFile("agree.go")
	require.NoError(t, err)
	source := string(text)
	for _, edit := range mistakes[number].edits {
		require.Equal(t, 1, strings.Count(source, edit[0]), "agree.go must contain %q once", edit[0])
		source = strings.Replace(source, edit[0], edit[1], 1)
	}
	return source
}

// Each text that an edit replaces is in agree.go exactly once.
func TestTheMistakesFitTheMachine(t *testing.T) {
	for i := range mistakes {
		mistaken(t, i)
	}
}

// TestMistakesInTheMachineAreFound compiles agree.go with each mistake, which takes a while: go test
// ./gossip/agree -agree.mistakes
func TestMistakesInTheMachineAreFound(t *testing.T) {
	if !*mistakesFlag {
		t.Skip("-agree.mistakes looks for them")
	}
	for i, mistake := range mistakes {
		t.Run(mistake.name, func(t *testing.T) {
			testmain.RunWith(t, "agree.go", mistaken(t, i), "TestFindMistake", "-agree.mistake="+mistake.name)
		})
	}
}

// TestFindMistake runs in a machine that was compiled with a mistake.
func TestFindMistake(t *testing.T) {
	for _, mistake := range mistakes {
		if mistake.name != *mistakeFlag {
			continue
		}
		for number, events := uint64(0), 0; events < 3_000_000; number++ {
			w, _ := history(23, number) // the same histories each day
			if events += w.events; w.broken != "" {
				t.Logf("history %d, event %d: %s: %s", number, events, w.broken, w.how)
				require.Contains(t, mistake.found, w.broken)
				return
			}
		}
		t.Fatal("no history breaks a rule")
	}
	if *mistakeFlag != "" {
		t.Fatal("no such mistake: ", *mistakeFlag)
	}
	t.Skip("-agree.mistake is not set")
}
