package quorum

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func named(ids ...string) []Member {
	members := make([]Member, len(ids))
	for i, id := range ids {
		members[i] = Member{ReplicaID: id}
	}
	return members
}

func TestWhatChangedInAList(t *testing.T) {
	moved := Member{ReplicaID: "b", Address: "elsewhere"}
	for _, test := range []struct {
		name          string
		before, after []Member
		want          Change
	}{
		{"nothing", named("a", "b"), named("a", "b"), Change{}},
		{"two empty lists", nil, nil, Change{}},
		{"only steps", named("a"), []Member{{ReplicaID: "a", Step: 7, CommitFailures: 1, CommittedQuorumID: 5}}, Change{}},
		{"one left", named("a", "b", "c"), named("a", "c"), Change{Left: []int{1}}},
		{"all left", named("a", "b"), nil, Change{Left: []int{0, 1}}},
		{"one joined", named("a", "c"), named("a", "b", "c"), Change{Set: named("b")}},
		{"the first", nil, named("a", "b"), Change{Set: named("a", "b")}},
		{"one moved", named("a", "b", "c"), []Member{{ReplicaID: "a"}, moved, {ReplicaID: "c"}}, Change{Set: []Member{moved}}},
		{"one took another's place", named("a", "b"), named("a", "c"), Change{Left: []int{1}, Set: named("c")}},
	} {
		t.Run(test.name, func(t *testing.T) {
			assert.Equal(t, test.want, Compare(test.before, test.after))
		})
	}
}

func TestTheChangeSinceAHeldList(t *testing.T) {
	quorum := func(ids ...string) *Quorum {
		return &Quorum{Members: named(ids...), Revision: RevisionOf(named(ids...))}
	}
	before, now := quorum("a", "b"), quorum("a", "b", "c")
	assert.Equal(t, Change{}, now.Since(now.Revision, before), "the member holds this list")
	assert.Equal(t, Change{}, now.Since(now.Revision, nil), "the member holds this list, from a lighthouse that was restarted meanwhile")
	assert.Equal(t, Change{Set: named("c")}, now.Since(before.Revision, before))
	whole := Change{Whole: true, Set: now.Members}
	assert.Equal(t, whole, now.Since(0, before), "the member holds no list")
	assert.Equal(t, whole, now.Since(before.Revision, nil), "a revision that is no longer known")
	assert.Equal(t, whole, now.Since(quorum("x").Revision, before))
	others := quorum("x", "y")
	assert.Equal(t, whole, now.Since(others.Revision, others), "every member has changed: the whole list is sent")
}

func TestAChangeForAnotherList(t *testing.T) {
	for name, test := range map[string]struct {
		before []Member
		change Change
	}{
		"a place outside":         {named("a"), Change{Left: []int{1}}},
		"a negative place":        {named("a"), Change{Left: []int{-1}}},
		"places not in order":     {named("a", "b", "c"), Change{Left: []int{2, 0}}},
		"a place twice":           {named("a", "b"), Change{Left: []int{0, 0}}},
		"members not in order":    {named("a"), Change{Set: named("c", "b")}},
		"a member twice":          {nil, Change{Whole: true, Set: named("a", "a")}},
		"left and set":            {named("a", "b"), Change{Left: []int{1}, Set: named("b")}},
		"set behind its place":    {named("a", "b", "c"), Change{Set: named("b", "a")}},
		"left without a list":     {named("a"), Change{Whole: true, Left: []int{0}}},
		"more left than there is": {nil, Change{Left: []int{0, 1, 2}}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := test.change.Apply(test.before)
			assert.Error(t, err)
		})
	}
	_, err := States{Others: []PlacedState{{Place: 1}}}.Apply(named("a"))
	assert.Error(t, err)
	_, err = States{Others: []PlacedState{{Place: -1}}}.Apply(named("a"))
	assert.Error(t, err)
}

// randomList draws some of a few possible members, each with random fields.
func randomList(r *rand.Rand) []Member {
	var members []Member
	for i := range 12 {
		if r.IntN(2) == 0 {
			continue
		}
		members = append(members, Member{
			ReplicaID: fmt.Sprintf("r%02d", i), Address: fmt.Sprint(r.IntN(2)), ShrinkOnly: r.IntN(4) == 0,
			Step: r.Int64N(3), CommittedQuorumID: r.Int64N(2), CommitFailures: r.Int64N(2),
			Handles: slices.Repeat([]string{"h"}, r.IntN(3)),
			Layouts: slices.Repeat([]string{"l"}, r.IntN(3)),
		})
	}
	return members
}

