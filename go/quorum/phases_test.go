package quorum

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/torchftpb"
)

func TestThePhasesAreThoseOfTheProto(t *testing.T) {
	assert.Len(t, torchftpb.Phase_name, len(Phases())+1)
	for number, name := range torchftpb.Phase_name {
		p := PhaseOf(torchftpb.Phase(number))
		if p != Unsaid {
			assert.Equal(t, torchftpb.Phase(number).String(), upper(p.String()))
		}
		assert.Equal(t, name == "UNSAID", p == Unsaid)
	}
	assert.Equal(t, Unsaid, PhaseOf(torchftpb.Phase(-1)))
	assert.Equal(t, Unsaid, PhaseOf(torchftpb.Phase(1000)))
}

func upper(name string) string {
	text := []byte(name)
	for i, c := range text {
		if c >= 'a' {
			text[i] = c - 'a' + 'A'
		}
	}
	return string(text)
}

func TestTheLimitOfAPhase(t *testing.T) {
	second := func(n ...int) (all []time.Duration) {
		for _, s := range n {
			all = append(all, time.Duration(s)*time.Second)
		}
		return all
	}
	for _, c := range []struct {
		eject time.Duration
		phase Phase
		past  []time.Duration
		limit time.Duration
	}{
		{EjectAuto, Training, nil, unlearned},
		{EjectAuto, Training, second(1, 1), unlearned},
		{EjectAuto, Training, second(1, 1, 1), 30 * time.Second},
		{EjectAuto, Training, second(7, 7, 7), 70 * time.Second},
		{EjectAuto, Training, second(7, 7, 100), 300 * time.Second},
		{EjectAuto, Evaluation, second(1, 1), unlearned},
		{EjectAuto, Evaluation, second(1, 1, 1), 5 * time.Minute},
		{EjectAuto, Evaluation, second(100, 100, 100), 1000 * time.Second},
		{EjectAuto, Checkpoint, second(10, 10, 10), 5 * time.Minute},
		{EjectAuto, BetweenSteps, second(40, 40, 40), 400 * time.Second},
		{EjectAuto, FirstSteps, second(1, 1, 1), 30 * time.Minute},
		{EjectAuto, FirstSteps, second(400, 400, 400), 4000 * time.Second},
		{EjectAuto, Healing, second(1, 1, 1), 30 * time.Minute},
		{EjectAuto, Starting, second(1, 1, 1), never},
		{EjectAuto, Ending, second(1, 1, 1), never},
		{EjectAuto, Unsaid, nil, never},
		{3 * time.Second, Unsaid, nil, 3 * time.Second},
		{3 * time.Second, Training, second(7, 7, 7), 3 * time.Second},
		{3 * time.Second, Evaluation, second(100, 100, 100), 3 * time.Second},
		{0, Training, second(1, 1, 1), never},
		{0, Evaluation, second(1, 1, 1), never},
	} {
		var l learned
		for _, took := range c.past {
			l.of[c.phase].add(took)
		}
		assert.Equal(t, c.limit, Policy{EjectStalledAfter: c.eject}.limit(c.phase, &l), "%+v", c)
	}
}

func TestWhenAGroupIsReported(t *testing.T) {
	const timeout = 5 * time.Second
	for _, c := range []struct {
		eject time.Duration
		phase Phase
		after time.Duration
	}{
		{EjectAuto, Training, timeout},
		{EjectAuto, Unsaid, timeout},
		{EjectAuto, Evaluation, unlearned},
		{0, Evaluation, unlearned},
		{0, Training, timeout},
		{3 * time.Second, Evaluation, timeout},
	} {
		assert.Equal(t, c.after, Policy{EjectStalledAfter: c.eject}.named(c.phase, &learned{}, timeout), "%+v", c)
	}
}

// The longest duration is forgotten, so that one step of an hour does not excuse every hang after it.
func TestTheLongestDurationFades(t *testing.T) {
	var d durations
	d.add(time.Hour)
	for range 7_000 {
		d.add(time.Second)
	}
	assert.Less(t, d.limit(Training), 35*time.Second)
}

