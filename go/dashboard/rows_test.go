package dashboard

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/torchft/torchft/go/quorum"
)

func member(id string, step int64) quorum.MemberStatus {
	return quorum.MemberStatus{ReplicaID: id, Step: step, Healthy: true, InQuorum: true, WorldSize: 2}
}

func TestALookReturnsTheChanges(t *testing.T) {
	var b Board
	look := func(after time.Duration, members ...quorum.MemberStatus) Change {
		return b.Look(quorum.Status{Members: members}, start.Add(after))
	}
	first := look(0, member("a", 1), member("b", 1))
	assert.Len(t, first.Rows, 2)
	assert.Equal(t, start.UnixMilli(), first.Rows[0].Since)

	assert.Empty(t, look(time.Second, member("a", 1), member("b", 1)).Rows, "nothing changed")

	change := look(2*time.Second, member("a", 5), member("b", 1))
	assert.Len(t, change.Rows, 1)
	assert.Equal(t, 500.0, change.Rows[0].StepMS, "four steps in two seconds")

	failed := member("b", 1)
	failed.Healthy, failed.HeartbeatAgeMS = false, 1500
	change = look(3*time.Second, member("a", 5), failed)
	assert.Len(t, change.Rows, 1)
	assert.Equal(t, Failed, change.Rows[0].State)
	assert.Equal(t, start.Add(3*time.Second).UnixMilli(), change.Rows[0].Since)
	assert.Equal(t, start.Add(time.Second).UnixMilli(), change.Rows[0].HeardOf)

	change = look(4*time.Second, member("a", 5))
	assert.Equal(t, []string{"b"}, change.Removed)
	assert.Len(t, b.Whole().Rows, 1)
}

func TestTheStateOfAMember(t *testing.T) {
	for want, m := range map[State]quorum.MemberStatus{
		Failed:   {InQuorum: true},
		Training: {Healthy: true, InQuorum: true, Waiting: true},
		Waiting:  {Healthy: true, Waiting: true},
		Joining:  {Healthy: true},
		Suspect:  {Healthy: true, InQuorum: true, Suspect: true},
		Stalled:  {Healthy: true, InQuorum: true, Stalled: "rank 1 computes", Healing: true},
		Healing:  {Healthy: true, InQuorum: true, Healing: true},
		Draining: {InQuorum: true, Draining: "an operator", Out: "it left"},
	} {
		assert.Equal(t, want, stateOf(m))
	}
}

func TestAMemberThatHealsFromAnOlderStepHasNoNegativeTime(t *testing.T) {
	var b Board
	b.Look(quorum.Status{Members: []quorum.MemberStatus{member("a", 100)}}, start)
	b.Look(quorum.Status{Members: []quorum.MemberStatus{member("a", 3)}}, start.Add(time.Second))
	change := b.Look(quorum.Status{Members: []quorum.MemberStatus{member("a", 4)}}, start.Add(2*time.Second))
	assert.Equal(t, 1000.0, change.Rows[0].StepMS)
}
