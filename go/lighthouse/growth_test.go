package lighthouse

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"google.golang.org/grpc"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/testmain"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// largeJob returns a job with the streams of many members that do not read.
func largeJob(n int) (*job, []*stream) {
	cfg := DefaultConfig()
	cfg.MinReplicas, cfg.JoinTimeout, cfg.HeartbeatTimeout, cfg.SuspectGrace = n, time.Hour, time.Hour,
		time.Hour
	cfg.Logger, cfg.Hostname = slog.New(slog.DiscardHandler), "localhost" // a name that is not resolved
	s := &Server{cfg: cfg.withDefaults(), log: cfg.Logger, stop: make(chan struct{}), jobs: map[string]*job{}}
	j := newJob(s, rpc.DefaultJob)
	s.jobs[j.name] = j
	all := make([]*stream, n)
	for i := range all {
		one := &stream{job: j, replicaID: fmt.Sprintf("%06d", i), wire: unread{}}
		one.sender.Post(func() { <-s.stop })
		j.greeting, all[i] = one, one
		_ = j.feed(quorum.Greeted{ReplicaID: one.replicaID})
	}
	for i, one := range all {
		_, _, _ = j.ask(quorum.Asked{Member: quorum.Member{ReplicaID: one.replicaID}, Number: uint64(i + 1)})
	}
	return j, all
}

// unread is the stream of a member that does not read, and ends with the server.
type unread struct {
	grpc.BidiStreamingServer[torchftpb.MemberMessage, torchftpb.LighthouseMessage]
}

func (unread) SendMsg(any) error                       { return errShutdown }
func (unread) Send(*torchftpb.LighthouseMessage) error { return errShutdown }

// The queue of messages for a member that does not read is bounded. When it is full, the stream receives
// nothing until it reads (stream.deaf).
func TestTheQueueOfAMemberThatDoesNotReadIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j, all := largeJob(1)
		for range 2000 {
			all[0].post(heard)
		}
		assert.True(t, all[0].deaf.Load())
		j.shutDown()
		<-all[0].sender.Flushed()
	})
}

// shutDown ends a largeJob.
func (j *job) shutDown() {
	j.close(errShutdown)
	close(j.server.stop)
	j.server.tasks.Wait()
}

// bursts are simultaneous events of all members of a job.
var bursts = []struct {
	name string
	run  func(j *job, all []*stream)
}{
	{"end", func(j *job, all []*stream) {
		for _, one := range all {
			_ = j.feed(quorum.ShuttingDown{ReplicaID: one.replicaID})
		}
		for _, one := range all {
			j.mu.Lock()
			if j.streams.remove(one) {
				_ = j.step(quorum.Disconnected{ReplicaID: one.replicaID})
			}
			j.mu.Unlock()
		}
	}},
	{"drain", func(j *job, all []*stream) {
		for _, one := range all {
			_ = j.drain(one.replicaID, "maintenance")
		}
	}},
	{"send", func(j *job, all []*stream) {
		for _, one := range all {
			j.mu.Lock()
			j.streams.send(&torchftpb.LighthouseMessage{}, one.replicaID)
			j.mu.Unlock()
		}
	}},
}

// The end of a large job must not block the other jobs. So simultaneous events of all members visit each
// stream a few times, instead of all streams once for each member.
func TestNothingGrowsWithTheSquareOfTheStreams(t *testing.T) {
	statements := testmain.Statements(t, "TestOneBurst")
	for _, b := range bursts {
		few, many := statements(t, b.name, 100), statements(t, b.name, 1000)
		assert.LessOrEqual(t, many, 20*few, "%s: statements with 100 members: %d, with 1,000: %d", b.name,
			few, many)
	}
}

// TestOneBurst is what TestNothingGrowsWithTheSquareOfTheStreams measures.
func TestOneBurst(t *testing.T) {
	name, n := testmain.Case()
	for _, b := range bursts {
		if b.name == name {
			j, all := largeJob(n)
			b.run(j, all)
			j.shutDown()
		}
	}
}

// readers are the HTTP paths that show the status of a job.
var readers = []string{"/status", "/jobs", "/api/v1/status"}

// read requests a path from the job's server, and returns the body of the answer.
func (j *job) read(t testing.TB, path string) string {
	answer := httptest.NewRecorder()
	j.server.handler().ServeHTTP(answer, httptest.NewRequest(http.MethodGet, path, nil))
	assert.Equal(t, http.StatusOK, answer.Code)
	return answer.Body.String()
}

// All readers share one status of the machine for 100 µs times the number of members: for 100 ms with 1,000
// members. Without a machine, another one cannot be made.
func TestReadersShareASnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j, _ := largeJob(1000)
		defer j.shutDown()
		var all sync.WaitGroup
		shared := make([]*dashboard.Member, 9)
		for i := range shared {
			all.Go(func() { shared[i] = &j.shown().Members[0] })
		}
		all.Wait()
		assert.Len(t, slices.Compact(shared), 1)
		j.mu.Lock()
		machine := j.machine
		j.machine = nil
		j.mu.Unlock()
		time.Sleep(99 * time.Millisecond)
		for _, path := range readers {
			assert.NotContains(t, j.read(t, path), "internal error")
		}
		time.Sleep(time.Millisecond)
		assert.Contains(t, j.read(t, "/status"), "internal error")
		j.mu.Lock()
		j.machine = machine
		j.mu.Unlock()
	})
}

// BenchmarkRead measures one read of each path, at full speed.
func BenchmarkRead(b *testing.B) {
	for _, path := range readers {
		for _, n := range []int{100, 1000, 10000} {
			b.Run(fmt.Sprintf("%s/members=%d", path[1:], n), func(b *testing.B) {
				j, _ := largeJob(n)
				defer j.shutDown()
				for b.Loop() {
					j.read(b, path)
				}
			})
		}
	}
}

// BenchmarkBurst measures the time of the events that TestNothingGrowsWithTheSquareOfTheStreams measures.
func BenchmarkBurst(b *testing.B) {
	for _, burst := range bursts {
		for _, n := range []int{100, 1000, 10000} {
			b.Run(fmt.Sprintf("%s/members=%d", burst.name, n), func(b *testing.B) {
				for b.Loop() {
					b.StopTimer()
					j, all := largeJob(n)
					b.StartTimer()
					burst.run(j, all)
					b.StopTimer()
					j.shutDown()
					b.StartTimer()
				}
			})
		}
	}
}
