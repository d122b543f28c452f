package dashboard

import (
	"bytes"
	"fmt"
	"io"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
)

// busy fills the history of the site, so that its first message to a viewer has about 100 KB.
func busy(s *site, j *job) {
	var members []Member
	for i := range 200 {
		members = append(members, member(fmt.Sprintf("train_%d:5f9c3f0e-9a51-4f0b-8a57-2a4f6d1c7e11", i),
			123456789))
		s.Record(Event{Kind: QuorumChanged, Joined: []string{members[i].ReplicaID},
			Reason: "every healthy member asked"})
	}
	j.set(members...)
}

// heap collects garbage, and returns the bytes of the heap that are in use.
func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func (s *site) watching() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.viewers)
}

// Limits for one connection with its buffers of 4 KiB and its stacks; both ends are in this process. The
// limit of bytes is below the size of the first message, so that a copy for each viewer would exceed it.
const (
	mostBytesOfAViewer      = 60_000
	mostGoroutinesOfAViewer = 4
)

func TestAThousandViewersShareMessagesAndSlowOnesAreDisconnected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &job{}
		s := serve(t, j)
		busy(s, j)
		all := mustJoin(t, s).whole.message()
		size := int64(len(all))
		require.Greater(t, size, int64(mostBytesOfAViewer))
		synctest.Wait()
		before, goroutines := heap(), runtime.NumGoroutine()

		// All connect at once, as after a restart of their lighthouse. None has read anything yet.
		const viewers, slow = 1000, 100
		var streams []*stream
		for range viewers {
			streams = append(streams, s.watch(t, "/api/v1/events", ""))
		}
		synctest.Wait()
		assert.Equal(t, viewers, s.watching())
		grown := heap() - before
		assert.Less(t, grown, 4*size+viewers*mostBytesOfAViewer,
			"viewers share one copy of each message: %d viewers of %d bytes cost %d", viewers, size, grown)
		assert.LessOrEqual(t, runtime.NumGoroutine()-goroutines, viewers*mostGoroutinesOfAViewer)

		// The viewers that read get all messages in order.
		reading, stuck := streams[slow:], streams[:slow]
		for _, viewer := range reading {
			got := make([]byte, size)
			_, err := io.ReadFull(viewer.lines, got)
			require.NoError(t, err)
			require.True(t, bytes.Equal(all, got))
		}
		for i := range 2 * backlog {
			s.Record(Event{Kind: MemberFailed, Left: []string{fmt.Sprint("group ", i)}})
			for _, viewer := range reading {
				var e Event
				for event := ""; event != "event"; {
					event, _ = viewer.next(t, &e)
				}
				require.Equal(t, []string{fmt.Sprint("group ", i)}, e.Left)
			}
		}
		// The stuck ones are disconnected. Their connections are closed when the deadline of the pending
		// write has passed.
		synctest.Wait()
		assert.Equal(t, viewers-slow, s.watching())
		ended := make(chan error, len(reading))
		for _, viewer := range reading {
			go func() {
				_, err := io.Copy(io.Discard, viewer.lines)
				ended <- err
			}()
		}
		time.Sleep(2 * keepWrite)
		assert.Equal(t, viewers-slow, s.watching(), "the reading viewers stay connected")
		for _, viewer := range stuck {
			_, err := io.Copy(io.Discard, viewer.lines)
			require.Error(t, err, "a stuck viewer sees that its connection was closed")
		}

		s.close()
		for range reading {
			require.NoError(t, <-ended, "the stream ends with EOF")
		}
		for _, viewer := range streams {
			_ = viewer.body.Close()
		}
		s.client.CloseIdleConnections()
		synctest.Wait()
		assert.Zero(t, s.watching())
		assert.LessOrEqual(t, runtime.NumGoroutine(), goroutines+1,
			"no goroutine of a viewer is left; one may be running finalizers")
	})
}

func mustJoin(t *testing.T, s *site) *viewer {
	t.Helper()
	v, err := s.join(0)
	require.NoError(t, err)
	s.leave(v)
	return v
}

func TestSimultaneousViewersCauseNoMessagesToTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &job{}
		j.set(member("a", 1))
		s := serve(t, j)
		first, err := s.join(0)
		require.NoError(t, err)
		for range 10 * backlog {
			next, err := s.join(0)
			require.NoError(t, err)
			assert.Same(t, first.whole, next.whole, "the first message is encoded once for all viewers")
			s.leave(next)
			time.Sleep(time.Millisecond)
		}
		assert.Empty(t, first.messages, "a connected viewer gets no message when another one joins")
		assert.Equal(t, 1, s.watching())

		// The first message to a viewer that joins after an event contains this event.
		s.Record(Event{Kind: Killed, Left: []string{"a"}})
		assert.Contains(t, string(mustJoin(t, s).whole.message()), `"killed"`)
		s.leave(first)
	})
}

func TestMemoryIsBoundedForABrowserConnectedForADay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &job{}
		s := serve(t, j)
		viewer := s.watch(t, "/api/v1/events", "")
		received := 0
		done := make(chan struct{})
		go func() {
			defer close(done)
			n, _ := io.Copy(io.Discard, viewer.lines)
			received = int(n)
		}()
		var settled int64
		hours, mostGrown := 9, int64(2<<20) // more than mostEvents
		if testmain.Full() {
			hours, mostGrown = 24, 4<<20
		}
		for minute := range hours * 60 {
			if minute == 2*60 {
				settled = heap()
			}
			// A group fails each minute, and comes back under a new name.
			name := fmt.Sprintf("group_0:%d", minute)
			s.Record(Event{Kind: MemberFailed, Left: []string{name}, Reason: "its connection broke"})
			s.Record(Event{Kind: QuorumChanged, Joined: []string{name}})
			for second := range 60 {
				step := int64(60*minute + second)
				j.set(member(name, step), member("group_1", step))
				s.Round(step, 2, time.Millisecond, time.Now())
				time.Sleep(time.Second)
			}
		}
		grown := heap() - settled
		assert.Less(t, grown, mostGrown, "the heap grew by %d bytes in %d hours", grown, hours-2)
		assert.Equal(t, 1, s.watching(), "the viewer was never disconnected")
		s.mu.Lock()
		assert.Len(t, s.history.events, mostEvents)
		assert.LessOrEqual(t, len(s.history.points), mostPoints)
		assert.Len(t, s.board.rows, 2, "names of members that left are forgotten")
		s.mu.Unlock()
		s.close()
		<-done
		assert.Greater(t, received, hours*3600*100, "the viewer got a message for each second")
	})
}
