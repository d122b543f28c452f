package recovery

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/quorum"
)

func TestTheOneBehindHeals(t *testing.T) {
	q := &quorum.Quorum{ID: 7, Members: []quorum.Member{
		{ReplicaID: "a", Address: "http://a", StoreAddress: "sa", Step: 3},
		{ReplicaID: "b", Address: "http://b", StoreAddress: "sb", Step: 0, CommitFailures: 2},
	}}
	r, err := Compute("b", 0, q, true)
	require.NoError(t, err)
	require.Equal(t, Result{
		QuorumID: 7, ReplicaRank: 1, ReplicaWorldSize: 2,
		Sources:      []Source{{ReplicaRank: 0, ManagerAddress: "http://a"}},
		StoreAddress: "sa", MaxStep: 3, MaxWorldSize: 1, Heal: true, CommitFailures: 2,
		ReplicaIDs: []string{"a", "b"},
	}, r)
	r, err = Compute("a", 0, q, true)
	require.NoError(t, err)
	require.Equal(t, []int64{1}, r.RecoverDstReplicaRank)
	require.False(t, r.Heal)
}
