package manager_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/rankclient"
)

// BenchmarkRanks measures the quorum and the vote of a step in a group with many ranks, on real sockets. The
// server is alone in this process, on one processor as in the process of rank 0 (pyapi/ops); all ranks are in
// a second process. Both share the processors of this machine, whereas real ranks have their own. So the
// figures of the server are the processor time of its process, median and, for a vote, the ninth decile of
// the steps.
func BenchmarkRanks(b *testing.B) {
	for _, ranks := range []int{8, 512, 800, 2000, 8000} {
		b.Run(strconv.Itoa(ranks), func(b *testing.B) { benchRanks(b, ranks) })
	}
}

func benchRanks(b *testing.B, ranks int) {
	b.Cleanup(func() { runtime.GOMAXPROCS(runtime.NumCPU()) })
	runtime.GOMAXPROCS(1)
	server, err := fttest.NewManager(b.Context(), manager.ServerConfig{
		ReplicaID: "g0:life", Hostname: "127.0.0.1", Bind: "[::]:0", StoreAddr: "store:1",
		WorldSize:         int64(ranks),
		HeartbeatInterval: time.Second, ConnectTimeout: time.Second, Logger: fttest.Quiet,
		Membership: tenGroups{},
	})
	require.NoError(b, err)
	defer server.Shutdown()

	before := processorTime()
	load := startRanks(b, server.Address(), ranks)
	connected := load.next(b)
	connecting := processorTime() - before
	load.take(b, "quorum") // the first step opens the sessions
	load.take(b, "vote")
	var quorums, votes phase
	for b.Loop() {
		quorums.add(load.take(b, "quorum"))
		votes.add(load.take(b, "vote"))
	}
	report := func(d time.Duration, unit string) { b.ReportMetric(float64(d)/1e6, unit) }
	b.ReportMetric(0, "ns/op")
	report(quantile(quorums.took, 5), "quorum-ms")
	report(quantile(votes.took, 5), "vote-ms")
	report(quantile(quorums.server, 5), "server-quorum-ms")
	report(quantile(votes.server, 5), "server-vote-ms")
	report(quantile(votes.server, 9), "server-vote-p90-ms")
	report(quantile(quorums.ranks, 5)+quantile(votes.ranks, 5), "ranks-ms/step")
	report(connected.Took, "connect-ms")
	report(connecting, "server-connect-ms")
}

// phase has what all calls of one kind in a step have cost, step by step.
type phase struct{ took, server, ranks []time.Duration }

func (p *phase) add(did made) {
	p.took, p.server, p.ranks = append(p.took, did.Took), append(p.server, did.server),
		append(p.ranks, did.Processor)
}

// quantile returns a quantile of durations, in tenths.
func quantile(all []time.Duration, tenths int) time.Duration {
	return slices.Sorted(slices.Values(all))[len(all)*tenths/10]
}

// processorTime returns the processor time that this process has used.
func processorTime() time.Duration {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// tenGroups returns a quorum of ten groups that differ only in their names.
type tenGroups struct{ fttest.NoMembership }

func (tenGroups) Quorum(_ context.Context, m quorum.Member, _ int64) (*quorum.Quorum, error) {
	q := &quorum.Quorum{ID: 1, Created: time.Unix(0, 0)}
	for i := range 10 {
		m.ReplicaID = fmt.Sprintf("g%d:life", i)
		q.Members = append(q.Members, m)
	}
	return q, nil
}

// made is the line that the process of the ranks prints after all ranks have connected, and after all have
// made a call.
type made struct {
	Took, Processor time.Duration
	Err             string

	server time.Duration // processor time of the server
}

// If ranksEnv is set, this program is the process of the ranks. ranksEnv has the address of the server,
// ranksOf the number of ranks.
const ranksEnv, ranksOf = "TORCHFT_TEST_RANKS_SERVER", "TORCHFT_TEST_RANKS"

// load is the process of the ranks. All ranks make the call that a line names.
type load struct {
	lines   io.Writer
	results *json.Decoder
}

func startRanks(b *testing.B, address string, ranks int) *load {
	b.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), ranksEnv+"="+address, ranksOf+"="+strconv.Itoa(ranks))
	cmd.Stderr = os.Stderr
	lines, err := cmd.StdinPipe()
	require.NoError(b, err)
	output, err := cmd.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, cmd.Start())
	b.Cleanup(func() {
		_ = lines.Close() // the process ends with its input
		_ = cmd.Wait()
	})
	return &load{lines, json.NewDecoder(output)}
}

func (l *load) next(b *testing.B) (did made) {
	b.Helper()
	require.NoError(b, l.results.Decode(&did))
	require.Empty(b, did.Err)
	return did
}

// take lets all ranks make a call: "quorum" or "vote".
func (l *load) take(b *testing.B, call string) made {
	b.Helper()
	before := processorTime()
	_, err := fmt.Fprintln(l.lines, call)
	require.NoError(b, err)
	did := l.next(b)
	did.server = processorTime() - before
	return did
}

// simulateRanks is the main function of the process of the ranks.
func simulateRanks() {
	results := json.NewEncoder(os.Stdout)
	n, _ := strconv.Atoi(os.Getenv(ranksOf))
	server := os.Getenv(ranksEnv)
	clients := make([]*rankclient.Client, n)
	took, err := ofAll(n, func(rank int) (err error) {
		clients[rank], err = rankclient.Dial(context.Background(), server, time.Minute, rpc.Dialing{})
		return err
	})
	did, step := made{Took: took}, int64(1)
	lines := bufio.NewScanner(os.Stdin)
	for err == nil && results.Encode(did) == nil && lines.Scan() {
		before := processorTime()
		call := func(ctx context.Context, rank int) error {
			_, err := clients[rank].Quorum(ctx, requestOf(rank, n, step))
			return err
		}
		if lines.Text() == "vote" {
			call = func(ctx context.Context, rank int) error {
				_, err := clients[rank].ShouldCommit(ctx, int64(rank), step, true)
				return err
			}
		}
		did = made{}
		did.Took, err = ofAll(n, func(rank int) error {
			// far above every measured time
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
			defer cancel()
			return call(ctx, rank)
		})
		did.Processor = processorTime() - before
		if lines.Text() == "vote" {
			step++
		}
	}
	if err != nil {
		_ = results.Encode(made{Err: err.Error()})
	}
}

// requestOf returns a rank's request: it has the address of its state and the handle of its process group.
func requestOf(rank, of int, step int64) *fttest.Request {
	return &fttest.Request{
		GroupRank: int64(rank), GroupWorldSize: int64(of), Step: step, CommittedQuorumId: 1,
		CheckpointMetadata: fmt.Sprintf("http://node-%05d.cluster.local:%d", rank/8, 30000+rank%8),
		ReconfigureHandle: fmt.Sprintf("tcp://node-%05d.cluster.local:%d/0123456789abcdef", rank/8,
			40000+rank%8),
	}
}

// ofAll runs a function for all ranks at once, and returns how long that took. Only the first error is
// reported: the others, deadlines that passed while waiting for that rank, are less specific.
func ofAll(ranks int, do func(rank int) error) (time.Duration, error) {
	start := time.Now()
	var all sync.WaitGroup
	var first sync.Once
	var failed error
	for rank := range ranks {
		all.Go(func() {
			if err := do(rank); err != nil {
				first.Do(func() {
					failed = fmt.Errorf("rank %d, after %s: %w", rank, time.Since(start),
						err)
				})
			}
		})
	}
	all.Wait()
	return time.Since(start), failed
}
