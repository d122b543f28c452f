package lighthouse

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/quorum"
)

func TestAQuorumIsEncodedOnce(t *testing.T) {
	d := &delivery{quorum: &quorum.Quorum{ID: 1, Members: []quorum.Member{{ReplicaID: "a"}}}}
	first, err := d.encoded()
	require.NoError(t, err)
	second, err := d.encoded()
	require.NoError(t, err)
	assert.Same(t, &first[0], &second[0])
}

func TestAnUnusableMemberIsAnErrorForAll(t *testing.T) {
	d := &delivery{quorum: &quorum.Quorum{Members: []quorum.Member{{ReplicaID: "\xff"}}}}
	for range 2 {
		_, err := d.encoded()
		assert.Error(t, err)
	}
}
