package rankclient

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/torchftpb"
)

func ptr(n int64) *int64 { return &n }

func steady() *torchftpb.ManagerQuorumResponse {
	return &torchftpb.ManagerQuorumResponse{
		QuorumId: 7, ReplicaRank: 1, ReplicaWorldSize: 2, StoreAddress: "store:1", MaxStep: 10,
		MaxReplicaRank: ptr(1), MaxWorldSize: 2, ReplicaIds: []string{"a", "b"}, ReconfigureHandles: []string{"x", "y"},
	}
}

func TestANewQuorumIsAChange(t *testing.T) {
	c := newClient("", nil)
	require.True(t, c.Changed(steady()), "the first result")
	require.False(t, c.Changed(steady()))
	after := steady()
	after.QuorumId++
	require.True(t, c.Changed(after))
	require.False(t, c.Changed(after))
}

func TestAnotherStepIsNoChange(t *testing.T) {
	c := newClient("", nil)
	c.Changed(steady())
	next := steady()
	next.MaxStep++
	require.False(t, c.Changed(next))
}

func TestAHealIsAChangeEveryTime(t *testing.T) {
	c := newClient("", nil)
	heal := steady()
	heal.Heal = true
	require.True(t, c.Changed(heal))
	require.True(t, c.Changed(heal))
	serve := steady()
	serve.RecoverDstReplicaRanks = []int64{0}
	require.True(t, c.Changed(serve))
	require.True(t, c.Changed(serve))
}
