package lighthouses

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A stream on which the lighthouse has answered may have bound the member, even if the stream broke since, or the deadline passed.
// So begun must succeed: on an error the member would try the next lighthouse of its list while it is bound.
func TestAStreamThatWasWelcomedHasBegun(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	stream := func() *memberStream {
		return &memberStream{welcomed: make(chan struct{}), ended: make(chan struct{}), err: status.Error(codes.Unavailable, "it broke")}
	}
	for range 64 { // if several cases are ready, select takes a random one
		s := stream()
		close(s.welcomed)
		close(s.ended)
		require.NoError(t, s.begun(over), "the stream was welcomed, and broke")

		s = stream()
		s.cancel = func() { close(s.welcomed); close(s.ended) }
		require.NoError(t, s.begun(over), "the welcome was on its way")
	}
	s := stream()
	close(s.ended)
	assert.ErrorContains(t, s.begun(t.Context()), "it broke")
	s = stream()
	s.cancel = func() { close(s.ended) }
	assert.ErrorContains(t, s.begun(over), "does not answer")
}
