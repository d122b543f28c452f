package heal

import (
	"io"
	"net"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The main thread cannot end: no goroutine of a test shall run on it.
func init() { runtime.LockOSThread() }

// lowThreads counts the threads of this process that help.
func lowThreads(t *testing.T) int {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	require.NoError(t, err)
	count := 0
	for _, task := range tasks {
		thread, err := strconv.Atoi(task.Name())
		require.NoError(t, err)
		if nice(thread) == min(19, nice(os.Getpid())+servingNice) {
			count++
		}
	}
	return count
}

// What helps yields to the training of the source, and no thread of the process stays so afterwards.
func TestHelpingRunsAtLowPriority(t *testing.T) {
	if nice(os.Getpid()) == 19 {
		t.Skip("these tests run at the lowest priority: there is none below")
	}
	before := lowThreads(t)
	s, o := listen(t, time.Minute, 0), offer(t, filled(newRand(t), 1<<20), 0)
	conn, err := net.Dial("tcp", address(s))
	require.NoError(t, err)
	g := s.Grant(o)
	_, err = conn.Write(append([]byte(magic), g.secret[:]...))
	require.NoError(t, err)
	ask := func(op uint32) {
		_, err := conn.Write(request{op: op, block: 0}.append(nil))
		require.NoError(t, err)
		_, err = io.ReadFull(conn, make([]byte, responseSize))
		require.NoError(t, err)
	}
	ask(opEqual) // only those who help are asked so
	require.Eventually(t, func() bool { return lowThreads(t) == before+1 }, 10*time.Second, time.Millisecond)
	require.NoError(t, conn.Close())
	require.Eventually(t, func() bool { return lowThreads(t) == before }, 10*time.Second, time.Millisecond)
}
