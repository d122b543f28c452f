package quorum

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// In a job of ten thousand members, some still receive the list of the members when others already wait for them.
func TestAStepOfManyMembersMayTakeLonger(t *testing.T) {
	for members, timeout := range map[int]time.Duration{2: leastStall, 5_000: leastStall, 10_000: 10 * time.Second} {
		r := &ring{now: epoch, machine: NewMachine(Policy{MinReplicas: members, JoinTimeout: time.Minute, HeartbeatTimeout: time.Minute}, epoch, 0)}
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
