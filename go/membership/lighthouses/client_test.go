package lighthouses

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// With a setting that is not allowed each attempt fails at once: repeating them until the timeout would only use a processor.
func TestABadSettingIsNotTriedAgain(t *testing.T) {
	const timeout = 50 * time.Millisecond
	for _, addresses := range []string{"http://a:1", "http://a:1,http://b:1"} {
		_, err := Dial(t.Context(), addresses, timeout, WithJob("no job"))
		assert.Equal(t, codes.InvalidArgument, status.Code(err), err)
		assert.ErrorContains(t, err, `"no job"`)
	}
}
