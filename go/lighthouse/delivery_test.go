package lighthouse

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/quorum"
)

func quorumOf(ids ...string) *quorum.Quorum {
	q := &quorum.Quorum{ID: 1}
	for _, id := range ids {
		q.Members = append(q.Members, quorum.Member{ReplicaID: id})
	}
	q.Revision = quorum.RevisionOf(q.Members)
	return q
}

func TestAQuorumIsEncodedOnce(t *testing.T) {
	d := newDelivery(quorumOf("a"), nil)
	first, err := d.answer()
	require.NoError(t, err)
	second, err := d.answer()
	require.NoError(t, err)
	assert.Same(t, &first[0], &second[0])
}

func TestAnUnusableMemberIsAnErrorForAll(t *testing.T) {
	d := newDelivery(quorumOf("\xff"), nil)
	for range 2 {
		_, err := d.answer()
		require.Error(t, err)
		_, err = d.lacks(0)
		require.Error(t, err)
	}
}

func TestAMemberReceivesTheFactsThatItLacks(t *testing.T) {
	before, now := quorumOf("a", "b"), quorumOf("a", "b", "c")
	d := newDelivery(now, before)
	nothing, err := d.lacks(now.Revision)
	require.NoError(t, err)
	assert.Empty(t, nothing)
	change, err := d.lacks(before.Revision)
	require.NoError(t, err)
	whole, err := d.lacks(0)
	require.NoError(t, err)
	unknown, err := d.lacks(12345)
	require.NoError(t, err)
	require.Len(t, change, 1)
	require.Len(t, whole, 1)
	assert.Less(t, len(change[0]), len(whole[0]))
	assert.Same(t, &whole[0][0], &unknown[0][0], "the whole list is encoded only once")
}
