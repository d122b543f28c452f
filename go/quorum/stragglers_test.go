package quorum

import (
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestThePaceOfARank(t *testing.T) {
	ms := func(n ...int) (all []time.Duration) {
		for _, one := range n {
			all = append(all, time.Duration(one)*time.Millisecond)
		}
		return all
	}
	for _, c := range []struct {
		times []time.Duration
		own   time.Duration
	}{
		{ms(100, 100, 100, 100, 100, 100, 100, 100, 100), 0},
		{ms(100, 100, 100, 100, 100, 100, 100, 100, 100, 100), 100 * time.Millisecond},
		{ms(100, 9000, 100, 100, 1, 100, 2, 100, 100, 9000), 100 * time.Millisecond},
		{ms(100, 110, 120, 130, 140, 150, 160, 170, 180, 190), 145 * time.Millisecond},
	} {
		p := PaceOf(3, c.times, "idle")
		assert.Equal(t, c.own, p.Own, "%v", c.times)
		assert.Equal(t, c.own > 0, p == Pace{Rank: 3, Own: c.own, Error: p.Error, Host: "idle"})
	}
	assert.Zero(t, PaceOf(0, ms(100, 100, 100, 100, 100, 100, 100, 100, 100, 100), "").Error)
	// the error of the mean of ten values that scatter evenly by 45: 45/sqrt(3)/sqrt(10)
	assert.InDelta(t, 8.2e6, PaceOf(0, ms(100, 110, 120, 130, 140, 150, 160, 170, 180, 190), "").Error, 4e6)
}

func TestWhichPaceIsAStragglers(t *testing.T) {
	pace := func(own, err int) Pace {
		return Pace{Own: time.Duration(own) * time.Millisecond, Error: time.Duration(err) * time.Millisecond}
	}
	for _, c := range []struct {
		p, usual Pace
		was      bool
		slow     bool
	}{
		{pace(112, 1), pace(100, 1), false, true},
		{pace(111, 1), pace(100, 1), false, false},
		{pace(130, 9), pace(100, 9), false, false}, // sequences of variable length
		{pace(300, 9), pace(100, 9), false, true},
		{pace(100, 0), pace(130, 0), false, false},
		{pace(107, 9), pace(100, 9), true, true},
		{pace(105, 0), pace(100, 0), true, false},
	} {
		assert.Equal(t, c.slow, slower(c.p, c.usual, c.was), "%+v", c)
	}
}

// runners is a job whose groups report their pace with each heartbeat.
type runners struct {
	t       *testing.T
	rng     *rand.Rand
	machine *Machine
	now     time.Time
	ids     []string
	last    map[string][]time.Duration
	named   []Report
}

func newRunners(t *testing.T, seed uint64, ids ...string) *runners {
	j := &runners{t: t, rng: rand.New(rand.NewPCG(seed, 1)), now: epoch, ids: ids,
		last: map[string][]time.Duration{}, machine: NewMachine(Policy{MinReplicas: 1,
			JoinTimeout: time.Minute, HeartbeatTimeout: 5 * time.Second}, epoch, 0)}
	for _, id := range ids {
		j.feed(Beat{ReplicaID: id})
	}
	for i, id := range ids {
		j.feed(Asked{Waiter: WaiterID(i + 1), Member: Member{ReplicaID: id}})
	}
	require.NotNil(t, j.machine.past.latest)
	return j
}

func (j *runners) feed(e Event) {
	for _, action := range j.machine.Step(e, j.now) {
		if a, ok := action.(Report); ok && a.What == MemberStraggles {
			j.named = append(j.named, a)
		}
	}
}

// step makes a step of a second, in which the groups work as many seconds as took says, with a scatter of 10 %
// (half of it up, half of it down).
func (j *runners) step(took func(id string) float64) {
	for _, id := range j.ids {
		seconds := took(id) * (0.95 + 0.1*j.rng.Float64())
		j.last[id] = append(j.last[id], time.Duration(seconds*1e9))
		j.last[id] = j.last[id][max(0, len(j.last[id])-PaceSteps):]
		j.feed(Beat{ReplicaID: id, Phase: Training, Pace: PaceOf(0, j.last[id], "load 1.0")})
	}
	j.now = j.now.Add(time.Second)
	j.feed(Tick{})
}

func equal(string) float64 { return 1 }

func TestInTenThousandStepsOfNoiseNoMemberIsNamed(t *testing.T) {
	for _, ids := range [][]string{{"a", "b"}, {"a", "b", "c", "d", "e", "f", "g", "h"}} {
		j := newRunners(t, 1, ids...)
		for range 10_000 {
			j.step(equal)
		}
		assert.Empty(t, j.named)
	}
}

func TestASlowdownOfAFifthIsFoundWithinTenSteps(t *testing.T) {
	for _, ids := range [][]string{{"a", "b"}, {"a", "b", "c", "d"}} {
		found, others := 0, 0
		const trials = 1000
		for trial := range uint64(trials) {
			j := newRunners(t, trial, ids...)
			for range 20 {
				j.step(equal)
			}
			for range PaceSteps {
				j.step(func(id string) float64 { return map[bool]float64{true: 1.2, false: 1}[id == "b"] })
			}
			for i, one := range j.named {
				if one.ReplicaID != "b" {
					others++
				} else if i == 0 {
					found++
				}
			}
		}
		assert.GreaterOrEqual(t, found, trials*99/100)
		assert.Zero(t, others)
	}
}

func TestAStragglerIsNamedOnceAndShownUntilItIsAsFastAgain(t *testing.T) {
	j := newRunners(t, 1, "a", "b", "c")
	for range 40 {
		j.step(func(id string) float64 { return map[bool]float64{true: 1.5, false: 1}[id == "c"] })
	}
	require.Len(t, j.named, 1)
	assert.Equal(t, "c", j.named[0].ReplicaID)
	assert.True(t, strings.HasPrefix(j.named[0].Reason, "rank 0 works 1."), j.named[0].Reason)
	assert.True(t, strings.HasSuffix(j.named[0].Reason, "; load 1.0"), j.named[0].Reason)
	slow := func() (ids []string) {
		for _, m := range j.machine.Describe(j.now).Members {
			if m.Straggler != "" {
				ids = append(ids, m.ReplicaID)
			}
		}
		return ids
	}
	assert.Equal(t, []string{"c"}, slow())
	for range 12 {
		j.step(equal)
	}
	assert.Empty(t, slow())
}

// A group alone has nothing to be compared with, nor one of which only published groups take part.
func TestNobodyIsAStragglerAlone(t *testing.T) {
	j := newRunners(t, 1, "a")
	for range 40 {
		j.step(func(string) float64 { return 9 })
	}
	assert.Empty(t, j.named)
	j = newRunners(t, 1, "a", "b")
	for range 40 {
		j.ids = []string{"a"}
		j.step(func(string) float64 { return 9 })
		j.feed(Beat{ReplicaID: "b"})
	}
	assert.Empty(t, j.named)
}
