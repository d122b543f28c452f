package quorum

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// In a job of ten thousand members, some still receive the list of the members when others already wait for
// them.
func TestAStepOfManyMembersMayTakeLonger(t *testing.T) {
	for members, timeout := range map[int]time.Duration{2: leastStall, 5_000: leastStall,
		10_000: 10 * time.Second} {
		r := &ring{now: epoch, machine: NewMachine(Policy{MinReplicas: members, JoinTimeout: time.Minute,
			HeartbeatTimeout: time.Minute}, epoch, 0)}
		ids := make([]string, members)
		for i := range ids {
			ids[i] = fmt.Sprintf("%05d", i)
		}
		r.round(t, ids...)
		r.ask(Member{ReplicaID: ids[0], Step: 1})
		asked := func(after time.Duration) (n int) {
			for _, action := range r.machine.Step(Tick{}, epoch.Add(after)) {
				if a, ok := action.(AskProgress); ok {
					n = len(a.ReplicaIDs)
				}
			}
			return n
		}
		assert.Zero(t, asked(timeout-AnswerTime-time.Millisecond), "%d members", members)
		assert.Equal(t, members-1, asked(timeout-AnswerTime), "%d members", members)
	}
}

// The speed of a job is the median of its steps, and unknown before the first, and when the present step
// takes much longer.
func TestTheDurationOfAStep(t *testing.T) {
	w := watch{core: &core{now: epoch}}
	assert.Zero(t, w.usual(epoch))
	for i, took := range []time.Duration{3 * time.Second, time.Second, 2 * time.Second} {
		w.began, w.now = w.now, w.now.Add(took)
		w.next(true)
		assert.Equal(t, []time.Duration{3 * time.Second, 3 * time.Second, 2 * time.Second}[i], w.usual(w.now))
	}
	w.next(false)
	w.advanced(1)
	assert.Equal(t, 2*time.Second, w.usual(w.now.Add(6*time.Second)))
	assert.Zero(t, w.usual(w.now.Add(7*time.Second)))
}