// A report of a phase may come late, twice or out of order.
func TestADurationIsThatOfTheLastReport(t *testing.T) {
	var l learned
	r, now := &record{previous: true}, epoch
	l.occupied(r, Evaluation, time.Second, now)
	l.occupied(r, Evaluation, 9*time.Second, now)
	assert.Zero(t, l.of[Evaluation].count)
	l.occupied(r, Unsaid, 0, now) // a message without a phase changes nothing
	l.occupied(r, Evaluation, 2*time.Second, now)
	assert.Equal(t, 9*time.Second, l.of[Evaluation].longest, "the next evaluation has begun")
	l.stepped(time.Minute)
	assert.Zero(t, l.of[Training].count, "a step with an evaluation says nothing about the others")
	l.occupied(r, Training, time.Second, now)
	assert.Equal(t, 2, l.of[Evaluation].count)
	l.other = false
	l.stepped(time.Minute)
	assert.Equal(t, time.Minute, l.of[Training].longest)
}

// work is what a group does in one step, in order.
type work struct {
	phase Phase
	said  bool // by heartbeats; otherwise only the rank knows it, when it is asked
	took  time.Duration
}

// worker is one group of a job that trains in the time of a model.
type worker struct {
	id    string
	todo  []work
	begun time.Time // its present work
	step  int64
}

func (w *worker) waits() bool { return len(w.todo) == 0 }

// says is the phase that a heartbeat, or the rank, reports.
func (w *worker) says(asked bool, now time.Time) Progress {
	if w.waits() {
		return Progress{Step: w.step, Phase: Training, Waits: true, For: now.Sub(w.begun)}
	}
	p := Progress{Step: w.step, Phase: Training, For: now.Sub(w.begun)}
	if doing := w.todo[0]; asked || doing.said {
		p.Phase = doing.phase
	}
	return p
}

// trainer lets four groups train, and counts the members that are evicted.
type trainer struct {
	t       *testing.T
	rng     *rand.Rand
	machine *Machine
	now     time.Time
	stands  bool
	groups  []*worker
	waiter  WaiterID
	evicted map[string]time.Time
	named   []Stalled
}

func (j *trainer) feed(e Event) {
	for _, action := range j.machine.Step(e, j.now) {
		switch a := action.(type) {
		case AskProgress:
			for _, id := range a.ReplicaIDs {
				for _, w := range j.groups {
					if w.id == id {
						j.feed(Progressed{ReplicaID: id, Progress: w.says(true, j.now)})
					}
				}
			}
		case Stalled:
			j.named = append(j.named, a)
		case Failed:
			require.Equal(j.t, NoProgress, a.Cause, a.Reason)
			j.evicted[a.ReplicaID] = j.now
		}
	}
}

// between returns a duration in which each is as probable as twice as much or half as much of it.
func (j *trainer) between(least, most time.Duration) time.Duration {
	return time.Duration(float64(least) * math.Pow(float64(most)/float64(least), j.rng.Float64()))
}

// plan is what a group does in a step.
func (j *trainer) plan(group int, step int64) (todo []work) {
	if step < 2 || j.rng.IntN(2500) == 0 { // a shape that was not compiled yet
		todo = append(todo, work{FirstSteps, step < 2, j.between(time.Second, 8*time.Minute)})
	}
	// sequences of variable length, whose attention takes its square: up to 20 times the median
	length := math.Exp(0.4 * j.rng.NormFloat64())
	todo = append(todo, work{Training, true, time.Duration(length * length * float64(time.Second))})
	switch {
	case group == 0 && step%500 == 499:
		todo = append(todo, work{Evaluation, true, j.between(time.Minute, 6*time.Minute)})
	case group == 1 && step%300 == 299:
		todo = append(todo, work{Checkpoint, false, j.between(20*time.Second, 4*time.Minute)})
	case group == 2 && step%700 == 699: // a script that says nothing
		todo = append(todo, work{BetweenSteps, false, j.between(20*time.Second, 4*time.Minute)})
	}
	return todo
}

