package agree

import (
	"maps"
	"math"
	"slices"
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
	m := New(Config{Me: ID{name, j.lives}, Address: "store of " + name, At: at, Seeds: [][]string{{"a", "another address of a"}}, MinMembers: 1})
	j.machines[name] = m
	return m
}

func (j *job) names() []string { return slices.Sorted(maps.Keys(j.machines)) }

func (j *job) connected(a, b string) bool { return a != b && j.away[a] == j.away[b] }

// settle delivers all notes and proposals to all members until nothing changes.
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
			if p, found := o.Proposal(); found {
				require.True(j.t, j.machines[name].Hear(p))
			}
		}
	}
	j.machines[name].See(peers)
}

// ask makes members ask for a view, and settles.
func (j *job) ask(names ...string) {
	j.t.Helper()
	j.settle()
	for _, name := range names {
		j.machines[name].Ask()
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
	require.Equal(t, "0 of the 1 seeds are here, and the first view must hold more than half of them", j.machines["b"].Waits())
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
	require.Equal(t, "2 of the 5 members of view 1 are here, and more than half must be; missing: c, d, e", j.machines["a"].Waits())
	j.away = nil
	j.settle()
	require.Equal(t, []string{"a", "b"}, j.machines["c"].News().Joining)
	j.ask("c", "d", "e")
	require.Equal(t, j.names(), j.in("a"))
}

func TestHalfIsNotEnough(t *testing.T) {
	j := newJob(t, "a", "b", "c", "d")
	j.ask(j.names()...)
	j.away = map[string]bool{"a": true, "b": true}
	j.settle()
	j.ask(j.names()...)
	for _, name := range j.names() {
		require.Empty(t, j.in(name))
	}
	j.start("c") // c was restarted, and d is still away: only the end of c is known
	j.ask("c")
	require.Empty(t, j.in("c"))
	j.away = nil
	j.settle()
	require.Equal(t, j.names(), j.in("c"))
}

// Half is enough if the other half was restarted under the same names: its earlier incarnations cannot continue elsewhere.
func TestHalfIsEnoughIfTheOtherHalfHasEnded(t *testing.T) {
	j := newJob(t, "a", "b")
	j.ask("a", "b")
	delete(j.machines, "b")
	j.settle()
	j.ask("a")
	require.Empty(t, j.in("a"), "b may be in another view")
	j.start("b")
	j.ask("b")
	require.Equal(t, []string{"a", "b"}, j.in("a"))
	require.Equal(t, j.in("a"), j.in("b"))
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
						m.MemberLeft(left.cfg.Me, left.Note())
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
				j.machines["d"].MemberLeft(left.cfg.Me, left.Note())
				j.settle()
				j.ask(j.names()...)
				if how == "left" {
					j.machines["c"].MemberLeft(left.cfg.Me, left.Note())
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

// A view that some members have confirmed may have been formed. For those members, the next view must follow it as well as the last
// view that is known to be formed.
func TestAViewThatMayHaveBeenFormed(t *testing.T) {
	j := newJob(t, "a", "b", "c", "d", "e")
	j.ask(j.names()...)
	j.away = map[string]bool{"d": true, "e": true}
	for _, name := range []string{"a", "b", "c"} {
		j.machines[name].Ask()
	}
	for range 2 {
		j.meet("a") // proposes a view of a, b and c, which a and b confirm
	}
	j.meet("b")
	require.Equal(t, int64(2), j.machines["b"].Note().Confirmed)
	j.away = map[string]bool{"a": true, "b": true} // c has not received the proposal
	j.settle()
	j.ask("c", "d", "e")
	require.Equal(t, []string{"c", "d", "e"}, j.in("c"))
	j.ask("a", "b")
	require.Empty(t, j.in("a"), "a and b are more than half of a, b and c, but not of the previous view")
	j.away = nil
	j.settle()
	j.ask(j.names()...)
	require.Equal(t, j.names(), j.in("a"), "c never confirmed the view of a, b and c, and a knows that")
}

// A later attempt with the same members is impossible; the earlier one was formed, and one of its members does not know that.
func TestAnEarlierAttemptIsRememberedWhenALaterOneIsImpossible(t *testing.T) {
	j := newJob(t, "a", "b", "c", "d", "e")
	j.ask(j.names()...)
	sees := func(name string, others ...string) { // delivers their notes, but no proposals
		peers := map[ID]Peer{}
		for _, other := range others {
			o := j.machines[other]
			peers[o.cfg.Me] = Peer{o.Note(), o.cfg.At}
		}
		j.machines[name].See(peers)
	}
	j.away = map[string]bool{"d": true, "e": true}
	for _, name := range []string{"a", "b", "c"} {
		j.machines[name].Ask()
	}
	for _, name := range []string{"a", "b", "c", "b"} {
		j.meet(name)
	}
	require.Equal(t, []string{"a", "b", "c"}, j.in("b"))
	require.Equal(t, j.in("b"), j.in("c"))
	require.Empty(t, j.in("a"), "a has not seen that the others confirmed view 2")

	j.machines["b"].Ask()
	j.machines["c"].Ask()
	sees("a", "b", "c")
	require.Equal(t, int64(3), j.machines["a"].Note().Confirmed, "a has confirmed view 3, its second attempt with b and c, which do not receive it")
	j.away = map[string]bool{"b": true, "c": true}
	for _, name := range []string{"b", "c", "b"} {
		j.meet(name)
	}
	require.Equal(t, []string{"b", "c"}, j.in("b"))
	require.Equal(t, j.in("b"), j.in("c"))
	sees("a", "b")
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
	require.Equal(t, "b was started again", j.machines["a"].News().Ended)
	old.See(map[ID]Peer{j.machines["b"].cfg.Me: {}})
	require.True(t, old.Replaced())
	require.Equal(t, "a later incarnation of b has taken its place", old.News().Ended)
	old.Ask()
	require.Nil(t, old.Taken())
}

// The clock of a restarted process may be behind the clock of its earlier incarnation.
func TestAMemberRisesAboveKnownIncarnations(t *testing.T) {
	j := newJob(t, "a", "b")
	j.ask("a", "b")
	j.lives = 0
	m := j.start("b")
	require.Equal(t, int64(1), m.Rise().Incarnation, "the new b knows of no earlier incarnation")
	m.Learn(j.machines["a"].Lives())
	require.True(t, m.Replaced())
	risen := m.Rise()
	require.Greater(t, risen.Incarnation, int64(2))
	require.False(t, m.Replaced())
	require.Equal(t, risen, m.Rise())
	j.ask("a", "b")
	require.Equal(t, []string{"a", "b"}, j.in("b"))
	require.True(t, j.machines["a"].Taken().Has(risen))
}

// Two incarnations that know the same earlier one, but not each other, must not have the same number: otherwise confirmations by
// one would be counted for the other.
func TestIncarnationsThatRiseDiffer(t *testing.T) {
	known := map[string]int64{"b": 7_000_000_000}
	risen := map[int64]bool{}
	for _, clock := range []int64{1_000_000_005, 1_000_000_006, 2_999_999_999, 3_000_000_000} {
		m := New(Config{Me: ID{"b", clock}})
		m.Learn(known)
		life := m.Rise().Incarnation
		require.Greater(t, life, known["b"])
		require.LessOrEqual(t, life, known["b"]+int64(time.Second))
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
	require.Empty(t, j.in("b"), "a confirms no view after it has left")
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

func TestInvalidProposalsAreRefused(t *testing.T) {
	a, b := Member{ID{"a", 1}, ""}, Member{ID{"b", 1}, ""}
	m := New(Config{Me: a.ID, MinMembers: 1})
	for _, p := range []Proposal{
		{},
		{View: View{Number: 1}},
		{View: View{Number: 1, Members: []Member{b, a}}},
		{View: View{Number: 1, Members: []Member{a, {ID{"a", 2}, ""}}}},
		{View: View{Number: 1, Members: []Member{a}}, Base: &View{Number: 2, Members: []Member{a}}},
		{View: View{Number: 2, Members: []Member{a}}, Base: &View{Members: []Member{a}}},
	} {
		require.False(t, m.Hear(p), "%+v", p)
	}
	require.True(t, m.Hear(Proposal{View: View{Number: 1, Members: []Member{a, b}}}))
}

// A member adds one to the largest number that it knows. A number near the largest integer must not end that, and must not make a member
// loop, with the lock of its node held.
func TestNumbersThatCouldOverflowAreIgnored(t *testing.T) {
	other := ID{"b", 1}
	for _, number := range []int64{math.MaxInt64, math.MaxInt64 - 1, -1} {
		ended := make(chan *Machine, 1)
		go func() {
			m := New(Config{Me: ID{"a", 1}, Address: "store of a", At: "a", Seeds: [][]string{{"a"}}, MinMembers: 1})
			m.Ask()
			m.Hear(Proposal{View: View{Number: number, Members: []Member{{ID: other}}}})
			m.See(map[ID]Peer{other: {Note: Note{Wants: number}}})
			m.Ask()
			m.See(map[ID]Peer{other: {Note: Note{Confirmed: number, Digest: "x"}}})
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

func TestOnlyTheProposerRemindsMembers(t *testing.T) {
	j := newJob(t, "a", "b")
	j.machines["a"].Ask()
	j.machines["b"].Ask()
	require.Nil(t, j.machines["b"].Missing())
	j.machines["a"].See(map[ID]Peer{j.machines["b"].cfg.Me: {j.machines["b"].Note(), "b"}})
	require.Equal(t, []ID{j.machines["b"].cfg.Me}, j.machines["a"].Missing())
	require.Equal(t, int64(1), j.machines["a"].Proposed())
	j.settle()
	require.Nil(t, j.machines["a"].Missing())
	require.Equal(t, []string{"a", "b"}, j.in("b"))
}

func TestAMemberThatHasLeftConfirmsNoView(t *testing.T) {
	j := newJob(t, "a")
	a := j.machines["a"]
	a.Leave()
	last := a.Note()
	a.Ask()
	a.Cancel()
	require.Equal(t, last, a.Note(), "the note of a member that left must not change: the last one was sent")
	require.Nil(t, a.Taken())
}

// All members confirm a view, and leave it before they learn that the others have confirmed it. The view is formed all the same, so
// the next one needs more than half of its members, instead of more than half of the larger view before it.
func TestAViewThatWasLeftIsFormed(t *testing.T) {
	j := newJob(t, "a", "b", "c", "d", "e")
	j.ask(j.names()...)
	j.away = map[string]bool{"d": true, "e": true}
	j.settle()
	for _, name := range []string{"a", "b", "c"} {
		j.machines[name].Ask()
	}
	j.meet("b")
	j.meet("c")
	j.meet("a")
	proposal, _ := j.machines["a"].Proposal()
	for _, name := range []string{"b", "c"} {
		require.True(t, j.machines[name].Hear(proposal))
	}
	for _, name := range []string{"a", "b", "c"} {
		require.Equal(t, int64(2), j.machines[name].Note().Confirmed)
		j.machines[name].Cancel()
	}
	j.settle()
	j.away["c"] = true
	j.ask("a", "b")
	require.Equal(t, []string{"a", "b"}, j.in("b"))
	j.ask("c", "d", "e")
	require.Empty(t, j.in("c"))
}

// A name must be unique in a job at a time. If it is not, a second process counts as a later incarnation of the first one.
func TestOneNameOnBothSidesOfACut(t *testing.T) {
	// beyond cuts a member off, and frees its name for another process.
	beyond := func(j *job, name string) {
		j.machines["other "+name] = j.machines[name]
		delete(j.machines, name)
		j.away["other "+name] = true
	}
	t.Run("the smaller part has the first one", func(t *testing.T) {
		j := newJob(t, "a", "b", "c")
		j.away = map[string]bool{}
		j.ask("a", "b", "c")
		beyond(j, "c")
		j.start("c")
		j.ask(j.names()...)
		require.Equal(t, []string{"a", "b", "c"}, j.in("c"))
		require.Empty(t, j.in("other c"))
		j.away = nil
		j.settle()
		require.True(t, j.machines["other c"].Replaced())
		require.Equal(t, News{View: 2}, j.machines["c"].News())
	})
	t.Run("the smaller part has the second one", func(t *testing.T) {
		j := newJob(t, "a", "b", "c")
		j.away = map[string]bool{}
		j.ask("a", "b", "c")
		beyond(j, "a")
		beyond(j, "b")
		beyond(j, "c") // c is in the larger part
		j.start("c")
		j.start("d")
		j.ask("c", "d")
		require.Empty(t, j.in("c"), "c and d know no member that trains")
		require.Equal(t, []string{"a", "b", "c"}, j.in("other c"))
		j.away = nil
		j.settle()
		require.Equal(t, "c was started again", j.machines["other a"].News().Ended)
		require.Equal(t, "a later incarnation of c has taken its place", j.machines["other c"].News().Ended)
		delete(j.machines, "other c")
		j.ask(j.names()...)
		require.Equal(t, []string{"a", "b", "c", "d"}, j.in("c"))
	})
	t.Run("half has the second one", func(t *testing.T) {
		j := newJob(t, "a", "b")
		j.away = map[string]bool{}
		j.ask("a", "b")
		beyond(j, "b")
		j.start("b")
		j.ask(j.names()...)
		require.Equal(t, []string{"a", "b"}, j.in("a"))
		require.Empty(t, j.in("other b"), "a is away, and has not ended")

		// Two views are live: names must be unique (docs/ftlib.md).
		a := j.machines["a"]
		a.Leave()
		delete(j.machines, "a")
		for _, m := range j.machines {
			m.MemberLeft(a.cfg.Me, a.Note())
		}
		j.ask("b")
		require.Equal(t, []string{"b"}, j.in("b"))
		require.Equal(t, []string{"b"}, j.in("other b"), "the other b does not know that it counts as ended")
	})
	t.Run("each half has a second one of all names of the other half", func(t *testing.T) {
		j := newJob(t, "a", "b")
		j.away = map[string]bool{}
		j.ask("a", "b")
		beyond(j, "b")
		j.start("b")
		first := j.machines["a"]
		j.start("a")
		beyond(j, "a")
		j.machines["a"] = first
		j.ask(j.names()...)
		require.Equal(t, []string{"a", "b"}, j.in("a"))
		require.Equal(t, []string{"a", "b"}, j.in("other a"), "for each half, the other half has ended")
		j.away = nil
		j.settle()
		require.True(t, first.Replaced())
		require.True(t, j.machines["other b"].Replaced())
		delete(j.machines, "a")
		delete(j.machines, "other b")
		j.ask(j.names()...)
		require.Equal(t, []string{"a", "b"}, j.in("b"), "the later incarnations continue together")
		require.Equal(t, j.in("b"), j.in("other a"))
	})
}
