package manager

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestAGroupsHealIsTheSumOfItsRanks(t *testing.T) {
	var h groupHeal
	h.drop(3) // rank 3 has reported nothing
	h.add(0, bytes{1, 10})
	h.add(1, bytes{2, 20})
	h.add(0, bytes{5, 10})
	assert.Equal(t, bytes{7, 30}, h.group)
	h.drop(0)
	h.drop(0)
	assert.Equal(t, bytes{2, 20}, h.group)
}

// A healing group has as many ranks as its source.
func TestRanksFindRoomWhenTheirConnectionsBreakAndAPeerHeals(t *testing.T) {
	for _, ranks := range []int64{1, 8, 8000, 100_000} {
		own, cameBack, healing := ranks, ranks, ranks
		assert.Greater(t, int64(mostConnections(ranks)), own+cameBack+healing, "%d ranks", ranks)
	}
}
