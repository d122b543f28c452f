package heal

import (
	"bytes"
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
)

// strangers opens connections to a server without a secret, or with a wrong one: first as many as a client can hold open at once, and then
// 200 per second until the test ends. It closes none of them.
func strangers(t testing.TB, address string) {
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
	strangers(t, address(s)) // from the same address as the target
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
	assert.LessOrEqual(t, s.strangers.Len(), mostStrangers)
}

// A heal of 268 MB, with and without unauthorized connections.
func BenchmarkAmongStrangers(b *testing.B) {
	for _, name := range []string{"alone", "among strangers"} {
		b.Run(name, func(b *testing.B) {
			source, target := benchMemory(1), benchMemory(2)
			s, err := Listen(time.Minute, 0, false)
			require.NoError(b, err)
			b.Cleanup(s.Close)
			if name != "alone" {
				strangers(b, address(s))
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
