package heal

import (
	"io"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/torchft/torchft/go/internal/testmain"
)

// init keeps the goroutines of the tests off the main thread. A thread with a lower priority ends with its
// goroutine. The main thread would not end: it would keep that priority, and be counted below.
func init() { runtime.LockOSThread() }

// yielding counts the threads of this process that run in the background (SCHED_IDLE), and those with the
// smallest share (nice 19).
func yielding(t *testing.T) (idle, least int) {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	require.NoError(t, err)
	for _, task := range tasks {
		thread, err := strconv.Atoi(task.Name())
		require.NoError(t, err)
		attr, err := unix.SchedGetAttr(thread, 0)
		switch {
		case err != nil: // the thread has ended
		case attr.Policy == unix.SCHED_IDLE:
			idle++
		case attr.Nice == leastNice:
			least++
		}
	}
	return idle, least
}

func (c served) ask(op uint32) {
	_, err := c.Write(request{op: op, block: 0}.append(nil))
	require.NoError(c, err)
	_, err = io.ReadFull(c, make([]byte, responseSize))
	require.NoError(c, err)
}

// Threads that serve a target have a lower priority than the training of the source, and no thread keeps that
// priority afterwards.
func TestServingYieldsToTheTraining(t *testing.T) {
	idleBefore, leastBefore := yielding(t)
	if leastBefore > 0 {
		testmain.Skip(t, "these tests run at nice 19 themselves: their threads would be counted as the server's")
	}
	become := func(idle, least int) {
		t.Helper()
		require.Eventually(t, func() bool {
			i, l := yielding(t)
			return i == idleBefore+idle && l == least
		}, time.Minute, time.Millisecond, "expected %d in the background and %d with the smallest share", idle, least)
	}
	s, err := Listen(time.Minute, 0, true)
	require.NoError(t, err)
	t.Cleanup(s.Close)
	o := offer(t, filled(newRand(t), 1<<20), 0)
	g := s.Grant(o)
	first := connected(t, s, g)
	first.ask(opBlock)
	become(0, 1)
	second := connected(t, s, g)
	second.ask(opBlock)
	become(1, 1)
	connected(t, s, s.Grant(o)).ask(opBlock) // each target has one stream with the smallest share
	become(1, 2)

	require.NoError(t, first.Close())
	become(1, 1)
	third := connected(t, s, g)
	third.ask(opBlock)
	become(1, 2)
	// OpEqual shows that this server is an additional source: the stream moves to the background.
	third.ask(opEqual)
	become(2, 1)
	g.Close()
	become(0, 1)
	s.Close()
	become(0, 0)
}

// Without the setting the streams of the assigned source keep the normal priority, since all groups wait for
// it. Streams of additional sources still run in the background.
func TestHelpingYieldsToTheTraining(t *testing.T) {
	before, _ := yielding(t)
	s, o := listen(t, time.Minute, 0), offer(t, filled(newRand(t), 1<<20), 0)
	c := connected(t, s, s.Grant(o))
	c.ask(opBlock)
	idle, least := yielding(t)
	require.Equal(t, []int{before, 0}, []int{idle, least})
	c.ask(opEqual)
	require.Eventually(t, func() bool { idle, _ := yielding(t); return idle == before+1 }, time.Minute,
		time.Millisecond)
	s.Close()
	require.Eventually(t, func() bool { idle, _ := yielding(t); return idle == before }, time.Minute,
		time.Millisecond)
}