func TestADeltaAppliedToTheOldIsTheNew(t *testing.T) {
	for seed := range uint64(20000) {
		r := rand.New(rand.NewPCG(seed, 0))
		before := &Quorum{Members: randomList(r)}
		before.Revision = RevisionOf(before.Members)
		after := &Quorum{Members: randomList(r)}
		if r.IntN(3) == 0 { // most rounds change only the steps
			after.Members = slices.Clone(before.Members)
			for i := range after.Members {
				after.Members[i].SetState(State{Step: r.Int64N(2)})
			}
		}
		after.Revision = revisionAfter(before, after.Members)
		untouched := slices.Clone(before.Members)

		held := []Revision{0, before.Revision, after.Revision}[r.IntN(3)]
		holds := map[Revision][]Member{before.Revision: before.Members, after.Revision: after.Members}[held]
		got, err := after.Since(held, before).Apply(holds)
		require.NoError(t, err, "seed %d", seed)
		require.Equal(t, after.Revision, RevisionOf(got), "seed %d", seed)
		got, err = StatesOf(after.Members).Apply(got)
		require.NoError(t, err)
		require.True(t, slices.EqualFunc(after.Members, got, func(a, b Member) bool { return reflect.DeepEqual(a, b) }), "seed %d: %v, not %v", seed, got, after.Members)
		require.True(t, reflect.DeepEqual(untouched, before.Members), "seed %d: the old list was changed", seed)
	}
}

// A field that is added to Member must be part of its State, or be compared and digested.
func TestEveryFieldOfAMemberCounts(t *testing.T) {
	for i := range reflect.TypeFor[Member]().NumField() {
		var m Member
		field := reflect.ValueOf(&m).Elem().Field(i)
		switch field.Kind() {
		case reflect.String:
			field.SetString("x")
		case reflect.Int64:
			field.SetInt(1)
		case reflect.Uint64:
			field.SetUint(1)
		case reflect.Bool:
			field.SetBool(true)
		case reflect.Slice:
			field.Set(reflect.MakeSlice(field.Type(), 1, 1))
		default:
			t.Fatalf("%s: add its kind to this test", reflect.TypeFor[Member]().Field(i).Name)
		}
		var none Member
		name := reflect.TypeFor[Member]().Field(i).Name
		inState := m.State() != none.State()
		assert.Equal(t, inState, m.SameButState(&none), "%s", name)
		assert.Equal(t, inState, RevisionOf([]Member{m}) == RevisionOf([]Member{none}), "%s", name)
	}
	assert.NotEqual(t, RevisionOf([]Member{{ReplicaID: "ab"}}), RevisionOf([]Member{{ReplicaID: "a", Address: "b"}}))
	assert.NotZero(t, RevisionOf(nil))
}

func TestStatesAreReportedInOne(t *testing.T) {
	members := named("a", "b", "c", "d")
	for i := range members {
		members[i].Step = 9
	}
	assert.Equal(t, States{Common: State{Step: 9}}, StatesOf(members))
	members[2].SetState(State{Step: 3, CommitFailures: 1})
	assert.Equal(t, States{Common: State{Step: 9}, Others: []PlacedState{{2, State{Step: 3, CommitFailures: 1}}}}, StatesOf(members))
}

func TestTheRevisionStaysWhileTheListIsTheSame(t *testing.T) {
	r := newRing(2)
	first := r.round(t, "a", "b")
	require.Nil(t, first.Before)
	second := r.round(t, "b", "a")
	require.Same(t, first.Quorum, second.Before)
	require.Equal(t, RevisionOf(named("a", "b")), first.Quorum.Revision)
	require.Equal(t, first.Quorum.Revision, second.Quorum.Revision)
	r.ask(Member{ReplicaID: "c"})
	third := r.round(t, "a", "b")
	require.Equal(t, RevisionOf(named("a", "b", "c")), third.Quorum.Revision)
}
