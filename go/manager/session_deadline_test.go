package manager_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/rankclient"
)

// unanswered is a network in which dials get no answer while silent is set: they end at their deadline.
type unanswered struct {
	rpc.Network
	silent atomic.Bool
}

func (u *unanswered) Dial(ctx context.Context, address string) (net.Conn, error) {
	if u.silent.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return u.Network.Dial(ctx, address)
}

// The host of the manager server has vanished, so a dial is not refused but stays unanswered.
func TestACallThatCannotConnectEndsAtItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("a", 2)
		host := g.Host(1)
		network := &unanswered{Network: host}
		client, err := rankclient.Dial(t.Context(), g.Server.Address(), time.Second,
			rpc.Dialing{Network: network})
		require.NoError(t, err)
		defer func() { require.NoError(t, client.Close()) }()

		network.silent.Store(true)
		host.Cut()
		synctest.Wait()
		began := time.Now()
		call := func(timeout time.Duration) <-chan fttest.Answer[bool] {
			return fttest.Start(func() (bool, error) {
				ctx, cancel := context.WithTimeout(t.Context(), timeout)
				defer cancel()
				return fttest.Commits(client.ShouldCommit(ctx, 1, 0, true))
			})
		}
		long, short := call(2*time.Second), call(time.Second)
		assert.Equal(t, codes.DeadlineExceeded, status.Code((<-short).Err))
		assert.Equal(t, time.Second, time.Since(began))
		assert.Equal(t, codes.DeadlineExceeded, status.Code((<-long).Err))
		assert.Equal(t, 2*time.Second, time.Since(began))
	})
}

// A job whose groups take long to start has a long quorum_timeout: the first group must not fail before it.
func TestAQuorumMayTakeLongerThanACallWithoutADeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		for _, timeout := range []time.Duration{2 * rpc.MaxWait, 1<<63 - 1} {
			first := a.Quorum(0, 0, timeout)
			time.Sleep(rpc.MaxWait + time.Second)
			second := b.Quorum(0, 0, timeout)
			require.NoError(t, (<-first).Err)
			require.NoError(t, (<-second).Err)
		}
	})
}
