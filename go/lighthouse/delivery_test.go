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
	return q
}

func TestAQuorumIsEncodedOnce(t *testing.T) {
	d := newDelivery(quorumOf("a"), nil)
	for _, form := range []func() ([]byte, error){
		func() ([]byte, error) { return d.answer() },
		func() ([]byte, error) { return d.after(0) },
		func() ([]byte, error) { return d.after(d.list) },
	} {
		first, err := form()
		require.NoError(t, err)
		second, err := form()
		require.NoError(t, err)
		assert.Same(t, &first[0], &second[0])
	}
}

func TestAnUnusableMemberIsAnErrorForAll(t *testing.T) {
	d := newDelivery(quorumOf("\xff"), nil)
	for range 2 {
		_, err := d.answer()
		require.Error(t, err)
		_, err = d.after(0)
		require.Error(t, err)
	}
}

func TestAListIsSentAgainOnlyWhenItHasChanged(t *testing.T) {
	first := newDelivery(quorumOf("a", "b"), nil)
	same := newDelivery(quorumOf("a", "b"), first)
	changed := newDelivery(quorumOf("a", "c"), same)
	form := func(d *delivery, last uint64) string {
		sent, err := d.after(last)
		require.NoError(t, err)
		states, err := d.states()
		require.NoError(t, err)
		if &sent[0] == &states[0] {
			return "states"
		}
		return "whole"
	}
	assert.Equal(t, "whole", form(first, 0), "a new stream")
	assert.Equal(t, "whole", form(same, 0))
	assert.Equal(t, "states", form(same, first.list))
	assert.Equal(t, "whole", form(changed, same.list))
	assert.Equal(t, "states", form(changed, changed.list), "delivered again")
}
