package lighthouse

import (
	"context"
	"errors"
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

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/testlog"
	"github.com/torchft/torchft/go/quorum"
)

// faulty is a disk that a test controls.
type faulty struct {
	mu      sync.Mutex
	err     error             // of a write
	reading chan struct{}     // if not nil, a read returns when it is closed
	writing chan struct{}     // if not nil, a write waits for a value, or until writing is closed
	holds   map[string][]byte // what is read
	written []state
}

func (f *faulty) disk() disk {
	return disk{
		read: func(string, *slog.Logger) (map[string][]byte, error) {
			if f.reading != nil {
				<-f.reading
			}
			return f.holds, nil
		},
		write: func(ctx context.Context, path string, text []byte) error {
			if f.writing != nil {
				<-f.writing
			}
			s, err := decodeState(text, strings.TrimSuffix(filepath.Base(path), ".state"))
			if err != nil {
				return err
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			if f.err == nil && ctx.Err() == nil {
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

// kept returns a job with one member, and the log of the job. The disk keeps the state of the job.
func kept(f *faulty) (*job, *testlog.Log) {
	j, _ := largeJob(1)
	var log testlog.Log
	j.mu.Lock() // the page's task has begun
	j.log = slog.New(slog.NewTextHandler(&log, nil))
	j.mu.Unlock()
	j.server.store = openFiles("/state", j.log, f.disk(), j.server.restore)
	j.begin(j.server.store)
	return j, &log
}

// ofQuorum returns a state of the default job that can be read.
func ofQuorum(id int64) state {
	return state{Job: rpc.DefaultJob, Kept: quorum.Kept{Highest: id,
		Past: quorum.Past{ID: id, Members: []quorum.Voter{{ReplicaID: "a"}}}}}
}

func TestAHangingDiskBlocksNoQuorumAndNoShutdownForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &faulty{writing: make(chan struct{})}
		j, log := kept(f)
		synctest.Wait()
		start := time.Now()
		for id := range int64(3) {
			j.saver.keep(ofQuorum(id + 1))
			synctest.Wait()
			require.False(t, j.saver.once(func() {}))
		}
		assert.Zero(t, time.Since(start), "no quorum waits for a write")
		assert.Empty(t, j.status().Unkept, "a slow disk is not reported at once")

		time.Sleep(diskTime)
		synctest.Wait()
		assert.Equal(t, "/state/default.state: the disk does not answer", j.status().Unkept)
		assert.Equal(t, diskTime.Milliseconds(), j.status().UnkeptMS)
		time.Sleep(10 * diskTime)
		assert.Equal(t, 1, strings.Count(log.String(), "is not kept on disk"))

		start = time.Now()
		j.shutDown()
		assert.LessOrEqual(t, time.Since(start), diskTime)
		assert.Contains(t, log.String(), "the last state of the job is not on disk")
		close(f.writing)
		synctest.Wait()
		assert.Empty(t, f.written, "a late write must not overwrite the state of another lighthouse")
	})
}

func TestAFailedWriteIsReportedAndRetried(t *testing.T) {
	for _, fault := range []error{syscall.ENOSPC, syscall.EIO} {
		synctest.Test(t, func(t *testing.T) {
			f := &faulty{err: fault}
			j, log := kept(f)
			j.saver.keep(ofQuorum(7))
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
			j.saver.keep(ofQuorum(id + 1))
			synctest.Wait()
		}
		close(f.writing)
		synctest.Wait()
		assert.Equal(t, int64(5), f.last().Highest)
		assert.Len(t, f.written, 2, "states in between are not written")
		assert.Empty(t, j.status().Unkept)
		j.shutDown()
	})
}

// A directory that cannot be read (a slow NFS) delays the start of the lighthouse for diskTime. The state
// still counts when it comes.
func TestAJobBeginsWithoutAStateThatCannotBeRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		old := ofQuorum(7)
		old.Highest = 1 << 41
		text, err := old.encode()
		require.NoError(t, err)
		f := &faulty{reading: make(chan struct{}), holds: map[string][]byte{"default": text}}
		start := time.Now()
		j, log := kept(f)
		defer j.shutDown()
		finish := sync.OnceFunc(func() { close(f.reading) })
		defer finish()
		assert.Equal(t, diskTime, time.Since(start))
		assert.Contains(t, log.String(), "the jobs begin without them")
		require.NoError(t, j.feed(quorum.Beat{ReplicaID: "a"}))
		require.Less(t, j.status().QuorumID, old.Highest)

		finish()
		synctest.Wait()
		assert.Contains(t, log.String(), "continues from its state on disk")
		assert.Equal(t, text, j.server.store.States()["default"])
		for _, id := range []string{"a", "000000"} {
			_, _, err := j.ask(quorum.Asked{Member: quorum.Member{ReplicaID: id, Step: 8}, Number: 2})
			require.NoError(t, err)
		}
		assert.Greater(t, j.status().QuorumID, old.Highest, "%+v", j.status())
	})
}

