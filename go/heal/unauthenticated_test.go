package heal

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/admission"
)

// unauthenticated opens connections to a server without a secret, or with a wrong one: first as many as a
// client can hold open at once, and then 200 per second until the test ends. It closes none of them.
func unauthenticated(t testing.TB, address string) {
	var kept []net.Conn
	open := func(number int) {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			return // the server ends
		}
		if number%2 == 1 {
			_, _ = conn.Write([]byte(magic + "0123456789abcdef"))
		}
		kept = append(kept, conn)
	}
	for i := range maxConnections + 50 {
		open(i)
	}
	var more sync.WaitGroup
	stop := make(chan struct{})
	more.Go(func() {
		each := time.NewTicker(5 * time.Millisecond)
		defer each.Stop()
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-each.C:
				open(i)
			}
		}
	})
	t.Cleanup(func() {
		close(stop)
		more.Wait()
		for _, conn := range kept {
			_ = conn.Close()
		}
	})
}

func TestUnauthorizedConnectionsDelayNoHeal(t *testing.T) {
	source := filled(newRand(t), 3*small, 40*small, 7)
	target := empty(3*small, 40*small, 7)
	s := listen(t, time.Minute, 0)
	unauthenticated(t, address(s)) // from the same address as the target
	o := offer(t, source, small)
	for range 5 {
		f := newFetch(t, target, Settings{BlockSize: o.BlockSize()})
		require.NoError(t, f.Add(address(s), s.Grant(o).Secret(), Assigned))
		require.True(t, wait(t, f).Done)
		requireSame(t, source, target)
		f.Close()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	assert.LessOrEqual(t, s.pending.Len(), mostPending)
}

// More targets than a server has connections for heal all the same, each over at least one connection. Their
// connections also exceed the limits of admission, whatever address they come from.
func TestManyTargetsOfABusyServerHeal(t *testing.T) {
	const targets = 12
	source := filled(newRand(t), 16*small)
	s := listen(t, time.Minute, targets*16*small/2) // two seconds in total, more than defaultRetries bridge
	s.most, s.pending = 3, admission.New(2, 1)
	o := offer(t, source, small)
	var fetches []*Fetch
	for range targets {
		f := newFetch(t, empty(16*small), Settings{BlockSize: small, Streams: 4})
		require.NoError(t, f.Add(address(s), s.Grant(o).Secret(), Assigned))
		fetches = append(fetches, f)
	}
	for _, f := range fetches {
		status := wait(t, f)
		require.True(t, status.Done, status)
		require.Empty(t, status.Failed)
		requireSame(t, source, f.memory)
	}
}

// A target does not count how often a source was busy: it connects again as long as the transfer lives.
func TestATargetWaitsForABusySource(t *testing.T) {
	source, target := filled(newRand(t), 3*small), empty(3*small)
	s := listen(t, time.Minute, 0)
	l, err := net.Listen("tcp", "localhost:0")
	require.NoError(t, err)
	defer l.Close()
	go func() {
		for i := 0; ; i++ {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			if i < 5*defaultRetries.most {
				_, _ = conn.Write(response{statusBusy, 1, 0}.append(nil))
				_ = conn.Close()
				continue
			}
			behind, err := net.Dial("tcp", address(s))
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(behind, conn); _ = behind.Close() }()
			go func() { _, _ = io.Copy(conn, behind); _ = conn.Close() }()
		}
	}()
	f := newFetch(t, target, Settings{BlockSize: small, Streams: 1})
	require.NoError(t, f.Add(l.Addr().String(), s.Grant(offer(t, source, small)).Secret(), Assigned))
	require.True(t, wait(t, f).Done, f.Status())
	requireSame(t, source, target)
}

// A target reads that the server is busy, also if its own message was still on the way when the server closed
// the connection.
func TestAConnectionWithoutRoomIsToldWhenToRetry(t *testing.T) {
	answer := func(conn net.Conn) error {
		b := make([]byte, responseSize)
		_ = conn.SetDeadline(time.Now().Add(time.Minute))
		_, err := io.ReadFull(conn, b)
		require.NoError(t, err)
		_, err = parseResponse(b)
		return err
	}
	s := listen(t, time.Minute, 0)
	s.most, s.pending = 0, admission.New(1, 1)
	g := s.Grant(offer(t, filled(newRand(t), small), small))
	early, err := net.Dial("tcp", address(s))
	require.NoError(t, err)
	defer early.Close()
	require.Eventually(t, func() bool { return s.pending.Len() == 1 }, time.Minute, time.Millisecond)
	known := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.known
	}
	for i := range leastOfGrant { // the first of them takes the place of the early one
		connected(t, s, g)
		require.Eventually(t, func() bool { return known() == i+1 }, time.Minute, time.Millisecond)
	}
	late := connected(t, s, g)
	_, _ = early.Write(append([]byte(magic), g.secret[:]...))
	require.Equal(t, busyError{pendingRetryAfter}, answer(early))
	require.Equal(t, busyError{retryAfter}, answer(late))
	require.Equal(t, leastOfGrant, known())
}

// A heal of 268 MB, with and without unauthorized connections.
func BenchmarkAmongUnauthenticated(b *testing.B) {
	for _, name := range []string{"alone", "among unauthenticated"} {
		b.Run(name, func(b *testing.B) {
			source, target := benchMemory(1), benchMemory(2)
			s, err := Listen(time.Minute, 0, false)
			require.NoError(b, err)
			b.Cleanup(s.Close)
			if name != "alone" {
				unauthenticated(b, address(s))
			}
			measured(b, func() {
				o, err := NewOffer(source, 0)
				require.NoError(b, err)
				f, err := NewFetch(target, Settings{BlockSize: o.BlockSize()})
				require.NoError(b, err)
				require.NoError(b, f.Add(address(s), s.Grant(o).Secret(), Assigned))
				require.True(b, f.Wait(b.Context()).Done)
				f.Close()
			})
		})
	}
}

const benchRegion, benchRegions = 16 << 20, 16

func benchMemory(value byte) *Memory {
	m := &Memory{}
	for range benchRegions {
		region := make([]byte, benchRegion)
		for i := range region {
			region[i] = value
		}
		m.regions = append(m.regions, region)
	}
	return m
}

// processorSeconds returns the processor time that this process has used.
func processorSeconds() float64 {
	var used syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &used)
	return time.Duration(used.Utime.Nano() + used.Stime.Nano()).Seconds()
}

func measured(b *testing.B, transfer func()) {
	b.SetBytes(benchRegion * benchRegions)
	before := processorSeconds()
	for b.Loop() {
		transfer()
	}
	b.ReportMetric((processorSeconds()-before)/float64(b.N)/(benchRegion*benchRegions/1e9), "cpu-s/GB")
}

// outOfDescriptors is a listener that fails for a while.
type outOfDescriptors struct {
	net.Listener
	left int
}

func (l *outOfDescriptors) Accept() (net.Conn, error) {
	if l.left--; l.left < 0 {
		return nil, net.ErrClosed
	}
	return nil, syscall.EMFILE
}

// A process that has too many open files, perhaps for minutes, must not fill the log of the training.
func TestAConnectionThatIsNotAcceptedIsLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	defer slog.SetDefault(before)
	synctest.Test(t, func(*testing.T) {
		s := &Server{listener: &outOfDescriptors{left: 1000}}
		s.running.Add(1)
		s.accept()
	})
	require.Equal(t, 1, strings.Count(log.String(), "a connection was not accepted"))
}
