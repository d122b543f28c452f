package heal

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// device is memory that only its owner can read and write, like that of a GPU.
type device struct {
	memory *Memory // all regions, on the host and on the device
	host   *Memory // the same without the regions on the device
}

// onDevices puts the regions with these numbers on a device.
func onDevices(m *Memory, away ...int) device {
	host := &Memory{regions: slices.Clone(m.regions), away: map[int]int64{}}
	for _, region := range away {
		host.away[region] = int64(len(m.regions[region]))
		host.regions[region] = nil
	}
	return device{m, host}
}

// stageOf returns the address and the length of host memory.
func stageOf(b []byte) (address, length int64) {
	return int64(uintptr(unsafe.Pointer(&b[0]))), int64(len(b))
}

// load does what the target does in Python: it copies full windows to the device, and provides their staging
// memory for other windows. It provides memory for two windows at a time.
func (d device) load(t *testing.T, f *Fetch) Status {
	t.Helper()
	stages := map[int64][]byte{}
	provide := func(stage []byte) {
		window, err := f.Stage(stageOf(stage))
		require.NoError(t, err)
		if window >= 0 {
			require.NotContains(t, stages, window)
			stages[window] = stage
		}
	}
	size := int64(f.windows.blocks) * f.layout.BlockSize
	for range 2 {
		provide(make([]byte, size))
	}
	for {
		status := wait(t, f)
		for _, window := range status.Full {
			stage := stages[int64(window)]
			delete(stages, int64(window))
			begin := int64(window) * size
			for region := range d.host.away {
				at, length := f.layout.starts[region], f.layout.sizes[region]
				first, end := max(at, begin), min(at+length, begin+size)
				if first < end {
					copy(d.memory.regions[region][first-at:end-at], stage[first-begin:end-begin])
				}
			}
			for i := range stage {
				stage[i] = 0xee // bytes that are not fetched again fail the comparison
			}
			provide(stage)
		}
		if len(status.Full) == 0 {
			return status
		}
	}
}

func TestStateOnADeviceArrivesThroughStages(t *testing.T) {
	for name, c := range map[string]struct {
		sizes, away []int
		window      int64
	}{
		"all":       {[]int{1 << 20}, []int{0}, 8},
		"one block": {[]int{10}, []int{0}, 8},
		"small ones": {[]int{100, 1000, 10_000, 20_000, 7, 7, 7, 40_000, 1, 30_000},
			[]int{0, 2, 4, 6, 8}, 1},
		"some":                     {[]int{1 << 18, 5, 1<<18 + 3, 1 << 18, 0, 77}, []int{0, 2, 5}, 2},
		"in between":               {[]int{1 << 18, 100, 1 << 18}, []int{1}, 1},
		"all blocks in one window": {[]int{1 << 18, 100, 1 << 18}, []int{0, 1, 2}, 1 << 20},
	} {
		for _, unchecked := range []bool{false, true} {
			t.Run(fmt.Sprint(name, unchecked), func(t *testing.T) {
				source := filled(newRand(t), c.sizes...)
				target := onDevices(empty(c.sizes...), c.away...)
				s := listen(t, time.Minute, 0)
				f := newFetch(t, target.host,
					Settings{BlockSize: small, Streams: 3, Window: c.window, Unchecked: unchecked})
				require.NoError(t, f.Add(address(s), s.Grant(offer(t, source, small)).Secret(), Assigned))
				status := target.load(t, f)
				require.True(t, status.Done, status)
				requireSame(t, source, target.memory)
			})
		}
	}
}

// The first window is fetched first, so that it is copied to the device while the next one arrives.
func TestWindowsAreFetchedInTheirOrder(t *testing.T) {
	q := newQueue(6, func(block int) bool { return block != 3 })
	q.add([]int{0, 1})
	q.add([]int{2, 4})
	var got []int
	for block, ok := q.take(Assigned, false); ok; block, ok = q.take(Assigned, false) {
		got = append(got, block)
	}
	require.Equal(t, []int{3, 0, 1, 2, 4}, got)
}

// The assigned source fails, and an additional one continues: blocks that have arrived are kept, also those
// in staging memory.
func TestStagesOutliveASource(t *testing.T) {
	source, target := filled(newRand(t), 2<<20, 1<<20), onDevices(empty(2<<20, 1<<20), 0)
	a, b := listen(t, time.Minute, 2<<20), listen(t, time.Minute, 2<<20)
	f := newFetch(t, target.host, Settings{BlockSize: small, Streams: 2, Window: 8})
	first := a.Grant(offer(t, source, small))
	require.NoError(t, f.Add(address(a), first.Secret(), Assigned))
	additional := b.Grant(offer(t, clone(source), small))
	require.NoError(t, f.Add(address(b), additional.Secret(), Additional))
	go func() {
		// The first source fails after its checksums are known: before that, no other one could replace it.
		for (first.Served() < 1<<19 || additional.Served() == 0) && t.Context().Err() == nil {
			time.Sleep(time.Millisecond)
		}
		first.Close()
	}()
	status := target.load(t, f)
	require.True(t, status.Done, status)
	require.Positive(t, additional.Served())
	requireSame(t, source, target.memory)
}