// On a real disk: the directory is removed while the lighthouse runs.
func TestAMissingDirectoryIsOnThePageAndInMetrics(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s, log := startOn(t, dir)
	s.testAsk(t, "a", 7)
	// The saver may put a file into the directory while it is being removed.
	require.Eventually(t, func() bool { return os.RemoveAll(dir) == nil }, time.Minute, time.Millisecond)
	s.jobs["default"].saver.keep(ofQuorum(9))
	ask := func(path string) string {
		answer := httptest.NewRecorder()
		s.handler().ServeHTTP(answer, httptest.NewRequest(http.MethodGet, path, nil))
		return answer.Body.String()
	}
	require.Eventually(t, func() bool { return strings.Contains(ask("/status"), `"unkept": "`) }, time.Minute,
		10*time.Millisecond)
	assert.Contains(t, ask("/api/v1/status"), "no such file or directory")
	assert.Eventually(t, func() bool { // a time below a millisecond is shown as 0
		return !strings.Contains(ask("/metrics"),
			"torchft_state_unkept_seconds{training_job=\"default\"} 0\n")
	}, time.Minute, time.Millisecond)
	assert.Contains(t, ask("/metrics"), "torchft_state_unkept_seconds{training_job=\"default\"}")
	s.Shutdown()
	assert.Contains(t, log.String(), "is not kept on disk")
}

// slowLog is a log of which each proposal waits for next.
type slowLog struct {
	saver
	done sync.WaitGroup
	next chan error
	seen []string // what happened, in order
}

func newSlowLog() *slowLog {
	l := &slowLog{next: make(chan error)}
	l.saver = saver{
		log: slog.New(slog.DiscardHandler), tasks: &l.done,
		propose: func([]byte) error { return <-l.next },
		lost:    func(err error) { l.seen = append(l.seen, "lost") },
	}
	return l
}

func (l *slowLog) answer(what string) bool {
	return l.once(func() { l.seen = append(l.seen, what) })
}

// Each answer comes after the state that it belongs to, and after the answers before it.
func TestAnswersFollowTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newSlowLog()
		require.False(t, l.answer("at once"))
		l.keep(state{Kept: quorum.Kept{Highest: 1}})
		require.True(t, l.answer("1"))
		synctest.Wait()
		require.True(t, l.answer("1 again"))
		l.keep(state{Kept: quorum.Kept{Highest: 2}})
		require.True(t, l.answer("2"))
		synctest.Wait()
		assert.Empty(t, l.seen)
		l.next <- nil
		synctest.Wait()
		assert.Equal(t, []string{"1", "1 again"}, l.seen)
		l.next <- nil
		synctest.Wait()
		assert.Equal(t, []string{"1", "1 again", "2"}, l.seen)
		require.False(t, l.answer("at once"))

		l.keep(state{Kept: quorum.Kept{Highest: 3}})
		require.True(t, l.answer("3"))
		l.next <- errors.New("another lighthouse leads")
		l.done.Wait()
		require.True(t, l.answer("too late"))
		assert.Equal(t, []string{"1", "1 again", "2", "lost"}, l.seen)
	})
}

// No answer is lost that comes while the last ones are given.
func TestAnswersAtTheEndOfAProposal(t *testing.T) {
	l := newSlowLog()
	l.propose = func([]byte) error { return nil }
	for range 20_000 {
		l.keep(state{Kept: quorum.Kept{Highest: 1}})
		answered := make(chan struct{})
		for later := true; later; {
			if later = l.once(func() { close(answered) }); later {
				<-answered
				answered = make(chan struct{})
			}
		}
	}
	l.done.Wait()
}

// A job whose answers fail is lost, and does not wait forever.
func TestAnAnswerThatPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newSlowLog()
		l.keep(state{Kept: quorum.Kept{Highest: 1}})
		require.True(t, l.once(func() { panic("a bug") }))
		l.next <- nil
		l.done.Wait()
		assert.Equal(t, []string{"lost"}, l.seen)
	})
}
