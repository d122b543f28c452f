package manager_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/rankclient"
)

// benchGroup is a group of one rank in this process, on a lighthouse over loopback.
func benchGroup(b *testing.B, lighthouse, name string, options ...rankclient.DialOption) *rankclient.Client {
	b.Helper()
	server, err := manager.NewServer(b.Context(), realConfig(lighthouse, name, 1))
	require.NoError(b, err)
	b.Cleanup(server.Shutdown)
	client, err := rankclient.Dial(b.Context(), server.Address(), 5*time.Second, options...)
	require.NoError(b, err)
	b.Cleanup(func() { _ = client.Close() })
	return client
}

func within[T any](call func(ctx context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return call(ctx)
}

func benchShouldCommit(b *testing.B, options ...rankclient.DialOption) {
	client := benchGroup(b, startLighthouse(b, 1).Address(), "a", options...)
	step := int64(0)
	for b.Loop() {
		step++
		if _, err := within(func(ctx context.Context) (bool, error) { return client.ShouldCommit(ctx, 0, step, true) }); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkShouldCommitInProcess(b *testing.B) { benchShouldCommit(b) }

func BenchmarkShouldCommitOverLoopback(b *testing.B) {
	benchShouldCommit(b, rankclient.WithoutShortcut())
}

// The quorum of a step: group rank 0 in its server's process, the lighthouse over loopback.
func BenchmarkQuorum(b *testing.B) {
	for _, groups := range []int{1, 2} {
		b.Run(fmt.Sprintf("groups=%d", groups), func(b *testing.B) {
			house := startLighthouse(b, groups)
			var clients []*rankclient.Client
			for i := range groups {
				clients = append(clients, benchGroup(b, house.Address(), fmt.Sprintf("g%d", i)))
			}
			errs := make(chan error, groups)
			step := int64(0)
			for b.Loop() {
				step++
				for _, client := range clients {
					go func() {
						_, err := within(func(ctx context.Context) (any, error) {
							return client.Quorum(ctx, rankclient.Request{Step: step})
						})
						errs <- err
					}()
				}
				for range clients {
					if err := <-errs; err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}
