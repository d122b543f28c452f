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
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/rankclient"
	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/relay"
	"github.com/torchft/torchft/go/torchftpb"
)

// BenchmarkRanks measures the quorum and the vote of a step in a group with many ranks, on real sockets. The server is alone in
// this process, on one processor as in the process of rank 0 (pyapi/ops); all ranks are in a second process. Both share the
// processors of this machine, whereas real ranks have their own. So server-ms/step is the processor time of the server's process.
func BenchmarkRanks(b *testing.B) {
	for _, ranks := range []int{8, 512, 2048, 8000} {
		b.Run(strconv.Itoa(ranks), func(b *testing.B) { benchRanks(b, ranks, 0) })
	}
}

// BenchmarkRelayedRanks is the same with relays of 64 ranks each, in the process of the ranks. There the ranks share the processors,
// so the requests of a relay's ranks arrive one after the other. The relay waits for all of them.
func BenchmarkRelayedRanks(b *testing.B) {
	for _, ranks := range []int{512, 2048, 8000} {
		b.Run(strconv.Itoa(ranks), func(b *testing.B) { benchRanks(b, ranks, 64) })
	}
}

func benchRanks(b *testing.B, ranks, perRelay int) {
	b.Cleanup(func() { runtime.GOMAXPROCS(runtime.NumCPU()) })
	runtime.GOMAXPROCS(1)
	server, err := manager.NewServer(b.Context(), manager.ServerConfig{
		ReplicaID: "g0:life", Hostname: "127.0.0.1", Bind: "[::]:0", StoreAddr: "store:1", WorldSize: int64(ranks),
		HeartbeatInterval: time.Second, ConnectTimeout: time.Second, Logger: fttest.Quiet, Membership: tenGroups{},
	})
	require.NoError(b, err)
	defer server.Shutdown()

	before := processorTime()
	load := startRanks(b, server.Address(), ranks, perRelay)
	connected := load.next(b)
	connecting := processorTime() - before
	load.step(b) // the first step opens the sessions
	before = processorTime()
	var quorums, votes []time.Duration
	clients := time.Duration(0)
	for b.Loop() {
		did := load.step(b)
		quorums, votes, clients = append(quorums, did.Quorum), append(votes, did.Vote), clients+did.Processor
	}
	steps := float64(len(quorums))
	report := func(d time.Duration, unit string) { b.ReportMetric(float64(d)/1e6, unit) }
	b.ReportMetric(0, "ns/op")
	report(median(quorums), "quorum-ms")
	report(median(votes), "vote-ms")
	report(time.Duration(float64(processorTime()-before)/steps), "server-ms/step")
	report(time.Duration(float64(clients)/steps), "ranks-ms/step")
	report(connected.Connect, "connect-ms")
	report(connecting, "server-connect-ms")
}

func median(all []time.Duration) time.Duration { return slices.Sorted(slices.Values(all))[len(all)/2] }

// processorTime returns the processor time that this process has used.
func processorTime() time.Duration {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// tenGroups returns a quorum of ten groups that differ only in their names.
type tenGroups struct{}

func (tenGroups) Quorum(_ context.Context, m quorum.Member, _ int64) (*quorum.Quorum, error) {
	q := &quorum.Quorum{ID: 1, Created: time.Unix(0, 0)}
	for i := range 10 {
		m.ReplicaID = fmt.Sprintf("g%d:life", i)
		q.Members = append(q.Members, m)
	}
	return q, nil
}

func (tenGroups) Attend(ctx context.Context, _ time.Duration, reached func()) error {
	reached()
	<-ctx.Done()
	return ctx.Err()
}

func (tenGroups) Close() error { return nil }

// stepTaken is the line that the process of the ranks prints after it has connected, and after each step.
type stepTaken struct {
	Connect, Quorum, Vote, Processor time.Duration
	Err                              string
}

// If ranksEnv is set, this program is the process of the ranks. ranksEnv has the address of the server, ranksOf the number of
// ranks, ranksPerRelay the number of ranks of each relay.
const ranksEnv, ranksOf, ranksPerRelay = "TORCHFT_TEST_RANKS_SERVER", "TORCHFT_TEST_RANKS", "TORCHFT_TEST_RANKS_PER_RELAY"

// load is the process of the ranks. It takes a step for each line that it reads.
type load struct {
	lines   io.Writer
	results *json.Decoder
}

func startRanks(b *testing.B, address string, ranks, perRelay int) *load {
	b.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), ranksEnv+"="+address, ranksOf+"="+strconv.Itoa(ranks), ranksPerRelay+"="+strconv.Itoa(perRelay))
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

func (l *load) next(b *testing.B) (did stepTaken) {
	b.Helper()
	require.NoError(b, l.results.Decode(&did))
	require.Empty(b, did.Err)
	return did
}

func (l *load) step(b *testing.B) stepTaken {
	b.Helper()
	_, err := fmt.Fprintln(l.lines)
	require.NoError(b, err)
	return l.next(b)
}

// calls are the calls that a rank makes in a step.
type calls interface {
	Quorum(ctx context.Context, req rankclient.Request) (recovery.Result, error)
	ShouldCommit(ctx context.Context, groupRank, step int64, vote bool) (bool, error)
}

// mostConnected is the largest number of ranks for which the ranks have real connections to their relays: both ends of each connection
// are in one process here. If there are more ranks, all of them are simulated: their relays serve their streams without a network. For
// the server there is no difference.
const mostConnected = 2048

