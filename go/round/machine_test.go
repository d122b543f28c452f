package round

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/quorum"
)

var epoch = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)

func TestOneRoundOfTwoRanks(t *testing.T) {
	m := NewMachine(Group{ReplicaID: "a", Address: "http://a", StoreAddress: "s", WorldSize: 2})
	require.Empty(t, m.Step(QuorumAsked{Waiter: 1, GroupRank: 1, Step: 3, Handle: "h1", Deadline: epoch.Add(2 * time.Second)}, epoch))
	actions := m.Step(QuorumAsked{Waiter: 2, GroupRank: 0, Step: 3, Handle: "h0", ShrinkOnly: true, Deadline: epoch.Add(time.Second)}, epoch)
	require.Equal(t, []Action{AskLighthouse{
		Round: 1, Deadline: epoch.Add(time.Second),
		Member: quorum.Member{
			ReplicaID: "a", Address: "http://a", StoreAddress: "s", WorldSize: 2, Step: 3,
			ShrinkOnly: true, Handles: []string{"h0", "h1"},
		},
	}}, actions)

	q := &quorum.Quorum{ID: 9, Members: []quorum.Member{actions[0].(AskLighthouse).Member}}
	actions = m.Step(QuorumKnown{Round: 1, Quorum: q}, epoch)
	require.Len(t, actions, 2)
	require.Equal(t, WaiterID(2), actions[0].(AnswerQuorum).Waiter)
	require.Equal(t, []string{"h1"}, actions[1].(AnswerQuorum).Result.Handles)

	require.Empty(t, m.Step(Voted{Waiter: 3, GroupRank: 0, Step: 3, ShouldCommit: true}, epoch))
	require.Equal(t, []Action{AnswerVote{3, false}, AnswerVote{4, false}},
		m.Step(Voted{Waiter: 4, GroupRank: 1, Step: 3}, epoch))
}
