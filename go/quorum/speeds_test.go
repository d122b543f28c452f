package quorum

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// pacesOf returns paces with these own times, in milliseconds, and the same error.
func pacesOf(err time.Duration, own ...int) (paces []Pace) {
	for _, ms := range own {
		paces = append(paces, Pace{Own: time.Duration(ms) * time.Millisecond, Error: err})
	}
	return paces
}

func TestTheSpeedsByWhichABatchIsCut(t *testing.T) {
	const exact, ms = time.Duration(0), time.Millisecond
	for _, c := range []struct {
		present []int64
		paces   []Pace
		next    []int64
	}{
		{[]int64{100, 100, 100, 100}, pacesOf(ms, 100, 100, 100, 200), []int64{100, 100, 100, 50}},
		{[]int64{100, 100, 100, 50}, pacesOf(ms, 100, 100, 100, 200), []int64{100, 100, 100, 50}},
		{[]int64{100, 100, 100, 50}, pacesOf(ms, 100, 100, 100, 100), []int64{100, 100, 100, 100}},
		{[]int64{100, 100, 100, 50}, pacesOf(ms, 100, 100, 100, 185), []int64{100, 100, 100, 50}},
		{[]int64{100, 100, 100, 100}, pacesOf(ms, 100, 100, 100, 50), []int64{100, 100, 100, 200}},
		{[]int64{100, 100, 100, 100}, pacesOf(ms, 100, 100, 200, 200), []int64{100, 100, 50, 50}},
		{[]int64{100, 100}, pacesOf(ms, 100, 115), []int64{100, 100}}, // it would save 7 %
		{[]int64{100, 100}, pacesOf(ms, 100, 130), []int64{100, 77}},
		// of 21 groups one is as fast as the others again: a step would be shorter by 2 %
		{append(slices.Repeat([]int64{100}, 20), 50), pacesOf(ms, slices.Repeat([]int{100}, 21)...),
			append(slices.Repeat([]int64{100}, 20), 50)},
		// members that are hardly off keep their speeds
		{[]int64{100, 100, 100, 100, 100}, pacesOf(ms, 100, 107, 95, 300, 100),
			[]int64{100, 100, 100, 33, 100}},
		// only the ratios count
		{[]int64{4, 4, 2}, pacesOf(ms, 100, 130, 200), []int64{200, 154, 100}},
		{[]int64{200, 100}, pacesOf(ms, 50, 100), []int64{200, 100}},
		// it may be chance, also that of a member which is about to be as fast as the others again
		{[]int64{100, 100, 100, 100}, pacesOf(15*ms, 100, 100, 100, 150), []int64{100, 100, 100, 100}},
		{[]int64{100, 100, 100, 50}, append(pacesOf(ms, 100, 100, 100), pacesOf(26*ms, 117)...),
			[]int64{100, 100, 100, 50}},
		// numbers that cannot be as far apart as the paces do not change for ever
		{[]int64{100, 100}, pacesOf(exact, 1, 1_000_000), []int64{100, 1}},
		{[]int64{100, 1}, pacesOf(exact, 1, 1_000_000), []int64{100, 1}},
		{[]int64{100, 100, 100}, pacesOf(exact, 1, 1_000_000, 1_000_000), []int64{maxSpeed, 100, 100}},
		{[]int64{maxSpeed, 100, 100}, pacesOf(exact, 1, 1_000_000, 1_000_000), []int64{maxSpeed, 100, 100}},
		{[]int64{100}, pacesOf(exact, 100), []int64{100}},
		// members whose paces are not known keep their speeds, in relation to the others
		{[]int64{100, 100, 100, 100}, pacesOf(ms, 0, 100, 100, 200), []int64{100, 100, 100, 50}},
		{[]int64{50, 100, 100, 50}, pacesOf(ms, 0, 100, 100, 100), []int64{50, 100, 100, 100}},
		{[]int64{200, 200, 200, 80}, pacesOf(ms, 100, 100, 200, 0), []int64{100, 100, 50, 40}},
		{[]int64{100, 100, 100}, pacesOf(exact, 0, 0, 500), []int64{100, 100, 100}},
	} {
		assert.Equal(t, c.next, recut(c.present, c.paces), "%+v", c)
	}
}

func TestImpossibleSpeedsAreNone(t *testing.T) {
	members := []Member{{ReplicaID: "a"}, {ReplicaID: "b"}}
	for _, c := range []struct {
		speeds []int64
		are    bool
	}{{[]int64{1, maxSpeed}, true}, {nil, false}, {[]int64{1}, false}, {[]int64{1, 1, 1}, false},
		{[]int64{0, 1}, false}, {[]int64{1, maxSpeed + 1}, false}} {
		assert.Equal(t, c.are, (&Quorum{Members: members, Speeds: c.speeds}).HasSpeeds(), "%v", c.speeds)
	}
	assert.False(t, (&Quorum{}).HasSpeeds())
}

// cutters is a job of groups with loaders, whose quorum stands.
type cutters struct {
	t       *testing.T
	rng     *rand.Rand
	machine *Machine
	now     time.Time
	waiter  WaiterID
	ids     []string
	last    map[string][]time.Duration
	at      int64 // the step that all groups are in
	latest  *Quorum
	calls   int
}

