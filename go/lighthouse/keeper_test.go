package lighthouse

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/metadata"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/testlog"
	"github.com/torchft/torchft/go/quorum"
)

// faulty is a disk that a test controls.
type faulty struct {
	mu      sync.Mutex
	err     error         // of a write
	reading chan struct{} // if not nil, a read of a file whose path contains "slow" returns when reading is closed
	writing chan struct{} // if not nil, a write waits for a value, or until writing is closed
	written []state
}

func (f *faulty) disk() disk {
	return disk{
		read: func(path string) ([]byte, error) {
			if f.reading != nil && strings.Contains(path, "slow") {
				<-f.reading
			}
			return nil, os.ErrNotExist
		},
		write: func(_ string, s state, wanted func() bool) error {
			if f.writing != nil {
				<-f.writing
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			if f.err == nil && wanted() {
				f.written = append(f.written, s)
			}
			return f.err
		},
	}
}

func (f *faulty) fails(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

func (f *faulty) last() state {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.written) == 0 {
		return state{}
	}
	return f.written[len(f.written)-1]
}

// asOf returns the context of a call of a job.
func asOf(ctx context.Context, job string) context.Context {
	outgoing, _ := metadata.FromOutgoingContext(rpc.WithJob(ctx, job))
	return metadata.NewIncomingContext(ctx, outgoing)
}

// kept returns a job with one member, and the log of the job. The disk keeps the state of the job.
func kept(f *faulty) (*job, *testlog.Log) {
	j, _ := crowd(1)
	var log testlog.Log
	j.mu.Lock() // the page's task has begun
	defer j.mu.Unlock()
	j.log, j.cfg.StateDir, j.cfg.disk = slog.New(slog.NewTextHandler(&log, nil)), "/state", f.disk()
	j.keep()
	return j, &log
}

func TestAHangingDiskBlocksNoQuorumAndNoShutdownForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &faulty{writing: make(chan struct{})}
		j, log := kept(f)
		synctest.Wait()
		start := time.Now()
		for id := range int64(3) {
			j.keeper.keep(state{Highest: id})
			synctest.Wait()
		}
		assert.Zero(t, time.Since(start), "no quorum waits for a write")
		assert.Empty(t, j.status().Unkept, "a slow disk is not reported at once")

		time.Sleep(diskTime)
		j.tick(time.Now())
		assert.Equal(t, "/state/default.state: the disk does not answer", j.status().Unkept)
		assert.Equal(t, diskTime.Milliseconds(), j.status().UnkeptMS)
		j.tick(time.Now())
		assert.Equal(t, 1, strings.Count(log.String(), "is not kept on disk"))

		start = time.Now()
		j.shutDown()
		assert.Equal(t, diskTime, time.Since(start))
		assert.True(t, j.keeper.left.Load(), "a late write must not overwrite the state of another lighthouse")
		close(f.writing)
		synctest.Wait()
		assert.Empty(t, f.written)
	})
}

func TestAFailedWriteIsReportedAndRetried(t *testing.T) {
	for _, fault := range []error{syscall.ENOSPC, syscall.EIO} {
		synctest.Test(t, func(t *testing.T) {
			f := &faulty{err: fault}
			j, log := kept(f)
			j.keeper.keep(state{Highest: 7})
			time.Sleep(2*writeAgain + writeAgain/2)
			assert.Equal(t, fault.Error(), j.status().Unkept)
			assert.Positive(t, j.status().UnkeptMS)
			assert.Equal(t, 1, strings.Count(log.String(), "is not kept on disk"))
			assert.Contains(t, log.String(), fault.Error())

			f.fails(nil)
			time.Sleep(writeAgain)
			synctest.Wait()
			assert.Equal(t, int64(7), f.last().Highest, "the same state is written again")
			assert.Empty(t, j.status().Unkept)
			assert.Contains(t, log.String(), "is kept on disk again")
			j.shutDown()
		})
	}
}

func TestTheLatestStateIsWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &faulty{writing: make(chan struct{})}
		j, _ := kept(f)
		for id := range int64(5) {
			j.keeper.keep(state{Highest: id})
			synctest.Wait()
		}
		close(f.writing)
		synctest.Wait()
		assert.Equal(t, int64(4), f.last().Highest)
		assert.Len(t, f.written, 2, "states in between are not written")
		assert.Empty(t, j.status().Unkept)
		j.shutDown()
	})
}

// A file that cannot be read (a slow NFS) delays its own job for diskTime, and no other job.
func TestAJobBeginsWithoutAStateThatCannotBeRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &faulty{reading: make(chan struct{})}
		j, log := kept(f)
		s := j.server
		s.cfg.StateDir, s.cfg.disk, s.log, s.cfg.MaxJobs, s.cfg.MaxCallsPerJob = "/state", f.disk(), j.log, 10, 10
		start := time.Now()
		fast, err := s.use(asOf(t.Context(), "fast"))
		require.NoError(t, err)
		assert.Zero(t, time.Since(start))

		var slow *job
		done := make(chan struct{})
		go func() {
			defer close(done)
			slow, err = s.use(asOf(t.Context(), "slow"))
		}()
		synctest.Wait()
		other, _ := s.use(asOf(t.Context(), "fast"))
		assert.Same(t, fast, other)
		assert.Zero(t, time.Since(start), "other jobs do not wait for the slow file")
		<-done
		require.NoError(t, err)
		assert.Equal(t, diskTime, time.Since(start))
		assert.Contains(t, log.String(), "the job begins without")
		assert.Equal(t, "/state/slow.state: the disk does not answer", slow.status().Unkept)
		require.NoError(t, slow.feed(quorum.Beat{ReplicaID: "a"}))

		close(f.reading)
		synctest.Wait()
		assert.Empty(t, slow.status().Unkept)
		for _, ended := range []*job{fast, slow} {
			ended.close(errShutdown)
		}
		j.shutDown()
	})
}

// On a real disk: the directory is removed while the lighthouse runs.
func TestAMissingDirectoryIsOnThePageAndInMetrics(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s, log := startOn(t, dir)
	s.testAsk(t, "a", 7)
	// The keeper may put a file into the directory while it is being removed.
	require.Eventually(t, func() bool { return os.RemoveAll(dir) == nil }, time.Minute, time.Millisecond)
	s.jobs["default"].keeper.keep(state{Job: "default"})
	ask := func(path string) string {
		answer := httptest.NewRecorder()
		s.handler().ServeHTTP(answer, httptest.NewRequest(http.MethodGet, path, nil))
		return answer.Body.String()
	}
	require.Eventually(t, func() bool { return strings.Contains(ask("/status"), `"unkept": "`) }, time.Minute, 10*time.Millisecond)
	assert.Contains(t, ask("/api/v1/status"), "no such file or directory")
	assert.Eventually(t, func() bool { // a time below a millisecond is shown as 0
		return !strings.Contains(ask("/metrics"), "torchft_state_unkept_seconds{training_job=\"default\"} 0\n")
	}, time.Minute, time.Millisecond)
	assert.Contains(t, ask("/metrics"), "torchft_state_unkept_seconds{training_job=\"default\"}")
	s.Shutdown()
	assert.Contains(t, log.String(), "is not kept on disk")
}
