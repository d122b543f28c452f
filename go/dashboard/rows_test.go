package dashboard

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/torchft/torchft/go/quorum"
)

func member(id string, step int64) Member {
	return Member{MemberStatus: quorum.MemberStatus{ReplicaID: id, Step: step, Healthy: true, InQuorum: true,
		WorldSize: 2}}
}

func TestALookReturnsTheChanges(t *testing.T) {
	var b Board
	look := func(after time.Duration, members ...Member) Change {
		return b.Look(Status{Members: members}, start.Add(after))
	}
	first := look(0, member("a", 1), member("b", 1))
	assert.Len(t, first.Rows, 2)
	assert.Equal(t, start.UnixMilli(), first.Rows[0].Since)

	assert.Empty(t, look(time.Second, member("a", 1), member("b", 1)).Rows, "nothing changed")

	change := look(2*time.Second, member("a", 5), member("b", 1))
	assert.Len(t, change.Rows, 1)

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

func TestTheHeadTellsThatThereIsACluster(t *testing.T) {
	f := NewFeed("default", false, (&job{}).current)
	f.current()
	assert.False(t, f.board.Whole().Head.Cluster)
	f = NewFeed("default", true, (&job{}).current)
	f.current()
	assert.True(t, f.board.Whole().Head.Cluster)
}

func TestAFailedGroupKeepsItsStepWhenTheOthersGoOnWithoutIt(t *testing.T) {
	var b Board
	b.Look(Status{Members: []Member{member("a", 1404)}}, start)
	// it is in no quorum any more, so its step is not known
	gone := Member{MemberStatus: quorum.MemberStatus{ReplicaID: "a"}}
	change := b.Look(Status{Members: []Member{gone}}, start.Add(time.Second))
	assert.Equal(t, Failed, change.Rows[0].State)
	assert.EqualValues(t, 1404, change.Rows[0].Step)
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
		Standby:  {Healthy: true, Waiting: true, Standby: true},
		Draining: {InQuorum: true, Draining: "an operator", Out: "it left"},
	} {
		assert.Equal(t, want, stateOf(m))
	}
}

func TestTheQuorumLastsFromItsFirstStep(t *testing.T) {
	var b Board
	look := func(after time.Duration, id, age int64) Head {
		return b.Look(Status{Status: quorum.Status{QuorumID: id, QuorumAgeMS: age,
			StepTime: 20 * time.Millisecond}}, start.Add(after)).Head
	}
	assert.Zero(t, look(0, 0, 0).QuorumSince)
	began := start.Add(800 * time.Millisecond).UnixMilli()
	for second := range 10 {
		head := look(time.Duration(1+second)*time.Second, 1, 200)
		assert.Equal(t, began, head.QuorumSince, "each step has a quorum of its own, with the same id")
		assert.EqualValues(t, 20_000, head.StepMicros)
	}
	assert.Equal(t, start.Add(11*time.Second).UnixMilli(), look(11*time.Second, 2, 0).QuorumSince)
}

func TestTheReasonIsShownIfAGroupWaitsLongerThanAStep(t *testing.T) {
	for name, c := range map[string]struct {
		quorumID, medianMS, waitingMS int64
		want                          string
	}{
		"before the first quorum":   {0, 0, 10, "b is missing"},
		"the others come in a step": {1, 20, 900, ""},
		"a long step":               {1, 5000, 4000, ""},
		"a member is missing":       {1, 5000, 5001, "b is missing"},
	} {
		s := Status{Status: quorum.Status{QuorumID: c.quorumID, MedianStepMS: c.medianMS,
			Reason: "b is missing"}}
		s.Members = []Member{{MemberStatus: quorum.MemberStatus{WaitingMS: c.waitingMS}}}
		assert.Equal(t, c.want, headOf(Head{}, s, start).Reason, name)
	}
}
