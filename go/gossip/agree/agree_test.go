package agree

import (
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// job has members on a network without faults: all others receive a member's note at once.
type job struct {
	t        *testing.T
	machines map[string]*Machine
	away     map[string]bool // members that are cut off from the others
	lives    int64
}

func newJob(t *testing.T, names ...string) *job {
	j := &job{t, map[string]*Machine{}, map[string]bool{}, 0}
	for _, name := range names {
		j.start(name)
	}
	j.settle()
	return j
}

func (j *job) start(name string) *Machine {
	j.lives++
	at := name
	if j.lives > 1 && name == "a" {
		at = "a again"
	}
	seeds := [][]string{{"a", "another address of a"}}
	m := New(Config{Me: ID{name, j.lives}, Address: "store of " + name, At: at, Seeds: seeds, MinMembers: 1})
	j.machines[name] = m
	return m
}

func (j *job) names() []string { return slices.Sorted(maps.Keys(j.machines)) }

// gone is the message that a member has left the job.
func gone(m *Machine) Known { return Known{Left: []Final{{m.cfg.Me, m.Note().Joined}}} }

func (j *job) connected(a, b string) bool { return a != b && j.away[a] == j.away[b] }

// settle delivers all messages to all members until nothing changes.
func (j *job) settle() {
	j.t.Helper()
	for range 100 {
		before := map[string]Note{}
		for name, m := range j.machines {
			before[name] = m.Note()
		}
		for _, name := range j.names() {
			j.meet(name)
		}
		same := true
		for name, m := range j.machines {
			same = same && m.Note() == before[name]
		}
		if same {
			return
		}
	}
	j.t.Fatal("the members keep changing")
}

func (j *job) meet(name string) {
	peers := map[ID]Peer{}
	for _, other := range j.names() {
		if o := j.machines[other]; j.connected(name, other) {
			peers[o.cfg.Me] = Peer{o.Note(), o.cfg.At}
			j.machines[name].Learn(o.Known())
		}
	}
	j.machines[name].See(peers)
}

// ask makes members ask for a view, and settles.
func (j *job) ask(names ...string) {
	j.t.Helper()
	j.settle()
	for _, name := range names {
		if m := j.machines[name]; m != nil {
			m.Ask()
		}
	}
	j.settle()
}

// in returns the members of the view that a member is in.
func (j *job) in(name string) (members []string) {
	if v := j.machines[name].Taken(); v != nil {
		for _, q := range v.Members {
			members = append(members, q.Name)
		}
	}
	return members
}

func TestMembersAgree(t *testing.T) {
	j := newJob(t, "a", "b", "c")
	j.ask("a", "b")
	require.Empty(t, j.in("a"))
	require.Equal(t, "waits for c", j.machines["a"].Waits())
	j.ask("c")
	for _, name := range j.names() {
		require.Equal(t, []string{"a", "b", "c"}, j.in(name))
		require.Equal(t, News{View: 1}, j.machines[name].News())
	}
	j.ask(j.names()...)
	require.Equal(t, int64(2), j.machines["a"].Taken().Number, "a list that was asked for has a new number")
}

func TestAMemberJoins(t *testing.T) {
	j := newJob(t, "a")
	j.ask("a")
	require.Equal(t, []string{"a"}, j.in("a"))
	j.start("b")
	j.settle()
	require.Empty(t, j.machines["a"].News().Joining, "b has not asked")
	j.ask("b")
	require.Equal(t, News{View: 1, Joining: []string{"b"}}, j.machines["a"].News())
	j.ask("a")
	require.Equal(t, []string{"a", "b"}, j.in("b"))
}

func TestTheFirstViewHoldsMoreThanHalfOfTheSeeds(t *testing.T) {
	j := newJob(t, "b", "c")
	j.ask("b", "c")
	require.Equal(t, "0 of the 1 seeds are here, and the first view must hold more than half of them",
		j.machines["b"].Waits())
	j.lives = 0
	j.start("a")
	j.ask("a", "b", "c")
	require.Equal(t, []string{"a", "b", "c"}, j.in("b"))
}

func TestTheLargerPartContinues(t *testing.T) {
	j := newJob(t, "a", "b", "c", "d", "e")
	j.ask(j.names()...)
	j.away = map[string]bool{"a": true, "b": true}
	j.settle()
	require.Equal(t, "e does not answer", j.machines["a"].News().Ended)
	j.ask(j.names()...)
	require.Equal(t, []string{"c", "d", "e"}, j.in("e"))
	require.Empty(t, j.in("a"))
	require.Equal(t, "2 of the 5 members of view 1 are here: c, d, e are missing, and a view must hold "+
		"more than half of the last one, or half with the oldest member", j.machines["a"].Waits())
	j.away = nil
	j.settle()
	require.Equal(t, []string{"a", "b"}, j.machines["c"].News().Joining)
	j.ask("c", "d", "e")
	require.Equal(t, j.names(), j.in("a"))
}

// The part of the oldest member continues with half of the members. The other part waits for it, whoever
// starts again there.
func TestHalfIsEnoughForTheOldestMember(t *testing.T) {
	j := newJob(t, "c", "a", "b", "d") // in the order of their starts
	for _, m := range j.machines {
		m.cfg.Seeds = [][]string{{"c"}}
	}
	j.ask(j.names()...)
	j.away = map[string]bool{"c": true, "d": true}
	j.settle()
	j.ask(j.names()...)
	require.Equal(t, []string{"c", "d"}, j.in("c"))
	require.Empty(t, j.in("a"))
	delete(j.machines, "c")
	delete(j.machines, "d")
	j.away = nil
	j.start("c")
	j.start("d")
	j.ask(j.names()...)
	require.Empty(t, j.in("a"), "the earlier c may continue elsewhere, with members that are not here")
	require.Contains(t, j.machines["a"].Waits(), "2 of the 4 members of view 1 are here: c, d are missing")
}

// A process that ends while it joins a job with one member does not end the job.
func TestANewMemberThatFailsDoesNotHoldTheOldestOneUp(t *testing.T) {
	j := newJob(t, "b")
	j.machines["b"].cfg.Seeds = [][]string{{"b"}}
	j.ask("b")
	j.start("a")
	j.settle()
	j.machines["a"].Ask()
	j.meet("b")
	j.machines["b"].Ask()
	require.Equal(t, int64(2), j.machines["b"].Note().Joined)
	delete(j.machines, "a")
	j.settle()
	require.Equal(t, []string{"b"}, j.in("b"))
}

func TestAMemberThatHasLeftIsNotCounted(t *testing.T) {
	for _, how := range []string{"by its note", "by a message"} {
		t.Run(how, func(t *testing.T) {
			j := newJob(t, "a", "b", "c")
			j.ask(j.names()...)
			for _, leaver := range []string{"a", "b"} {
				left := j.machines[leaver]
				left.Leave()
				if how == "by its note" {
					j.settle()
				}
				delete(j.machines, leaver)
				if how == "by a message" {
					for _, m := range j.machines {
						m.Learn(gone(left))
					}
				}
				j.settle()
				require.Equal(t, leaver+" has left the view", j.machines["c"].News().Ended)
				j.ask(j.names()...)
				require.Equal(t, j.names(), j.in("c"))
			}
			j.start("d") // it learns from c which members have ended
			j.ask("c", "d")
			require.Equal(t, []string{"c", "d"}, j.in("d"))
		})
	}
}

// Before they ended, members of the last view may have formed a later view without this member.
func TestAMemberThatMayHaveContinuedElsewhereIsCounted(t *testing.T) {
	for _, how := range []string{"left", "started again"} {
		t.Run(how, func(t *testing.T) {
			j := newJob(t, "a", "b", "c")
			j.ask(j.names()...)
			j.away = map[string]bool{"c": true}
			j.settle()
			j.ask("a", "b")
			j.start("d")
			j.ask("a", "b", "d")
			require.Equal(t, []string{"a", "b", "d"}, j.in("d"))
			for _, name := range []string{"a", "b"} {
				left := j.machines[name]
				left.Leave()
				delete(j.machines, name)
				j.machines["d"].Learn(gone(left))
				j.settle()
				j.ask(j.names()...)
				if how == "left" {
					j.machines["c"].Learn(gone(left))
				}
			}
			require.Equal(t, []string{"d"}, j.in("d"), "d trains")
			beside := []string{"c"}
			if how == "started again" {
				beside = []string{"a", "b", "c"}
				j.start("a")
				j.start("b")
				j.away = map[string]bool{"d": true}
			}
			j.ask(beside...)
			require.Empty(t, j.in("c"))
			require.Contains(t, j.machines[beside[0]].Waits(), "1 of the 3 members of view 1 are here")
		})
	}
}

// A view that some members have joined may have been formed. For those members, the next view must follow it
// as well as the last view that is known to be formed.
func TestAViewThatMayHaveBeenFormed(t *testing.T) {
	j := newJob(t, "a", "b", "c", "d", "e")
	j.ask(j.names()...)
	j.away = map[string]bool{"d": true, "e": true}
	for _, name := range []string{"a", "b", "c"} {
		j.machines[name].Ask()
	}
	j.meet("a")
	j.meet("b") // both join a view of a, b and c, before c has seen that d and e are away
	require.Equal(t, int64(2), j.machines["b"].Note().Joined)
	j.away = map[string]bool{"a": true, "b": true}
	j.settle()
	j.ask("c", "d", "e")
	require.Equal(t, []string{"c", "d", "e"}, j.in("c"))
	j.ask("a", "b")
	require.Empty(t, j.in("a"), "a and b are more than half of a, b and c, but not of the previous view")
	j.away = nil
	j.settle()
	j.ask(j.names()...)
	require.Equal(t, j.names(), j.in("a"))
}

// A later view with the same members can never be formed; the earlier one was formed, and one of its members
// does not know that.
func TestAnEarlierViewIsRememberedWhenALaterOneIsImpossible(t *testing.T) {
	j := newJob(t, "a", "b", "c", "d", "e")
	j.ask(j.names()...)
	j.away = map[string]bool{"d": true, "e": true}
	for _, name := range []string{"a", "b", "c"} {
		j.machines[name].Ask()
	}
	for _, name := range []string{"a", "b", "c", "b"} {
		j.meet(name)
	}
	require.Equal(t, []string{"a", "b", "c"}, j.in("b"))
	require.Equal(t, j.in("b"), j.in("c"))
	require.Empty(t, j.in("a"), "a has not seen that the others have joined view 2")

	j.away = map[string]bool{"b": true, "c": true}
	j.meet("b")
	j.meet("c")
	j.machines["b"].Ask()
	j.machines["c"].Ask()
	for _, name := range []string{"b", "c", "b"} {
		j.meet(name)
	}
	require.Equal(t, []string{"b", "c"}, j.in("b"))
	require.Equal(t, j.in("b"), j.in("c"))
	for wants := range int64(3) { // b and c ask, and leave, and ask
		peers := map[ID]Peer{}
		for _, other := range []string{"b", "c"} {
			note := j.machines[other].Note()
			note.Asks, note.Wants = wants != 1, 3+wants
			peers[j.machines[other].cfg.Me] = Peer{note, ""}
		}
		j.machines["a"].See(peers)
	}
	require.Equal(t, int64(5), j.machines["a"].Note().Joined)
	require.Len(t, j.machines["a"].joined, 2)
	j.ask("a", "d", "e")
	for _, name := range []string{"a", "d", "e"} {
		require.Empty(t, j.in(name), "b and c have a view")
	}
	require.Contains(t, j.machines["a"].Waits(), "1 of the 3 members of view 2 are here")
	j.away = nil
	j.ask(j.names()...)
	require.Equal(t, j.names(), j.in("a"))
}

func TestALaterIncarnationReplacesTheEarlierOne(t *testing.T) {
	j := newJob(t, "a", "b")
	j.ask("a", "b")
	old := j.machines["b"]
	j.start("b")
	j.settle()
	require.Equal(t, "b does not answer", j.machines["a"].News().Ended)
	old.See(map[ID]Peer{j.machines["b"].cfg.Me: {}})
	require.True(t, old.Replaced())
	again := j.machines["b"]
	again.See(map[ID]Peer{old.cfg.Me: {}, j.machines["a"].cfg.Me: {}})
	require.Len(t, again.alive, 1, "the later one does not wait for the earlier one")
	require.Equal(t, "a later incarnation of b has taken its place", old.News().Ended)
	old.Ask()
	require.Nil(t, old.Taken())
}

// The clock of a restarted process may be behind the clock of its earlier incarnation, whose end has not been
// noticed yet.
func TestAMemberRisesAboveALiveIncarnation(t *testing.T) {
	j := newJob(t, "a", "b")
	j.ask("a", "b")
	earlier := j.machines["b"].cfg.Me
	j.lives = 0
	m := j.start("b")
	require.Equal(t, int64(1), m.Rise().Incarnation, "the new b knows of no earlier incarnation")
	m.See(map[ID]Peer{earlier: {}})
	require.True(t, m.Replaced())
	risen := m.Rise()
	require.Greater(t, risen.Incarnation, earlier.Incarnation)
	m.See(map[ID]Peer{earlier: {}})
	require.False(t, m.Replaced())
	require.Equal(t, risen, m.Rise())
	j.ask("a", "b")
	require.Equal(t, []string{"a", "b"}, j.in("b"))
	require.True(t, j.machines["a"].Taken().Has(risen))
}

// Two incarnations that know the same earlier one, but not each other, must not have the same number:
// otherwise what one has joined would be counted for the other.
func TestIncarnationsThatRiseDiffer(t *testing.T) {
	known := ID{"b", 7_000_000_000}
	risen := map[int64]bool{}
	for _, clock := range []int64{1_000_000_005, 1_000_000_006, 2_999_999_999, 3_000_000_000} {
		m := New(Config{Me: ID{"b", clock}})
		m.See(map[ID]Peer{known: {}})
		life := m.Rise().Incarnation
		require.Greater(t, life, known.Incarnation)
		require.LessOrEqual(t, life, known.Incarnation+int64(time.Second))
		risen[life] = true
	}
	require.Len(t, risen, 4)
}

func TestAMemberCancels(t *testing.T) {
	j := newJob(t, "a", "b")
	j.ask("a", "b")
	j.machines["a"].Ask()
	j.settle()
	require.Equal(t, "waits for b", j.machines["a"].Waits())
	require.Equal(t, "a has left the view", j.machines["b"].News().Ended)
	j.machines["a"].Cancel()
	j.ask("b")
	require.Empty(t, j.in("b"), "a joins no view after it has left")
	j.ask("a")
	require.Equal(t, []string{"a", "b"}, j.in("b"))
}

func TestTooFewMembers(t *testing.T) {
	j := newJob(t, "a", "b")
	for _, m := range j.machines {
		m.cfg.MinMembers = 3
	}
	j.ask("a", "b")
	require.Equal(t, "2 of 3 members", j.machines["a"].Waits())
}

// A member adds one to the largest number that it knows. A number near the largest integer must not end that,
// and must not make a member loop, with the lock of its node held.
func TestNumbersThatCouldOverflowAreIgnored(t *testing.T) {
	other := ID{"b", 1}
	for _, number := range []int64{math.MaxInt64, math.MaxInt64 - 1, -1} {
		ended := make(chan *Machine, 1)
		go func() {
			m := New(Config{Me: ID{"a", 1}, Address: "store of a", At: "a", Seeds: [][]string{{"a"}},
				MinMembers: 1})
			m.Ask()
			m.Learn(Known{Formed: &View{Number: number, Members: []Member{{ID: other}}}})
			m.Learn(Known{Formed: &View{Number: 7}})
			m.See(map[ID]Peer{other: {Note: Note{Wants: number}}})
			m.Ask()
			m.See(map[ID]Peer{other: {Note: Note{Joined: number, Digest: "x"}}})
			m.Ask()
			m.See(nil)
			m.Ask()
			ended <- m
		}()
		select {
		case m := <-ended:
			require.NotNil(t, m.Taken(), "after number %d: %s", number, m.Waits())
			require.LessOrEqual(t, m.Taken().Number, int64(4))
		case <-time.After(10 * time.Second):
			require.Fail(t, "a member loops", "after number %d", number)
		}
	}
}

func TestAMemberThatHasLeftJoinsNoView(t *testing.T) {
	j := newJob(t, "a")
	a := j.machines["a"]
	a.Leave()
	last := a.Note()
	a.Ask()
	a.Cancel()
	require.Equal(t, last, a.Note(), "the note of a member that left must not change: the last one was sent")
	require.Nil(t, a.Taken())
}

// The others have continued without a member, and were all started again since: it takes over the last formed
// view from them.
func TestAMemberThatWasAwayLearnsTheLastFormedView(t *testing.T) {
	j := newJob(t, "a", "b", "c", "d", "e")
	j.ask(j.names()...)
	j.away = map[string]bool{"e": true}
	j.settle()
	for _, name := range []string{"d", "c", "b", "a"} {
		delete(j.machines, name)
		j.settle()
		j.ask("a", "b", "c", "d")
		j.start(name)
		j.ask("a", "b", "c", "d")
		require.Equal(t, []string{"a", "b", "c", "d"}, j.in("d"))
	}
	j.ask("e")
	require.Contains(t, j.machines["e"].Waits(),
		"1 of the 5 members of view 1 are here: a, b, c, d are missing")
	j.away = nil
	j.ask(j.names()...)
	require.Equal(t, j.names(), j.in("e"))
}

// All members join a view, and leave it before they learn that the others have joined it. The view is formed
// all the same, so the next one needs more than half of its members, instead of more than half of the larger
// view before it.
func TestAViewThatWasLeftIsFormed(t *testing.T) {
	j := newJob(t, "a", "b", "c", "d", "e")
	j.ask(j.names()...)
	j.away = map[string]bool{"d": true, "e": true}
	for _, name := range []string{"a", "b", "c"} {
		j.machines[name].Ask()
	}
	for _, name := range []string{"b", "c", "a"} {
		before := map[ID]Peer{} // the notes that the others had before they joined the view
		for _, other := range []string{"a", "b", "c"} {
			if o := j.machines[other]; other != name {
				before[o.cfg.Me] = Peer{Note{Address: o.cfg.Address, Asks: true, Wants: 2}, o.cfg.At}
			}
		}
		j.machines[name].See(before)
		require.Equal(t, int64(2), j.machines[name].Note().Joined)
		require.Nil(t, j.machines[name].Taken())
		j.machines[name].Cancel()
	}
	j.settle()
	j.away["c"] = true
	j.ask("a", "b")
	require.Equal(t, []string{"a", "b"}, j.in("b"))
	j.ask("c", "d", "e")
	require.Empty(t, j.in("c"))
}

// A name may have a second process, on the other side of a cut: it counts as a new member, so that it adds
// nothing to a part that must not continue. When the cut has ended, one of the two processes is replaced.
func TestOneNameOnBothSidesOfACut(t *testing.T) {
	j := newJob(t, "a", "b", "c")
	j.away = map[string]bool{}
	j.ask("a", "b", "c")
	for _, name := range []string{"a", "b"} { // c is cut off from both: a second process of each is there
		j.machines["other "+name] = j.machines[name]
		j.away["other "+name] = true
		j.start(name)
	}
	j.ask(j.names()...)
	require.Empty(t, j.in("c"), "c and the new a and b know no other member of the view")
	require.Equal(t, []string{"a", "b"}, j.in("other a"))
	j.away = nil
	j.settle()
	require.True(t, j.machines["other a"].Replaced())
	require.Equal(t, "a later incarnation of a has taken its place", j.machines["other a"].News().Ended)
}

// Whether a member may join the second view of a row after the first one: views of a to e, in the order of
// their starts.
func TestAViewFollowsAnother(t *testing.T) {
	view := func(number int64, names string) *View {
		v := &View{Number: number}
		for i, name := range strings.Split(names, "") {
			life := int64(name[0] - 'a')
			if name >= "A" && name <= "Z" { // A is a later incarnation of a
				name, life = strings.ToLower(name), 100+int64(i)
			}
			v.Members = append(v.Members, Member{ID{name, life}, ""})
		}
		return v
	}
	for _, c := range []struct {
		before, after, left string
		want                bool
	}{
		{before: "abcde", after: "abcde", want: true},
		{before: "abcde", after: "cde", want: true},
		{before: "abcde", after: "ab"},
		{before: "abcde", after: "abxyz"},
		{before: "abcd", after: "ab", want: true},
		{before: "abcd", after: "ad", want: true},
		{before: "abcd", after: "cd"},
		{before: "abcd", after: "bcd", want: true},
		{before: "ab", after: "a", want: true},
		{before: "ab", after: "b"},
		{before: "ab", after: "Ab"},                         // a was started again
		{before: "abc", after: "ABc"},                       // more than half were started again
		{before: "a", after: "x"},                           // no member
		{before: "ab", after: "b", left: "a", want: true},   // a has left the job
		{before: "abc", after: "c", left: "ab", want: true}, // so have a and b
		{before: "abcd", after: "cd", left: "a", want: true},
		{before: "abcde", after: "cd", left: "a"}, // b is the oldest one that is left
		{before: "abcde", after: "bc", left: "a", want: true},
		{before: "ab", after: "c", left: "ab"}, // nobody of the view is here
	} {
		left := map[ID]int64{}
		for _, q := range view(1, c.left+"a").Members[:len(c.left)] {
			left[q.ID] = 3
		}
		why := follows(view(5, c.after), view(3, c.before), left)
		require.Equal(t, c.want, why == "", "%s after %s, left: %s: %s", c.after, c.before, c.left, why)
		if c.left != "" { // the same, but they have joined a later view before they left
			without := follows(view(5, c.after), view(3, c.before), nil)
			with := follows(view(5, c.after), view(2, c.before), left)
			require.Equal(t, without == "", with == "", "%s after %s", c.after, c.before)
		}
	}
	require.Empty(t, follows(view(1, "x"), nil, nil), "there is no earlier view")
}

// For all views of up to five members: no two parts that have no member in common may both follow a view,
// whatever each one knows about the members that have left.
func TestOnlyOnePartFollows(t *testing.T) {
	part := func(size, members int) *View {
		v := &View{Number: 1}
		for i := range size {
			if members&(1<<i) != 0 {
				v.Members = append(v.Members, Member{ID{string(rune('a' + i)), int64(size - i)}, ""})
			}
		}
		return v
	}
	known := func(size, members int) map[ID]int64 {
		left := map[ID]int64{}
		for _, q := range part(size, members).Members {
			left[q.ID] = 1
		}
		return left
	}
	for size := 1; size <= 5; size++ {
		all := 1<<size - 1
		for left := range all + 1 { // that have left; each part knows some of them
			for first := range all + 1 {
				for second := range all + 1 {
					if first&second != 0 || (first|second)&left != 0 {
						continue
					}
					for here := range left + 1 {
						for there := range left + 1 {
							if here&^left != 0 || there&^left != 0 {
								continue
							}
							one := follows(part(size, first), part(size, all), known(size, here)) == ""
							two := follows(part(size, second), part(size, all), known(size, there)) == ""
							if one && two {
								t.Fatalf("%05b and %05b of %05b, left: %05b and %05b", first, second, all,
									here, there)
							}
						}
					}
				}
			}
		}
	}
}