// played is the stream of a simulated rank at its relay.
type played struct {
	grpc.ServerStream
	requests  chan *torchftpb.RankRequest
	responses chan *torchftpb.RankResponse
}

func play(r *relay.Relay) *played {
	p := &played{requests: make(chan *torchftpb.RankRequest, 1), responses: make(chan *torchftpb.RankResponse, 1)}
	go func() { _ = r.Session(p) }()
	return p
}

func (p *played) SendHeader(metadata.MD) error { return nil }

func (p *played) Recv() (*torchftpb.RankRequest, error) { return <-p.requests, nil }

func (p *played) Send(resp *torchftpb.RankResponse) error {
	p.responses <- resp
	return nil
}

func (p *played) call(req *torchftpb.RankRequest) *torchftpb.RankResponse {
	req.Call, req.TimeoutUs = 1, time.Minute.Microseconds()
	p.requests <- req
	return <-p.responses
}

func (p *played) Quorum(_ context.Context, req rankclient.Request) (recovery.Result, error) {
	resp := p.call(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Quorum{Quorum: wire.RequestToProto(req)}})
	if resp.GetQuorum() == nil {
		return recovery.Result{}, fmt.Errorf("no quorum: %v", resp)
	}
	return wire.ResultFromProto(resp.GetQuorum()), nil
}

func (p *played) ShouldCommit(_ context.Context, groupRank, step int64, vote bool) (bool, error) {
	resp := p.call(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_ShouldCommit{
		ShouldCommit: &torchftpb.ShouldCommitRequest{GroupRank: groupRank, Step: step, ShouldCommit: vote},
	}})
	if !resp.GetShouldCommit().GetShouldCommit() {
		return false, fmt.Errorf("no commit: %v", resp)
	}
	return true, nil
}

// simulateRanks is the main function of the process of the ranks.
func simulateRanks() {
	results := json.NewEncoder(os.Stdout)
	n, _ := strconv.Atoi(os.Getenv(ranksOf))
	perRelay, err := strconv.Atoi(os.Getenv(ranksPerRelay)) // 0: no relays
	server := os.Getenv(ranksEnv)
	relays := make([]*relay.Relay, n/max(1, perRelay)+1)
	start := time.Now()
	if perRelay > 0 {
		_, err = ofAll(len(relays), func(i int) (err error) {
			relays[i], err = relay.Start(context.Background(), relay.Config{
				Manager: server, Hostname: "127.0.0.1", Bind: "127.0.0.1:0", ConnectTimeout: time.Minute, Hold: time.Minute,
			})
			return err
		})
	}
	clients := make([]calls, n)
	if err == nil {
		_, err = ofAll(n, func(rank int) (err error) {
			switch {
			case perRelay == 0:
				clients[rank], err = rankclient.Dial(context.Background(), server, time.Minute)
			case n > mostConnected:
				clients[rank] = play(relays[rank/perRelay])
			default:
				clients[rank], err = rankclient.Dial(context.Background(), server, time.Minute, rankclient.WithRelay(relays[rank/perRelay].Address()))
			}
			return err
		})
	}
	did := stepTaken{Connect: time.Since(start)}
	lines := bufio.NewScanner(os.Stdin)
	for step := int64(1); err == nil && results.Encode(did) == nil && lines.Scan(); step++ {
		before := processorTime()
		did = stepTaken{}
		did.Quorum, err = ofAll(n, func(rank int) error {
			_, err := atLength(func(ctx context.Context) (any, error) { return clients[rank].Quorum(ctx, requestOf(rank, n, step)) })
			return err
		})
		if err != nil {
			break
		}
		did.Vote, err = ofAll(n, func(rank int) error {
			_, err := atLength(func(ctx context.Context) (bool, error) {
				return clients[rank].ShouldCommit(ctx, int64(rank), step, true)
			})
			return err
		})
		did.Processor = processorTime() - before
	}
	if err != nil {
		_ = results.Encode(stepTaken{Err: err.Error()})
	}
}

// requestOf returns a rank's request: it has the address of its state and the handle of its process group.
func requestOf(rank, of int, step int64) rankclient.Request {
	return rankclient.Request{
		GroupRank: int64(rank), GroupWorldSize: int64(of), Step: step, CommittedQuorumID: 1,
		CheckpointMetadata: fmt.Sprintf("http://node-%05d.cluster.local:%d", rank/8, 30000+rank%8),
		Handle:             fmt.Sprintf("tcp://node-%05d.cluster.local:%d/0123456789abcdef", rank/8, 40000+rank%8),
	}
}

// ofAll runs a function for all ranks at once, and returns how long that took. Only the first error is reported: the others,
// deadlines that passed while waiting for that rank, are less specific.
func ofAll(ranks int, do func(rank int) error) (time.Duration, error) {
	start := time.Now()
	var all sync.WaitGroup
	var first sync.Once
	var failed error
	for rank := range ranks {
		all.Go(func() {
			if err := do(rank); err != nil {
				first.Do(func() { failed = fmt.Errorf("rank %d, after %s: %w", rank, time.Since(start), err) })
			}
		})
	}
	all.Wait()
	return time.Since(start), failed
}

// atLength makes a call with a deadline far above every measured time.
func atLength[T any](call func(ctx context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	return call(ctx)
}