// trainStep lets all groups make a step, of which a tick takes 250 ms and a heartbeat comes in each second.
func (j *trainer) trainStep(step int64, plan func(group int) []work) {
	for i, w := range j.groups {
		w.step, w.begun, w.todo = step, j.now, plan(i)
		if !j.stands || step < 2 {
			j.waiter++
			j.feed(Asked{Waiter: j.waiter, Member: Member{ReplicaID: w.id, Step: step,
				CommittedQuorumID: max(1, j.machine.past.latestID())}})
		}
	}
	for tick := 0; len(j.evicted) == 0; tick++ {
		waiting := 0
		for i, w := range j.groups {
			for !w.waits() && j.now.Sub(w.begun) >= w.todo[0].took {
				w.begun, w.todo = w.begun.Add(w.todo[0].took), w.todo[1:]
			}
			if w.waits() {
				waiting++
			}
			if tick%4 == i {
				p := w.says(false, j.now)
				beat := Beat{ReplicaID: w.id, Phase: p.Phase, For: p.For}
				if j.stands {
					beat.Step = step
				}
				j.feed(beat)
			}
		}
		if waiting == len(j.groups) {
			return
		}
		j.now = j.now.Add(250 * time.Millisecond)
		j.feed(Tick{})
	}
}

// In ten thousand steps of sequences with variable lengths, with evaluations, checkpoints and compilations of
// single groups, for which the others wait, no group is evicted by default. One that hangs in a step is, within
// the limit.
func TestOfTenThousandStepsOnlyTheHangingGroupIsEvicted(t *testing.T) {
	const hangs = 3
	for _, stands := range []bool{false, true} {
		t.Run(fmt.Sprintf("stands: %t", stands), func(t *testing.T) {
			j := &trainer{t: t, rng: rand.New(rand.NewPCG(1, 2)), now: epoch, stands: stands,
				evicted: map[string]time.Time{}, machine: NewMachine(Policy{MinReplicas: 1,
					JoinTimeout: time.Minute, HeartbeatTimeout: 5 * time.Second,
					EjectStalledAfter: EjectAuto}, epoch, 0)}
			for _, id := range []string{"a", "b", "c", "d"} {
				j.groups = append(j.groups, &worker{id: id})
				j.feed(Greeted{ReplicaID: id})
			}
			for step := range int64(10_000) {
				j.trainStep(step, func(group int) []work { return j.plan(group, step) })
				require.Empty(t, j.evicted, "step %d", step)
			}
			limit := j.machine.policy.limit(Training, &j.machine.watch.learned)
			assert.Less(t, limit, 2*time.Minute)
			began := j.now
			j.trainStep(10_000, func(group int) []work {
				return []work{{Training, true, map[bool]time.Duration{true: time.Hour}[group == hangs]}}
			})
			require.Contains(t, j.evicted, j.groups[hangs].id)
			assert.Less(t, j.evicted[j.groups[hangs].id].Sub(began), limit+3*time.Second)
			assert.Equal(t, j.groups[hangs].id, j.named[len(j.named)-1].ReplicaID)
		})
	}
}

// A group of an earlier version reports no phases: by default it is named, and not evicted.
func TestAGroupWithoutPhasesIsNotEvicted(t *testing.T) {
	for eject, evicted := range map[time.Duration]bool{EjectAuto: false, time.Minute: true} {
		m := NewMachine(Policy{MinReplicas: 1, JoinTimeout: time.Minute, HeartbeatTimeout: 2 * time.Hour,
			EjectStalledAfter: eject}, epoch, 0)
		m.Step(Beat{ReplicaID: "b"}, epoch)
		m.Step(Asked{Waiter: 1, Member: Member{ReplicaID: "a"}}, epoch)
		m.Step(Asked{Waiter: 2, Member: Member{ReplicaID: "b"}}, epoch)
		m.Step(Asked{Waiter: 3, Member: Member{ReplicaID: "a", Step: 1}}, epoch)
		var did []Action
		for now := epoch; now.Before(epoch.Add(time.Hour)); now = now.Add(time.Second) {
			for _, a := range m.Step(Tick{}, now) {
				switch a.(type) {
				case Stalled, Failed:
					did = append(did, a)
				}
			}
			m.Step(Progressed{ReplicaID: "b", Progress: Progress{For: now.Sub(epoch)}}, now)
		}
		require.NotEmpty(t, did)
		assert.IsType(t, Stalled{}, did[0])
		assert.Equal(t, evicted, len(did) > 1, "%v", did)
	}
}
