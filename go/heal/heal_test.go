package heal

import (
	"bytes"
	"context"
	"encoding/binary"
	"math/rand/v2"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
)

func TestMain(m *testing.M) { testmain.NoGoroutineIsLeft(m) }

// filled returns memory whose regions have random bytes.
func filled(rng *rand.Rand, sizes ...int) *Memory {
	m := empty(sizes...)
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], rng.Uint64())
	// Writes whole words: with the race detector, each write is checked, so that single bytes would be slow.
	fill := rand.NewChaCha8(seed)
	for _, r := range m.regions {
		_, _ = fill.Read(r)
	}
	return m
}

func empty(sizes ...int) *Memory {
	m := &Memory{}
	for _, size := range sizes {
		m.regions = append(m.regions, make([]byte, size))
	}
	return m
}

func newRand(t *testing.T) *rand.Rand {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

func listen(t *testing.T, timeout time.Duration, limit int64) *Server {
	t.Helper()
	s, err := Listen(timeout, limit, false)
	require.NoError(t, err)
	t.Cleanup(s.Close)
	return s
}

func offer(t *testing.T, m *Memory, blockSize int64) *Offer {
	t.Helper()
	o, err := NewOffer(m, blockSize)
	require.NoError(t, err)
	return o
}

func address(s *Server) string { return net.JoinHostPort("localhost", strconv.FormatInt(s.Port(), 10)) }

// served is a target's connection to a server, opened with the secret of a grant.
type served struct {
	*testing.T
	net.Conn
}

func connected(t *testing.T, s *Server, g *Grant) served {
	t.Helper()
	conn, err := net.Dial("tcp", address(s))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	_, err = conn.Write(append([]byte(magic), g.secret[:]...))
	require.NoError(t, err)
	return served{t, conn}
}

func newFetch(t *testing.T, m *Memory, settings Settings) *Fetch {
	t.Helper()
	f, err := NewFetch(m, settings)
	require.NoError(t, err)
	t.Cleanup(f.Close)
	return f
}

func wait(t *testing.T, f *Fetch) Status {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	return f.Wait(ctx)
}

func requireSame(t *testing.T, want, got *Memory) {
	t.Helper()
	for i := range want.regions {
		require.True(t, bytes.Equal(want.regions[i], got.regions[i]), "region %d", i)
	}
}

var shapes = map[string][]int{
	"nothing":        {},
	"empty":          {0, 0},
	"one":            {1},
	"small":          {3, 0, 5, 100, 0},
	"a block":        {1 << 16},
	"many small":     {100, 1000, 10_000, 20_000, 7, 7, 7, 40_000, 1, 30_000},
	"large":          {3<<20 + 17, 0, 5, 1 << 20},
	"small at edges": {1<<16 - 1, 2, 1 << 16, 1, 1 << 15},
}

func TestOfferedMemoryArrives(t *testing.T) {
	for name, sizes := range shapes {
		for _, unchecked := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				source, target := filled(newRand(t), sizes...), empty(sizes...)
				s, o := listen(t, time.Minute, 0), offer(t, source, 1<<16)
				f := newFetch(t, target, Settings{BlockSize: 1 << 16, Streams: 3, Unchecked: unchecked})
				grant := s.Grant(o)
				require.NoError(t, f.Add(address(s), grant.Secret(), Assigned))
				status := wait(t, f)
				require.True(t, status.Done, status)
				require.Empty(t, status.Failure, status.Failed)
				requireSame(t, source, target)
				require.Equal(t, o.layout.Total, status.Received)
				require.Equal(t, o.layout.Total, grant.Served())
				require.True(t, o.End(time.Second))
			})
		}
	}
}

// Every byte belongs to exactly one block, in order.
func TestBlocksCoverEverythingOnce(t *testing.T) {
	rng := newRand(t)
	for range 200 {
		sizes := make([]int64, rng.IntN(12))
		for i := range sizes {
			sizes[i] = rng.Int64N(1 << (1 + rng.IntN(18)))
		}
		l, err := NewLayout(sizes, 1+rng.Int64N(1<<16))
		require.NoError(t, err)
		at := make([]int64, len(sizes))
		for block := range l.Blocks() {
			length := int64(0)
			for _, span := range l.Spans(block, nil) {
				require.Equal(t, at[span.Region], span.Offset)
				require.Positive(t, span.Length)
				at[span.Region] += span.Length
				length += span.Length
			}
			require.Equal(t, l.Length(block), length)
			for _, largest := range []int64{1000, pieceSize, maxBlock} {
				moved := int64(0)
				require.NoError(t, pieces(l.Spans(block, nil), largest, func(piece []Span, n int64) error {
					if len(piece) > 1 {
						// Packed spans fit into the scratch memory.
						require.LessOrEqual(t, n, int64(pieceSize))
					} else {
						require.LessOrEqual(t, n, max(largest, packBelow))
					}
					moved += n
					return nil
				}))
				require.Equal(t, length, moved)
			}
		}
		require.Equal(t, append([]int64{}, sizes...), append([]int64{}, at...))
	}
}

// Streams and blocks are chosen from the data: a small state needs one stream, a large one has many blocks
// for each.
func TestSizesAreChosenFromTheData(t *testing.T) {
	for _, c := range []struct{ total, block, streams int64 }{
		{0, 256 << 10, 1}, {1, 256 << 10, 1}, {8 << 20, 256 << 10, 1}, {8<<20 + 1, 256 << 10, 2}, {32 << 20,
			512 << 10, 4},
		{64 << 20, 1 << 20, 8}, {1 << 30, 4 << 20, 8}, {1 << 40, 4 << 20, 8},
	} {
		l, err := NewLayout([]int64{c.total}, 0)
		require.NoError(t, err)
		require.Equal(t, []int64{c.block, c.streams}, []int64{l.BlockSize, int64(l.Streams())}, "%d bytes",
			c.total)
	}
}

func TestBadLayouts(t *testing.T) {
	_, err := NewLayout([]int64{1, -1}, 0)
	require.ErrorContains(t, err, "region 1 has -1 bytes")
	_, err = NewLayout([]int64{1 << 62, 1 << 62}, 0)
	require.ErrorContains(t, err, "fewer than 2^63")
	_, err = NewLayout([]int64{1}, -5)
	require.ErrorContains(t, err, "block_size is -5")
	_, err = NewMemory([]int64{0, 10})
	require.ErrorContains(t, err, "no memory")
	_, err = NewMemory([]int64{1 << 40, -10})
	require.ErrorContains(t, err, "no memory")
	_, err = NewMemory([]int64{1<<63 - 1, 10})
	require.ErrorContains(t, err, "no memory")
}
