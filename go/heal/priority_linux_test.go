package heal

import (
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// niceThreads counts the threads of this process that serve.
func niceThreads(t *testing.T) int {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	require.NoError(t, err)
	count := 0
	for _, task := range tasks {
		stat, err := os.ReadFile("/proc/self/task/" + task.Name() + "/stat")
		if err != nil {
			continue // it has ended
		}
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		nice, err := strconv.Atoi(fields[16]) // the 19th field; see proc(5)
		require.NoError(t, err)
		if nice >= servingNice {
			count++
		}
	}
	return count
}

// What serves yields to the training of the source, and no thread of the process stays so afterwards.
func TestServingRunsAtLowPriority(t *testing.T) {
	before := niceThreads(t)
	s, o := listen(t, time.Minute, 0), offer(t, filled(newRand(t), 1<<20), 0)
	conn, err := net.Dial("tcp", address(s))
	require.NoError(t, err)
	g := s.Grant(o)
	_, err = conn.Write(append([]byte(magic), g.secret[:]...))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return niceThreads(t) == before+1 }, 10*time.Second, time.Millisecond)
	require.NoError(t, conn.Close())
	require.Eventually(t, func() bool { return niceThreads(t) == before }, 10*time.Second, time.Millisecond)
}
