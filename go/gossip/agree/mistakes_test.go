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
	mistakesFlag = flag.Bool("agree.mistakes", false, "compile agree.go with each planted mistake, and check that the tests find it")
	mistakeFlag  = flag.String("agree.mistake", "", "agree.go is compiled with this mistake: find it")
)

// safety has the rules that are checked against two live views. A mistake that allows two live views may break any of them first.
var safety = []string{ruleLive, ruleShared, ruleFollows, ruleRemembered}

// mistakes are planted in the machine. Each edit is a text of agree.go and its replacement. found has rules; a history must break
// one of them. The compiler reads the changed file instead of agree.go (go test -overlay).
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
		"attempts are not remembered",
		[][2]string{{"for _, a := range m.attempts {", "for _, a := range m.attempts[:0] {"}},
		safety,
	},
	{
		// An earlier version of the machine did this, because members that have confirmed the later attempt do not confirm an
		// earlier one. That is wrong: the earlier attempt may have been formed already.
		"an attempt takes the place of an earlier one with the same members",
		[][2]string{
			{"m.attempts = append(m.attempts, v)", "m.attempts = append(slices.DeleteFunc(m.attempts, func(a *View) bool { return slices.Equal(a.Members, v.Members) }), v)"},
			{"if len(m.unconfirmed(v)) == 0 {", "if len(m.unconfirmed(v)) == 0 && !slices.ContainsFunc(v.Members, func(q Member) bool { return m.alive[q.ID].hasLeft(v, v.Digest()) }) {"},
		},
		safety,
	},
	{
		"half is enough",
		[][2]string{{"2*here == all && len(missing) == 0", "2*here == all"}},
		safety,
	},
	{
		"members that ended are not counted, whatever they confirmed",
		[][2]string{{"case over && last <= f.Number:", "case over && last <= unknown:"}},
		safety,
	},
	{
		"a member that was started again confirmed nothing",
		[][2]string{{"const unknown = math.MaxInt64", "const unknown = 0 * math.MaxInt64"}},
		safety,
	},
	{
		"a member that never confirmed a view counts as having left it",
		[][2]string{{"return n.Confirmed < v.Number && n.Wants > v.Number ||", "return n.Wants > v.Number ||"}},
		safety,
	},
	{
		"the last view that ended members confirmed counts as never formed",
		[][2]string{{"over && last < v.Number", "over && last <= v.Number"}},
		safety,
	},
	{
		"the last attempt alone is remembered",
		[][2]string{{"m.attempts = append(m.attempts, v)", "m.attempts = []*View{v}"}},
		safety,
	},
	{
		"news of a formed view ends later attempts",
		[][2]string{{"m.form(p.Base)", "m.form(p.Base)\n		m.attempts = nil"}},
		safety,
	},
	{
		"the last formed view is not sent",
		[][2]string{{"if p.Base.number() > m.base.number() {", "if false {"}},
		[]string{ruleLive, ruleShared, ruleTogether},
	},
	{
		"two views of one number are confirmed",
		[][2]string{
			{"if v.Number <= m.note.Confirmed {", "if v.Number < m.note.Confirmed {"},
			{"if p.View.Number > m.latest.number() {", "if p.View.Number >= m.latest.number() {"},
		},
		[]string{ruleConfirmed, ruleShared},
	},
	{
		"a view is taken when some have confirmed it",
		[][2]string{{"if len(m.unconfirmed(v)) == 0 {", "if len(m.unconfirmed(v)) <= 1 {"}},
		[]string{ruleTaken},
	},
	{
		"a view is taken when another one of its number is formed",
		[][2]string{{"if m.base == nil || m.base.Digest() != digest {", "if m.base.number() < v.Number {"}},
		[]string{ruleTaken},
	},
	{
		"half of the seeds are enough to found a job",
		[][2]string{{"if 2*count > len(m.cfg.Seeds) {", "if 2*count >= len(m.cfg.Seeds) {"}},
		safety,
	},
	{
		"a member that has left asks",
		[][2]string{{"	if m.note.Left {\n		return\n	}\n	m.asked, m.taken = true, nil", "	m.asked, m.taken = true, nil"}},
		[]string{ruleConfirmed},
	},
	{
		"a member waits for a proposal that others have left",
		[][2]string{{"over = over || !ok || peer.hasLeft(v, digest)", "over = over || !ok || peer.Confirmed < 0"}},
		[]string{ruleTogether},
	},
	{
		"members that have left are counted",
		[][2]string{{"case over && last <= f.Number:", "case over && last <= 0*f.Number:"}},
		[]string{ruleTogether},
	},
	{
		"newcomers do not learn which members have left",
		[][2]string{{"p.Ended = append(p.Ended, Final{q.ID, confirmed})", "_ = confirmed"}},
		[]string{ruleTogether},
	},
	{
		"a failure is not reported",
		[][2]string{{`news.Ended = q.Name + " does not answer"`, `news.Ended = ""`}},
		[]string{ruleTogether},
	},
	{
		"a refused proposal is kept",
		[][2]string{{`if next := m.candidate(); m.objection(&next) == "" {`, `if next := m.candidate(); m.objection(&next) == "never" {`}},
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

// TestMistakesInTheMachineAreFound compiles agree.go with each mistake, which takes a while: go test ./gossip/agree -agree.mistakes
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
