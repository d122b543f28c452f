package heal

import (
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

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

// processorSeconds is what this process has used.
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

// Both ends in one process, into memory that was touched. What plain TCP costs is below.
func BenchmarkTransfer(b *testing.B) {
	for _, unchecked := range []bool{true, false} {
		b.Run(map[bool]string{true: "unchecked", false: "checked"}[unchecked], func(b *testing.B) {
			source, target := benchMemory(1), benchMemory(2)
			s, err := Listen(time.Minute, 0, false)
			require.NoError(b, err)
			defer s.Close()
			measured(b, func() {
				o, err := NewOffer(source, 0)
				require.NoError(b, err)
				f, err := NewFetch(target, Settings{BlockSize: o.BlockSize(), Unchecked: unchecked})
				require.NoError(b, err)
				require.NoError(b, f.Add(s.listener.Addr().String(), s.Grant(o).Secret(), true))
				require.True(b, f.Wait(b.Context()).Done)
				f.Close()
			})
		})
	}
}

func BenchmarkPlainTCP(b *testing.B) {
	source, target := benchMemory(1), benchMemory(2)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	defer listener.Close()
	const streams = 8
	measured(b, func() {
		var both sync.WaitGroup
		for i := range streams {
			both.Go(func() {
				conn, err := listener.Accept()
				require.NoError(b, err)
				defer conn.Close()
				for r := i; r < benchRegions; r += streams {
					_, err = conn.Write(source.regions[r])
					require.NoError(b, err)
				}
			})
			both.Go(func() {
				conn, err := net.Dial("tcp", listener.Addr().String())
				require.NoError(b, err)
				defer conn.Close()
				for r := i; r < benchRegions; r += streams {
					_, err = io.ReadFull(conn, target.regions[r])
					require.NoError(b, err)
				}
			})
		}
		both.Wait()
	})
}
