package manager

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/torchft/torchft/go/membership"
)

func TestAGroupsHealIsTheSumOfItsRanks(t *testing.T) {
	var h groupHeal
	h.drop(3) // rank 3 has reported nothing
	h.add(membership.HealProgress{GroupRank: 0, Received: 1, Total: 10})
	h.add(membership.HealProgress{GroupRank: 1, Received: 2, Total: 20})
	h.add(membership.HealProgress{GroupRank: 0, Received: 5, Total: 10})
	assert.Equal(t, membership.HealProgress{Received: 7, Total: 30}, h.group)
	h.drop(0)
	h.drop(0)
	assert.Equal(t, membership.HealProgress{Received: 2, Total: 20}, h.group)
}

// A healing group has as many ranks as its source.
func TestRanksFindRoomWhenTheirConnectionsBreakAndAPeerHeals(t *testing.T) {
	for _, ranks := range []int64{1, 8, 8000, 100_000} {
		own, cameBack, healing := ranks, ranks, ranks
		assert.Greater(t, int64(mostConnections(ranks)), own+cameBack+healing, "%d ranks", ranks)
	}
}
