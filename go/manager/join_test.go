package manager_test

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/testmain"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/rankclient"
)

const (
	computes = 50 * time.Millisecond
	link     = time.Millisecond // between two hosts, one way; half as much or twice as much
)

// largeJob is a job of groups with one rank each. Their steps are models: a time in which they compute, up to
// 4 % more than the least, and an allreduce that ends one link after the last group has begun it. A group
// that joins has the state of the others at once.
type largeJob struct {
	t   *testing.T
	c   *fttest.Cluster
	ctx context.Context // with a deadline for all of the job

	running sync.WaitGroup

	mu         sync.Mutex // guards these
	rng        *rand.Rand
	latest     int64 // step that a group has begun
	last       int64 // step after which the groups end; 0: none
	reductions map[reduction]*reduced
	steps      []time.Duration // of groups that are in, from the begin of the step to its commit
	// for each group that has joined: its first step, less the one in which the others were when it asked
	joined []int64
	asked  int // requests of quorums
	lost   int // votes that did not commit
}

type reduction struct{ quorumID, step int64 }

type reduced struct {
	missing int64
	done    chan struct{}
}

// group runs a group until the job ends. The first groups begin at step 1 with the same weights, one that
// joins has none.
func (j *largeJob) group(name string, joins bool) {
	cfg := j.c.ServerConfig(name, 1)
	server, err := fttest.NewManager(j.ctx, cfg)
	if !assert.NoError(j.t, err) {
		return
	}
	defer server.Shutdown()
	// in this process
	client, err := rankclient.Dial(j.ctx, server.Address(), time.Minute, rpc.Dialing{Network: cfg.Network})
	if !assert.NoError(j.t, err) {
		return
	}
	defer func() { assert.NoError(j.t, client.Close()) }()
	g := &largeGroup{j: j, client: client,
		ask: &fttest.Request{Step: 1, CommittedQuorumId: 7}}
	if joins {
		g.ask = &fttest.Request{Step: 0, CommittedQuorumId: -1}
	}
	for first, ended := true, false; !ended; first = false {
		if ended, err = g.attempt(first, first && joins); !assert.NoError(j.t, err) {
			return
		}
	}
}

type largeGroup struct {
	j      *largeJob
	client *rankclient.Client
	ask    *fttest.Request
	in     *fttest.Result
	stands bool
}

// attempt makes a step, and reports whether it was the job's last one.
func (g *largeGroup) attempt(first, joins bool) (last bool, err error) {
	j := g.j
	began, others := time.Now(), j.begins(g.ask.Step, !g.stands)
	if !g.stands {
		if g.in, err = g.client.Quorum(j.ctx, g.ask); err != nil {
			return false, err
		}
		g.ask.Step = g.in.GetMaxStep()
	}
	time.Sleep(computes + j.upTo(computes/25))
	j.reduce(g.in.GetQuorumId(), g.ask.Step, g.in.GetReplicaWorldSize())
	d, err := g.client.ShouldCommit(j.ctx, 0, g.ask.Step, true)
	if err != nil {
		return false, err
	}

	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case !d.GetShouldCommit():
		j.lost++
	case joins:
		j.joined = append(j.joined, g.ask.Step-others)
	case !first:
		j.steps = append(j.steps, time.Since(began))
	}
	last = j.last != 0 && g.ask.Step >= j.last
	g.stands = d.GetStands()
	g.ask = &fttest.Request{Step: g.ask.Step + 1, CommittedQuorumId: g.in.GetQuorumId()}
	return last, nil
}

// begins records that a group begins a step, and whether it asks for a quorum. It returns the latest step
// that a group has begun.
func (j *largeJob) begins(step int64, asks bool) int64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	if asks {
		j.asked++
	}
	j.latest = max(j.latest, step)
	return j.latest
}

// reduce waits for an allreduce of all members.
func (j *largeJob) reduce(quorumID, step, members int64) {
	j.mu.Lock()
	key := reduction{quorumID, step}
	r := j.reductions[key]
	if r == nil {
		r = &reduced{members, make(chan struct{})}
		j.reductions[key] = r
	}
	if r.missing--; r.missing == 0 {
		close(r.done)
	}
	j.mu.Unlock()
	select {
	case <-r.done:
	case <-j.ctx.Done(): // the vote fails
	}
	time.Sleep(j.delay("a", "b"))
}

// delay returns how long a message takes.
func (j *largeJob) delay(from, to string) time.Duration {
	if from == to {
		return 0
	}
	return link/2 + j.upTo(3*link/2)
}

func (j *largeJob) upTo(d time.Duration) time.Duration {
	j.mu.Lock()
	defer j.mu.Unlock()
	return time.Duration(j.rng.Int64N(int64(d) + 1))
}

// until waits until a condition holds, or the job's deadline is over.
func (j *largeJob) until(condition func() bool) {
	for holds := false; !holds && j.ctx.Err() == nil; {
		time.Sleep(computes / 50)
		j.mu.Lock()
		holds = condition()
		j.mu.Unlock()
	}
}

// Groups join a large job, one after the other, at any time of a step. docs/internals/scaling.md has the
// figures with FULL=1.
func TestAGroupJoinsManyGroupsWithinTwoSteps(t *testing.T) {
	groups := 50
	if testmain.Full() && !testmain.Race() {
		groups = 1000
	}
	synctest.Test(t, func(t *testing.T) {
		c := &fttest.Cluster{T: t, Net: fttest.NewNetwork(), Log: &fttest.Log{}}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		j := &largeJob{t: t, c: c, ctx: ctx, rng: rand.New(rand.NewPCG(1, 1)),
			reductions: map[reduction]*reduced{}}
		c.Net.Delays(j.delay)
		c.StartLighthouse(groups, func(cfg *lighthouse.Config) { cfg.Logger = slog.New(slog.DiscardHandler) })
		defer c.Lighthouse.Shutdown()
		for i := range groups {
			j.running.Go(func() { j.group(fmt.Sprintf("group%04d", i), false) })
		}
		j.until(func() bool { return j.latest >= 10 })
		assert.Equal(t, groups, j.asked, "each asks once: their quorum stands")
		const joins = 5
		for i := range joins {
			time.Sleep(j.upTo(computes))
			j.running.Go(func() { j.group(fmt.Sprintf("joins%d", i), true) })
			j.until(func() bool { return len(j.joined) > i })
			j.mu.Lock()
			settled := j.latest + 4
			j.mu.Unlock()
			j.until(func() bool { return j.latest >= settled })
		}
		j.mu.Lock()
		j.last = j.latest + 1
		j.mu.Unlock()
		j.running.Wait()

		slices.Sort(j.steps)
		require.Len(t, j.joined, joins)
		median, longest := j.steps[len(j.steps)/2], j.steps[len(j.steps)-1]
		ratio := longest.Seconds() / median.Seconds()
		t.Logf("%d groups join %d, in %v steps: the longest step of the others is %s, %.2f medians of %s; "+
			"%d requests", joins, groups, j.joined, longest,
			ratio, median, j.asked)
		assert.LessOrEqual(t, slices.Max(j.joined), int64(2), "steps from its request to the step")
		assert.LessOrEqual(t, ratio, 1.2, "the longest step of the others, in medians")
		assert.Zero(t, j.lost)
	})
}
