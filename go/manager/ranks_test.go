package manager_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/manager"
)

const ranksOfServer = "TORCHFT_TEST_RANKS"

// TestAServerOfManyRanks is the process of BenchmarkRanks that has the manager server, on one processor, as rank 0's has.
func TestAServerOfManyRanks(t *testing.T) {
	ranks, err := strconv.ParseInt(os.Getenv(ranksOfServer), 10, 64)
	if err != nil {
		t.Skip("it is a part of BenchmarkRanks")
	}
	server, err := manager.NewServer(t.Context(), realConfig(startLighthouse(t, 1).Address(), "a", ranks))
	require.NoError(t, err)
	fmt.Println("\nserver at", server.Address())
	_, _ = io.Copy(io.Discard, os.Stdin) // until the benchmark ends
	server.Shutdown()
}

// serverOf starts that process, and returns the server's address and what the process has used of the processor.
func serverOf(b *testing.B, ranks int) (address string, used func() time.Duration) {
	c := exec.CommandContext(context.WithoutCancel(b.Context()), os.Args[0], "-test.run=^TestAServerOfManyRanks$")
	c.Env = append(os.Environ(), fmt.Sprintf("%s=%d", ranksOfServer, ranks), "GOMAXPROCS=1")
	stdin, err := c.StdinPipe()
	require.NoError(b, err)
	stdout, err := c.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, c.Start())
	lines := bufio.NewScanner(stdout)
	for address == "" && lines.Scan() {
		address, _ = strings.CutPrefix(lines.Text(), "server at ")
		if !strings.HasPrefix(address, "http") {
			address = ""
		}
	}
	require.NotEmpty(b, address)
	b.Cleanup(func() {
		_ = stdin.Close()
		_ = c.Wait()
	})
	return address, func() time.Duration {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.Process.Pid))
		require.NoError(b, err)
		_, after, _ := strings.Cut(string(text), ") ")
		fields := strings.Fields(after)
		ticks := 0
		for _, field := range fields[11:13] { // of its own code, and of the kernel's
			n, err := strconv.Atoi(field)
			require.NoError(b, err)
			ticks += n
		}
		return time.Duration(ticks) * 10 * time.Millisecond // USER_HZ
	}
}

// The quorum and the vote of one group of many ranks, which are simulated in this process: they share a machine with the server.
// Beside the time of both there is the processor's, of the server and of all clients apart, and how long connecting takes.
func BenchmarkRanks(b *testing.B) {
	for _, ranks := range []int{8, 512, 2048, 8000} {
		b.Run(fmt.Sprintf("ranks=%d", ranks), func(b *testing.B) {
			address, used := serverOf(b, ranks)
			clients := make([]*manager.Client, ranks)
			began, before := time.Now(), used()
			all := func(call func(rank int) error) {
				var each sync.WaitGroup
				errs := make(chan error, ranks)
				for rank := range ranks {
					each.Go(func() { errs <- call(rank) })
				}
				each.Wait()
				for range ranks {
					require.NoError(b, <-errs)
				}
			}
			all(func(rank int) (err error) {
				clients[rank], err = manager.Dial(b.Context(), address, time.Minute)
				return err
			})
			connected, connecting := time.Since(began), used()-before
			b.Cleanup(func() {
				for _, client := range clients {
					_ = client.Close()
				}
			})
			step := int64(0)
			round := func() {
				step++
				all(func(rank int) error {
					_, err := patiently(func(ctx context.Context) (any, error) {
						return clients[rank].Quorum(ctx, manager.Request{GroupRank: int64(rank), Step: step})
					})
					return err
				})
				all(func(rank int) error {
					_, err := patiently(func(ctx context.Context) (any, error) {
						return clients[rank].ShouldCommit(ctx, int64(rank), step, true)
					})
					return err
				})
			}
			round() // the first one opens the sessions
			server, own := used(), processorTime()
			for b.Loop() {
				round()
			}
			perRound := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 / float64(b.N) }
			b.ReportMetric(perRound(used()-server), "server-cpu-ms/op")
			b.ReportMetric(perRound(processorTime()-own), "clients-cpu-ms/op")
			b.ReportMetric(connected.Seconds(), "connect-s")
			b.ReportMetric(connecting.Seconds(), "connect-server-cpu-s")
		})
	}
}

// patiently leaves a call the time that thousands of ranks take where other work keeps the machine busy.
func patiently[T any](call func(ctx context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	return call(ctx)
}

// processorTime is what this process has used.
func processorTime() time.Duration {
	var used syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &used)
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
