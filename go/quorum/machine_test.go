package quorum

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var epoch = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)

func testPolicy() Policy {
	return Policy{MinReplicas: 2, JoinTimeout: time.Second, HeartbeatTimeout: 5 * time.Second}
}

func TestFirstQuorumIsNumberedFromTheStart(t *testing.T) {
	m := NewMachine(testPolicy(), epoch)
	require.Empty(t, m.Step(Asked{Waiter: 1, Member: Member{ReplicaID: "b"}}, epoch))
	actions := m.Step(Asked{Waiter: 2, Member: Member{ReplicaID: "a"}}, epoch)
	require.Len(t, actions, 2)
	d := actions[0].(Deliver)
	require.Equal(t, []WaiterID{2, 1}, d.Waiters)
	require.Equal(t, epoch.UnixMilli()+1, d.Quorum.ID)
	require.Equal(t, []Member{{ReplicaID: "a"}, {ReplicaID: "b"}}, d.Quorum.Members)
	require.Equal(t, []string{"a", "b"}, actions[1].(Changed).Joined)
}
