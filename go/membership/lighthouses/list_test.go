package lighthouses_test

import (
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/membership/lighthouses"
	"github.com/torchft/torchft/go/quorum"
)

// An idle connection seems fine for long after the host has vanished. A member that reported to reach that lighthouse would fail back to it
// with the others, and stay behind alone.
func TestALighthouseThatDoesNotAnswerIsNotThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := fttest.NewNetwork()
		defer network.Host("a").Serve(t, ":1")()
		there, end := lighthouses.There(t.Context(), network.Host("member"), "http://a:1", "http://b:1")
		assert.Equal(t, quorum.PlacesOf(0), there(0))
		network.Host("a").Vanish()
		assert.Zero(t, there(0))
		require.NoError(t, end())
	})
}
