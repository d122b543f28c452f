package quorum

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestWhichMembersShowThatAnExceptionRepeats(t *testing.T) {
	for _, c := range []struct {
		members []string
		device  bool
		repeats bool
	}{
		{[]string{"a:1"}, false, false},
		{[]string{"a:1", "a:1"}, false, false}, // two ranks of a group
		{[]string{"a:1", "b:1"}, false, true},
		{[]string{"a:1", "a:2"}, false, true},
		{[]string{"a:1", "a:2"}, true, false}, // its device may be broken
		{[]string{"a:1", "b:1"}, true, true},
		{[]string{"a", "b"}, false, true}, // names without an UUID
		{nil, false, false},
	} {
		assert.Equal(t, c.repeats, repeats(c.members, c.device), "%+v", c)
	}
}

// raises lets a member end by an exception, and returns the verdict.
func raises(t *testing.T, m *Machine, id string, d Digest, now time.Time) (verdict string) {
	t.Helper()
	answered := false
	for _, action := range m.Step(Raised{ReplicaID: id, Digest: d, Text: "Traceback\n"}, now) {
		if judged, is := action.(Judged); is {
			require.Equal(t, id, judged.ReplicaID)
			verdict, answered = judged.Verdict, true
		}
	}
	require.True(t, answered)
	return verdict
}

func machineOf(ids ...string) *Machine {
	m := NewMachine(Policy{MinReplicas: 1, JoinTimeout: time.Minute, HeartbeatTimeout: 5 * time.Second},
		epoch, 0)
	for _, id := range ids {
		m.Step(Beat{ReplicaID: id}, epoch)
	}
	return m
}

func TestTheSecondOfTwoEqualExceptionsStopsTheJob(t *testing.T) {
	m := machineOf("a:1", "b:1", "c:1")
	d := Digest{Type: "ValueError", Place: "train.py:7 in loss", Step: 10, Unit: "4, 5"}
	m.Step(Asked{Waiter: 1, Member: Member{ReplicaID: "c:1", Step: 10}}, epoch)
	assert.Empty(t, raises(t, m, "a:1", d, epoch))
	assert.Empty(t, raises(t, m, "a:1", d, epoch), "another rank of the group")
	for i, other := range []Digest{
		{"KeyError", d.Place, d.Step, d.Unit}, {d.Type, "train.py:8 in loss", d.Step, d.Unit},
		{d.Type, d.Place, 11, d.Unit}, {d.Type, d.Place, d.Step, "6, 7"}, {d.Type, d.Place, d.Step, ""},
	} {
		assert.Empty(t, raises(t, m, fmt.Sprintf("d:%d", i), other, epoch), "%+v", other)
	}
	actions := m.Step(Raised{ReplicaID: "b:1", Digest: d, Text: "Traceback\n"}, epoch)
	const verdict = "the job stops: the same exception has ended a:1 and b:1: ValueError at train.py:7 in " +
		"loss in step 10, unit 4, 5\nTraceback\n"
	assert.Equal(t, []Action{Report{What: JobStops, Reason: verdict}, Refuse{1, Poisoned, verdict}, Judged{"b:1", verdict}}, actions)
	assert.Equal(t, verdict, m.Describe(epoch).Stopped)

	// It is said once; later ones are answered, and no request is accepted.
	assert.Equal(t, verdict, raises(t, m, "c:1", d, epoch))
	assert.Equal(t, []Action{Refuse{2, Poisoned, verdict}},
		m.Step(Asked{Waiter: 2, Member: Member{ReplicaID: "b:2", Step: 10}}, epoch))
}

// skips lets a member end by an exception in a unit that the groups are to leave out.
func skips(m *Machine, id string, d Digest, unit string) (left, stopped bool) {
	for _, action := range m.Step(Raised{ReplicaID: id, Digest: d, Skip: unit, Text: "Traceback\n"}, epoch) {
		if a, ok := action.(Report); ok {
			left, stopped = left || a.What == UnitSkipped, stopped || a.What == JobStops
		}
	}
	return left, stopped
}

func TestAUnitIsLeftOutInsteadOfAStop(t *testing.T) {
	m := machineOf("a:1", "b:1", "c:1")
	d := func(unit string) Digest { return Digest{Type: "ValueError", Place: "train.py:7", Step: 10, Unit: unit} }
	type says struct{ left, stopped bool }
	for i, c := range []struct {
		id, unit string
		says
	}{
		{"a:1", "0.10.3", says{}},
		{"a:1", "0.10.3", says{}}, // another rank of the group
		{"b:1", "0.10.3", says{left: true}},
		{"c:1", "0.10.3", says{}}, // it had not received the quorum that names the unit
		{"a:2", "0.10.1", says{}},
		{"b:2", "0.10.1", says{left: true}},
		{"a:3", "0.10.2", says{}},
		{"b:3", "0.10.2", says{stopped: true}}, // the third unit of a step: the code is at fault
	} {
		left, stopped := skips(m, c.id, d(c.unit), c.unit)
		assert.Equal(t, [2]bool{c.left, c.stopped}, [2]bool{left, stopped}, "%d: %+v", i, c)
	}
}

