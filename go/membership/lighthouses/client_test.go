package lighthouses

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/testlog"
)

// With a setting that is not allowed each attempt fails at once: repeating them until the timeout would only
// use a processor.
func TestABadSettingIsNotTriedAgain(t *testing.T) {
	const timeout = 50 * time.Millisecond
	for _, addresses := range []string{"http://a:1", "http://a:1,http://b:1"} {
		_, err := Dial(t.Context(), addresses, timeout, rpc.Dialing{Job: "no job"})
		assert.Equal(t, codes.InvalidArgument, status.Code(err), err)
		assert.ErrorContains(t, err, `"no job"`)
	}
}

// refusing is a network without any server. Each dial calls dialed first.
type refusing struct {
	rpc.Network
	dialed func()
}

func (r refusing) Dial(context.Context, string) (net.Conn, error) {
	r.dialed()
	return nil, syscall.ECONNREFUSED
}

func TestALongWaitForAListIsLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log testlog.Log
		before := slog.Default()
		slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
		defer slog.SetDefault(before)
		_, err := Dial(t.Context(), "http://a:1,http://b:1", time.Minute,
			rpc.Dialing{Network: refusing{dialed: func() {}}})
		require.Error(t, err)
		assert.Equal(t, 1, log.Count("\n"), log.String())
		assert.Contains(t, log.String(),
			`msg="torchft: waiting for the lighthouse" address=http://a:1,http://b:1 timeout=1m0s`)
		assert.Contains(t, log.String(), "connection refused")
	})
}

// A file that was valid at the start may be unreadable for a moment, while it is replaced. That must not end
// a group that waits for its lighthouses.
func TestAFileThatIsBeingReplacedIsReadAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(path, []byte("secret"), 0o600))
	synctest.Test(t, func(t *testing.T) {
		network := refusing{dialed: func() { _ = os.Truncate(path, 0) }}
		began := time.Now()
		with := rpc.Dialing{Network: network, Security: auth.Security{TokenFile: path}}
		_, err := Dial(t.Context(), "http://a:1,http://b:1", 10*time.Second, with)
		assert.Equal(t, codes.Unavailable, status.Code(err), err)
		assert.ErrorContains(t, err, "token_file")
		assert.GreaterOrEqual(t, time.Since(began), 10*time.Second)

		l := &Member{with: with, clients: map[string]*Client{}}
		_, err = l.reach("http://b:1")
		assert.Equal(t, codes.Unavailable, status.Code(err),
			"the manager server asks again after this code only")
	})
}