func TestBadStages(t *testing.T) {
	d := onDevices(empty(1<<16), 0)
	_, err := NewFetch(d.host, Settings{BlockSize: small})
	require.ErrorContains(t, err, "windows of 0 blocks")
	f := newFetch(t, d.host, Settings{BlockSize: small, Window: 2})
	_, err = f.Stage(stageOf(make([]byte, 2*small-1)))
	require.ErrorContains(t, err, "a stage of 32767 bytes for windows of 32768")
	_, err = f.Stage(0, 10)
	require.ErrorContains(t, err, "no memory")
	stage := make([]byte, 2*small)
	window, err := f.Stage(stageOf(stage))
	require.NoError(t, err)
	require.Zero(t, window)
	_, err = f.Stage(stageOf(stage))
	require.ErrorIs(t, err, errStageInUse)
}

// A block of the source's device memory is sent as soon as it has been copied to host memory.
func TestADeviceCopyIsServedAsItGrows(t *testing.T) {
	source := filled(newRand(t), 1<<20, 1<<18)
	host, target := onDevices(source, 0), empty(1<<20, 1<<18)
	s := listen(t, time.Minute, 0)
	o := offer(t, host.host, small)
	f := newFetch(t, target, Settings{BlockSize: small, Streams: 2})
	grant := s.Grant(o)
	require.NoError(t, f.Add(address(s), grant.Secret(), Assigned))
	copied := make([]byte, 1<<20)
	at, _ := stageOf(copied)
	for ready := int64(0); ready < 1<<20; {
		end := min(ready+100_000, 1<<20)
		copy(copied[ready:end], source.regions[0][ready:end])
		require.NoError(t, o.Copied(0, at, end))
		// all copied blocks arrive, and no more: a block is not sent before all of it was copied
		whole := end - end%small
		require.Eventually(t, func() bool { return f.Status().Received >= whole }, time.Minute,
			time.Millisecond)
		if end < 1<<20 {
			require.LessOrEqual(t, f.Status().Received, end)
		}
		ready = end
	}
	require.True(t, wait(t, f).Done)
	requireSame(t, source, target)
	require.ErrorContains(t, o.Copied(0, at, 1<<20+1), "it has 1048577 bytes, and the region has 1048576")
}

// A wait for a copy ends when the copy fails, when the source withdraws the offer or ends, or when the copy
// is too slow.
func TestWaitingForADeviceCopyEndsWithTheCopy(t *testing.T) {
	for name, c := range map[string]struct {
		end   func(*Offer)
		error string
	}{
		"failed": {func(o *Offer) { o.CopyFailed("out of memory") },
			"the source could not copy its state from the device: out of memory"},
		"revoked": {func(o *Offer) { o.Revoke(0, time.Second) }, errRevoked.Error()},
		"ended":   {func(o *Offer) { o.End(time.Second) }, errEnded.Error()},
		"late": {func(*Offer) {},
			"timed out: the source did not copy its state from the device within 2s"},
	} {
		t.Run(name, func(t *testing.T) {
			timeout := time.Minute
			if name == "late" {
				timeout = 2 * time.Second
			}
			memory := onDevices(filled(newRand(t), 1<<16), 0)
			s, o := listen(t, timeout, 0), offer(t, memory.host, small)
			f := newFetch(t, empty(1<<16), Settings{BlockSize: small, Streams: 2})
			require.NoError(t, f.Add(address(s), s.Grant(o).Secret(), Assigned))
			c.end(o)
			status := wait(t, f)
			require.False(t, status.Done)
			require.Contains(t, status.Failed[0], c.error)
		})
	}
}

// If an error occurs after a part of a block was sent, the connection ends: the target would take a response
// with the reason for the rest of the block. The second region, which is yet to be sent when the copy fails,
// is as long as a response.
func TestAReasonNeverFollowsAPartOfABlock(t *testing.T) {
	source := filled(newRand(t), packBelow, responseSize, packBelow)
	s, o := listen(t, time.Minute, 0), offer(t, onDevices(source, 2).host, 1<<20)
	conn, err := net.Dial("tcp", address(s))
	require.NoError(t, err)
	defer conn.Close()
	g := s.Grant(o)
	_, err = conn.Write(request{op: opBlock, block: 0}.append(append([]byte(magic), g.secret[:]...)))
	require.NoError(t, err)
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	first := make([]byte, responseSize+packBelow)
	_, err = io.ReadFull(conn, first)
	require.NoError(t, err)
	require.Equal(t, source.regions[0], first[responseSize:])
	o.CopyFailed("out of memory")
	rest, _ := io.ReadAll(conn)
	require.True(t, bytes.HasPrefix(source.regions[1], rest), "%q follows", rest)
}

// Closing a server does not wait for requests that wait for a copy.
func TestAWaitForADeviceCopyEndsWithTheServer(t *testing.T) {
	s, err := Listen(time.Hour, 0, false)
	require.NoError(t, err)
	memory := onDevices(filled(newRand(t), 1<<16), 0)
	f := newFetch(t, empty(1<<16), Settings{BlockSize: small, Streams: 2})
	require.NoError(t, f.Add(address(s), s.Grant(offer(t, memory.host, small)).Secret(), Assigned))
	require.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.connections) == 2
	}, time.Minute, time.Millisecond)
	s.Close()
}