func newCutters(t *testing.T, ids ...string) *cutters {
	j := &cutters{t: t, rng: rand.New(rand.NewPCG(1, 1)), now: epoch, last: map[string][]time.Duration{},
		at: 1, machine: NewMachine(Policy{MinReplicas: 1, JoinTimeout: time.Minute,
			HeartbeatTimeout: 5 * time.Second}, epoch, 0)}
	for _, id := range ids {
		j.feed(Greeted{ReplicaID: id})
	}
	j.ids = ids
	j.ask(7, func(*Member) {})
	require.True(t, j.latest.Stands)
	return j
}

// ask lets all groups ask for the step that they are in.
func (j *cutters) ask(committed int64, change func(*Member)) {
	for _, id := range j.ids {
		j.waiter++
		m := Member{ReplicaID: id, Step: j.at, CommittedQuorumID: committed, CutsBySpeed: true}
		change(&m)
		j.feed(Asked{Waiter: j.waiter, Member: m})
	}
}

func (j *cutters) feed(e Event) {
	for _, action := range j.machine.Step(e, j.now) {
		switch a := action.(type) {
		case Call:
			j.calls++
			for _, id := range a.ReplicaIDs {
				j.feed(Stopped{ReplicaID: id, QuorumID: a.QuorumID, Step: j.at + 1})
			}
		case Round:
			j.at = a.Step
		case Deliver:
			j.latest = a.Quorum
		}
	}
}

// steps makes steps of a second with a scatter of 10 %. The groups ask for the step of a round.
func (j *cutters) steps(n int, took func(id string) float64) {
	for range n {
		for _, id := range j.ids {
			seconds := took(id) * (0.95 + 0.1*j.rng.Float64())
			j.last[id] = append(j.last[id], time.Duration(seconds*1e9))
			j.last[id] = j.last[id][max(0, len(j.last[id])-PaceSteps):]
			j.feed(Beat{ReplicaID: id, Step: j.at, Phase: Training, Pace: PaceOf(0, j.last[id], "")})
		}
		j.now = j.now.Add(time.Second)
		before := j.at
		j.feed(Tick{})
		if j.at > before {
			j.ask(j.latest.ID, func(*Member) {})
		} else {
			j.at++
		}
	}
}

func twice(slow string) func(string) float64 {
	return func(id string) float64 { return map[bool]float64{true: 2, false: 1}[id == slow] }
}

func TestASlowGroupGetsAQuorumInWhichItsSpeedIsLessAndAnotherOneAfterIt(t *testing.T) {
	j := newCutters(t, "a", "b", "c", "d")
	j.steps(20, equal)
	assert.Zero(t, j.calls)
	first := j.latest
	j.steps(12, twice("d"))
	assert.Equal(t, 1, j.calls)
	assert.Equal(t, first.ID, j.latest.ID, "the groups need no other connections")
	require.Len(t, j.latest.Speeds, 4)
	for i, speed := range []int64{100, 100, 100, 50} {
		assert.InEpsilon(t, speed, j.latest.Speeds[i], 0.06)
	}
	members := j.machine.Describe(j.now).Members
	assert.Equal(t, j.latest.Speeds[3], members[3].Speed)
	cut := j.latest.Speeds
	j.steps(1000, twice("d"))
	assert.Equal(t, 1, j.calls, "the speeds stay")
	assert.Equal(t, cut, j.latest.Speeds)
	j.steps(20, equal)
	assert.Equal(t, 2, j.calls)
	assert.Nil(t, j.latest.Speeds, "as equal as before")
}

func TestInTenThousandStepsOfNoiseTheCutStays(t *testing.T) {
	for _, ids := range [][]string{{"a", "b"}, {"a", "b", "c", "d", "e", "f", "g", "h"}} {
		j := newCutters(t, ids...)
		j.steps(10_000, equal)
		assert.Zero(t, j.calls)
		assert.Nil(t, j.latest.Speeds)
	}
}

func TestANewcomerIsAsFastAsTheUsualGroupAndTheOthersKeepTheirSpeeds(t *testing.T) {
	j := newCutters(t, "a", "b", "c", "e")
	j.steps(30, twice("c"))
	before := j.latest.Speeds
	require.Len(t, before, 4)
	j.feed(Greeted{ReplicaID: "d"})
	j.feed(Asked{Waiter: 1000, Member: Member{ReplicaID: "d", CommittedQuorumID: -1, CutsBySpeed: true}})
	j.ask(j.latest.ID, func(*Member) {})
	require.Len(t, j.latest.Members, 5)
	assert.Equal(t, slices.Insert(slices.Clone(before), 3, usualSpeed), j.latest.Speeds)
}

func TestOneGroupThatDoesNotCutBySpeedsPreventsThem(t *testing.T) {
	j := newCutters(t, "a", "b", "c")
	j.steps(30, twice("c"))
	require.NotNil(t, j.latest.Speeds)
	j.feed(Changes{ReplicaID: "a", Reason: "another setting"})
	j.ask(j.latest.ID, func(m *Member) { m.CutsBySpeed = m.ReplicaID != "a" })
	assert.Nil(t, j.latest.Speeds)
	calls := j.calls
	j.steps(30, twice("c"))
	assert.Nil(t, j.latest.Speeds)
	assert.Equal(t, calls, j.calls)
}
