package sim

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/lighthouse"
)

// job is one history: the lighthouse, groups, and the network between them.
type job struct {
	setup   setup
	cluster *fttest.Cluster
	net     *fttest.Network
	start   time.Time
	ctx     context.Context
	stop    context.CancelFunc
	tasks   sync.WaitGroup

	lighthouse *lighthouseHost

	mu      sync.Mutex // guards these, the judge, the process groups, and the fields whose comments say so
	judge   *judge
	groups  []*group // by slot, nil while there is none
	comms   map[planeKey]*comm
	running atomic.Int64 // goroutines of faults, and of their schedule
	lines   []string

	netMu sync.Mutex // guards the fields below
	rng   *rand.Rand
	slow  map[string]int // by machine: the number of faults that slow it down now
}

func newJob(t *testing.T, s setup) *job {
	j := &job{
		setup: s, net: fttest.NewNetwork(), start: time.Now(), groups: make([]*group, s.slots),
		comms: map[planeKey]*comm{}, rng: rand.New(rand.NewPCG(s.seed, 5)), slow: map[string]int{},
	}
	j.cluster = &fttest.Cluster{T: t, Net: j.net, Log: &fttest.Log{}}
	j.ctx, j.stop = context.WithCancel(context.Background())
	j.judge = newJudge(s, func(at time.Duration, line string) {
		j.lines = append(j.lines, fmt.Sprintf("%9.3fs %s", at.Seconds(), line))
	})
	j.judge.start = j.start
	j.net.Delays(j.delay)
	j.lighthouse = &lighthouseHost{j: j, life: make(lock, 1)}
	if s.disk {
		j.lighthouse.dir = t.TempDir()
	}
	return j
}

// note calls a function with the judge under the lock. The function must not block.
func (j *job) note(what func(*judge)) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.judge.now = max(j.judge.now, time.Since(j.start))
	what(j.judge)
}

// after calls a function after a time, unless the history is over by then.
func (j *job) after(d time.Duration, do func()) {
	j.tasks.Go(func() {
		select {
		case <-time.After(d):
			do()
		case <-j.ctx.Done():
		}
	})
}

// upTo returns a random duration of at most d.
func (j *job) upTo(d time.Duration) time.Duration {
	j.netMu.Lock()
	defer j.netMu.Unlock()
	return time.Duration(j.rng.Int64N(int64(d) + 1))
}

// delay returns how long a message takes.
func (j *job) delay(from, to string) time.Duration {
	j.netMu.Lock()
	defer j.netMu.Unlock()
	d := j.setup.delay/2 + time.Duration(j.rng.Int64N(int64(j.setup.delay)))
	if machine(from) == machine(to) {
		d /= 4
	} else if j.setup.straggle > 0 && j.rng.Float64() < j.setup.straggle {
		d *= 20
	}
	if j.slow[machine(from)]+j.slow[machine(to)] > 0 {
		d *= 15
	}
	return d
}

func machine(host string) string {
	name, _, _ := strings.Cut(host, ".")
	return name
}

func machineOf(slot int) string { return fmt.Sprintf("g%02d", slot) }

// lighthouseName is the name of the lighthouse's host.
const lighthouseName = "lh"

// lighthouseHost is the host of the lighthouse, across its restarts.
type lighthouseHost struct {
	j      *job
	dir    string // of its state, empty without one
	server *lighthouse.Server
	life   lock // held while the lighthouse starts or ends
}

// lock is a mutex that may be held while time passes. In a synctest bubble, time does not advance while a
// goroutine waits for a sync.Mutex.
type lock chan struct{}

func (l lock) Lock()   { l <- struct{}{} }
func (l lock) Unlock() { <-l }

func (h *lighthouseHost) begin() {
	h.life.Lock()
	defer h.life.Unlock()
	if h.j.ctx.Err() != nil {
		return
	}
	s := h.j.setup
	h.server = h.j.cluster.LighthouseOn(lighthouseName, s.policy.MinReplicas, func(cfg *lighthouse.Config) {
		cfg.Policy, cfg.QuorumTick, cfg.StateDir = s.policy, s.tick, h.dir
		cfg.Logger = slog.New(slog.NewTextHandler(h.j.cluster.Log, nil))
	})
	h.j.note(func(judge *judge) { judge.lighthouse(true) })
}

// crash ends the lighthouse, like SIGKILL or a power cut, and restarts it.
func (h *lighthouseHost) crash(silent bool, down time.Duration) {
	h.life.Lock()
	server := h.server
	h.server = nil
	if server != nil {
		h.j.note(func(judge *judge) { judge.lighthouse(false) })
		if silent {
			h.j.net.Host(lighthouseName).Vanish()
		} else {
			h.j.net.Host(lighthouseName).Kill()
		}
		server.Shutdown() // ends its goroutines; its messages reach no other host
	}
	h.life.Unlock()
	if server != nil {
		h.j.after(down, h.begin)
	}
}

// status returns what the lighthouse knows, nil while it does not run.
func (h *lighthouseHost) status() *dashboard.Status {
	h.life.Lock()
	defer h.life.Unlock()
	if h.server == nil {
		return nil
	}
	s := h.server.Status()
	return &s
}

// end shuts the lighthouse down in order, and checks that it does not list ended groups as healthy.
func (h *lighthouseHost) end() {
	h.life.Lock()
	defer h.life.Unlock()
	if h.server == nil {
		return
	}
	if s := h.server.Status(); s.Waiters > 0 || s.Healthy > 0 {
		h.j.note(func(judge *judge) {
			judge.broken(ruleMemory,
				"the lighthouse remembers %d healthy groups and %d waiters of a job that is over", s.Healthy,
				s.Waiters)
		})
	}
	h.server.Shutdown()
	h.server = nil
}
