package round

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/quorum"
)

var epoch = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)

func TestTheRequestHasTheRecordOfTheGroup(t *testing.T) {
	m := NewMachine(Group{ReplicaID: "g", Address: "http://g", StoreAddress: "s", WorldSize: 2})
	require.Empty(t, m.Step(QuorumAsked{Waiter: 1,
		Request:  Request{GroupRank: 1, Step: 3, ReconfigureHandle: "h1", CommitFailures: 2},
		Deadline: epoch.Add(2 * time.Second)}, epoch))
	actions := m.Step(QuorumAsked{Waiter: 2, Request: Request{GroupRank: 0, Step: 3, ReconfigureHandle: "h0",
		ShrinkOnly: true}, Deadline: epoch.Add(time.Second)}, epoch)
	require.Equal(t, []Action{AskLighthouse{
		Round: 1, Deadline: epoch.Add(time.Second),
		Member: quorum.Member{
			ReplicaID: "g", Address: "http://g", StoreAddress: "s", WorldSize: 2, Step: 3,
			ShrinkOnly: true, CommitFailures: 2, Handles: []string{"h0", "h1"},
		},
	}}, actions)

	// Each rank receives only the handles of its own group rank.
	q := &quorum.Quorum{ID: 9, Members: []quorum.Member{actions[0].(AskLighthouse).Member}}
	actions = m.Step(QuorumKnown{Round: 1, Quorum: q}, epoch)
	require.Len(t, actions, 2)
	require.Equal(t, []string{"h0"}, actions[0].(AnswerQuorum).Result.ReconfigureHandles)
	require.Equal(t, []string{"h1"}, actions[1].(AnswerQuorum).Result.ReconfigureHandles)
}

func TestGroupValidate(t *testing.T) {
	require.NoError(t, Group{ReplicaID: "g", WorldSize: 1}.Validate())
	for _, c := range []struct {
		group Group
		want  string
	}{
		{Group{WorldSize: 1}, "replica_id is empty: it must name the replica group"},
		{Group{ReplicaID: "g"}, "world_size is 0: it must be from 1 to 1048576"},
		{Group{ReplicaID: "g", WorldSize: -1}, "world_size is -1: it must be from 1 to 1048576"},
		{Group{ReplicaID: "g", WorldSize: 1 << 40},
			"world_size is 1099511627776: it must be from 1 to 1048576"},
	} {
		require.EqualError(t, c.group.Validate(), c.want)
	}
}

// A reason lists only the first of many ranks.
func TestReasonsNameOnlySomeOfManyRanks(t *testing.T) {
	m := NewMachine(Group{ReplicaID: "g", WorldSize: 40})
	m.Step(QuorumAsked{Waiter: 1}, epoch)
	actions := m.Step(Withdrawn{Waiter: 1, Timeout: true}, epoch)
	require.Equal(t, []Action{Fail{1, Failure{KindTimeout, "the deadline passed while waiting for " +
		"ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and 23 more"}}}, actions)
}