func TestAUnitThatEndsGroupsThoughItIsLeftOutStopsTheJob(t *testing.T) {
	m := machineOf("a:1")
	d := Digest{Type: "ValueError", Step: 10}
	for life := range mostEnded + 1 {
		left, stopped := skips(m, fmt.Sprintf("a:%d", life), d, "0.10.3")
		assert.Equal(t, life == 1, left)
		assert.Equal(t, life == mostEnded, stopped)
	}
}

func TestQuorumsNameTheUnitsThatAreLeftOutUntilTheirStepIsOver(t *testing.T) {
	m := machineOf("a:1", "b:1", "c:1", "d:1")
	skips(m, "a:1", Digest{Step: 10}, "0.10.3")
	skips(m, "b:1", Digest{Step: 10}, "0.10.3")
	for step, left := range map[int64][]string{9: {"0.10.3"}, 10: {"0.10.3"}, 11: nil} {
		assert.Equal(t, left, m.poison.leftOut(step))
	}
	m = machineOf("a:1")
	skips(m, "b:1", Digest{Step: 10}, "0.10.3")
	skips(m, "b:2", Digest{Step: 10}, "0.10.3")
	var delivered *Quorum
	for _, action := range m.Step(Asked{Waiter: 1, Member: Member{ReplicaID: "a:1", Step: 10}}, epoch) {
		if a, is := action.(Deliver); is {
			delivered = a.Quorum
		}
	}
	require.NotNil(t, delivered)
	assert.Equal(t, []string{"0.10.3"}, delivered.Skipped)
}

// A lighthouse that is started again, or the next leader, has the units from its disk, from the log or from a
// member: the groups would end twice more by each of them.
func TestUnitsAreLeftOutAfterARestartOfTheLighthouse(t *testing.T) {
	q := &Quorum{ID: epoch.UnixMilli(), Members: []Member{{ReplicaID: "a:1", Step: 9}},
		Skipped: []string{"0.10.3", "0.10.4"}}
	for name, shown := range map[string]Recalled{
		"disk": {Kept: Kept{Past: q.Past()}}, "member": {Quorum: q, From: "a:1"},
	} {
		m := NewMachine(Policy{MinReplicas: 1, JoinTimeout: time.Minute, HeartbeatTimeout: 5 * time.Second},
			epoch, 0)
		m.Step(shown, epoch)
		m.Step(shown, epoch)
		var formed *Quorum
		var kept Past
		for _, action := range m.Step(Asked{Waiter: 1, Member: Member{ReplicaID: "a:1", Step: 10}}, epoch) {
			switch a := action.(type) {
			case Deliver:
				formed = a.Quorum
			case Keep:
				kept = a.Past
			}
		}
		require.NotNil(t, formed, name)
		assert.Equal(t, q.Skipped, formed.Skipped, name)
		assert.Equal(t, q.Skipped, kept.Skipped, name)
		left, stopped := skips(m, "a:2", Digest{Step: 10}, "0.10.3")
		assert.False(t, left || stopped, name)
		m.poison.forget()
		assert.Empty(t, m.poison.leftOut(q.MaxStep()), name)
	}
}

// A job whose groups have all ended for a while is over: the next one may have other data.
func TestAStoppedJobIsForgottenAfterItsEnd(t *testing.T) {
	m := machineOf("a:1", "b:1")
	d := Digest{Type: "ValueError", Step: 10}
	raises(t, m, "a:1", d, epoch)
	require.NotEmpty(t, raises(t, m, "b:1", d, epoch))
	now := epoch
	for range 10 { // as long as a member lives
		now = now.Add(4 * time.Second)
		m.Step(Beat{ReplicaID: "a:1"}, now)
		m.Step(Tick{}, now)
	}
	require.NotEmpty(t, m.poison.verdict)
	ended := now.Add(5 * time.Second)
	m.Step(Tick{}, ended)
	m.Step(Tick{}, ended.Add(stoppedFor-time.Second))
	require.NotEmpty(t, m.poison.verdict)
	m.Step(Tick{}, ended.Add(stoppedFor))
	assert.Empty(t, m.poison.verdict)
	assert.Empty(t, raises(t, m, "a:2", d, ended.Add(stoppedFor)))
}

// Kubernetes starts a pod again after ten minutes, if it has failed some times.
func TestAStoppedRunStaysStopped(t *testing.T) {
	for _, late := range []bool{false, true} { // a group of the stopped run asks again, or none does
		m := machineOf()
		asks := func(id, run string, now time.Time) (refused bool) {
			m.Step(Greeted{ReplicaID: id}, now) // on its stream: it counts as healthy before it asks
			for _, action := range m.Step(Asked{Waiter: 1, Member: Member{ReplicaID: id}, Run: run}, now) {
				r, is := action.(Refuse)
				refused = refused || is && r.Why == Poisoned
			}
			m.Step(Withdrawn{ReplicaID: id, Waiter: 1}, now)
			return refused
		}
		require.False(t, asks("a:1", "r", epoch))
		require.False(t, asks("b:1", "r", epoch))
		d := Digest{Type: "ValueError", Step: 10}
		raises(t, m, "a:1", d, epoch)
		require.NotEmpty(t, raises(t, m, "b:1", d, epoch))
		now := epoch.Add(time.Second)
		assert.True(t, asks("x:1", "s", now), "its members have not ended yet")
		now = now.Add(10 * time.Second)
		m.Step(Tick{}, now)
		if late {
			assert.True(t, asks("a:2", "r", now))
			now = now.Add(time.Hour)
			m.Step(Tick{}, now)
			m.Step(Tick{}, now.Add(2*stoppedFor))
			now = now.Add(3 * stoppedFor)
			assert.True(t, asks("a:3", "r", now))
		}
		assert.False(t, asks("a:4", "s", now), "another run is another job")
		assert.Empty(t, m.poison.verdict)
	}
}

func TestFewExceptionsAreRemembered(t *testing.T) {
	m := machineOf("a:1")
	for step := range int64(3 * mostDigests) {
		raises(t, m, "a:1", Digest{Step: step}, epoch)
	}
	assert.Len(t, m.poison.seen, mostDigests)
	assert.Empty(t, raises(t, m, "b:1", Digest{Step: 0}, epoch), "it is forgotten")
	assert.NotEmpty(t, raises(t, m, "b:1", Digest{Step: 3*mostDigests - 1}, epoch))
}

// fails plays a history of a job of four groups, in which groups are killed at random: most of them end without
// an exception, a few with one of their own, of a kind and at a place that others have as well. If there is a
// poisoned unit, each group that computes it ends with the same exception. It returns the number of failures
// by the poison, and whether the job has stopped.
func fails(t *testing.T, rng *rand.Rand, poisoned bool) (failures int, stopped bool) {
	t.Helper()
	const groups, steps = 4, 300
	m := machineOf()
	now, at := epoch, int64(rng.IntN(steps))
	lives := [groups]int{}
	id := func(g int) string { return fmt.Sprintf("%c:%d", 'a'+g, lives[g]) }
	owner := rng.IntN(groups) // of the poisoned unit
	for step := int64(0); step < steps; {
		now = now.Add(100 * time.Millisecond)
		m.Step(Tick{}, now)
		for g := range groups {
			m.Step(Beat{ReplicaID: id(g)}, now)
			if rng.IntN(200) == 0 {
				if rng.IntN(50) == 0 {
					verdict := raises(t, m, id(g), Digest{"OutOfMemoryError", "train.py:3 in forward", step, ""},
						now)
					if verdict != "" {
						return failures, true
					}
				}
				lives[g]++
			}
		}
		if poisoned && step == at {
			d := Digest{"ValueError", "train.py:7 in loss", step, "12, 13"}
			failures++
			verdict := raises(t, m, id(owner), d, now)
			if verdict != "" {
				return failures, true
			}
			lives[owner]++
			owner = rng.IntN(groups) // the step comes again, and another group may have the unit
			continue
		}
		step++
	}
	return failures, false
}

func TestAPoisonedUnitStopsTheJobAtItsSecondFailureAndKillsNever(t *testing.T) {
	for seed := range uint64(1000) {
		failures, stopped := fails(t, rand.New(rand.NewPCG(seed, 1)), true)
		require.True(t, stopped, "seed %d", seed)
		require.Equal(t, 2, failures, "seed %d", seed)
	}
	wrong := 0
	for seed := range uint64(1000) {
		_, stopped := fails(t, rand.New(rand.NewPCG(seed, 2)), false)
		if stopped {
			wrong++
		}
	}
	assert.Zero(t, wrong)
}

func TestTheVerdictHasTheTraceback(t *testing.T) {
	m := machineOf("a:1", "b:1")
	raises(t, m, "a:1", Digest{}, epoch)
	assert.True(t, strings.HasSuffix(raises(t, m, "b:1", Digest{}, epoch), "Traceback\n"))
}
