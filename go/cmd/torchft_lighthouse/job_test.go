package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/assert"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/testlog"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/rankclient"
	"github.com/torchft/torchft/go/torchftpb"
)

// job is the groups of a training job, in this process, and what they did. Their manager servers and clients
// are real, and use TCP. Their collectives and heals are simulated.
type job struct {
	t              *testing.T
	addresses      string
	hostname, bind string
	log            testlog.Log
	began          time.Time
	ctx            context.Context
	cancel         context.CancelFunc
	tasks          sync.WaitGroup

	mu      sync.Mutex
	groups  []*group // by slot; a restarted group replaces the former one
	lives   int
	comms   map[commKey]*comm
	records []record
	answers []porcupine.Operation
	members map[int64]string // of a quorum
	errors  int              // of calls
}

// record is one attempt at a step.
type record struct {
	group     string
	step      int64 // that the attempt would complete
	quorumID  int64
	members   []string
	committed bool
	state     string // after it, if it was committed
}

// group is one incarnation of a replica group with one rank.
type group struct {
	j      *job
	slot   int
	name   string
	cancel context.CancelFunc
	ended  chan struct{}
	server *manager.Server

	// The job's mu guards these.
	step      int64
	failures  int64 // attempts since the last commit
	committed int64 // the quorum of that commit
	broken    int64 // the last quorum of which a member has failed

	// Only attempt uses these.
	last   *torchftpb.ManagerQuorumResponse
	stands bool             // the group may begin its step in that quorum, without another one
	states map[int64]string // after each step: a digest of all steps and the quorums in which they were made
}

func newJob(t *testing.T, addresses, hostname string) *job {
	j := &job{t: t, addresses: addresses, hostname: hostname, bind: hostname + ":0", began: time.Now(),
		comms: map[commKey]*comm{}, members: map[int64]string{}}
	j.ctx, j.cancel = context.WithCancel(context.Background())
	return j
}

func (j *job) begin(count int) {
	j.groups = make([]*group, count)
	for slot := range count {
		j.startGroup(slot)
	}
}

// startGroup starts a group without state, at once or when it reaches a lighthouse.
func (j *job) startGroup(slot int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lives++
	g := &group{j: j, slot: slot, name: fmt.Sprintf("%d:%d", slot, j.lives), ended: make(chan struct{}),
		states: map[int64]string{0: ""}}
	ctx, cancel := context.WithCancel(j.ctx)
	g.cancel = cancel
	j.groups[slot] = g
	j.tasks.Go(func() {
		defer close(g.ended)
		g.run(ctx)
	})
}

// restartGroup ends a group, and starts another one in its place.
func (j *job) restartGroup(slot int) {
	j.mu.Lock()
	g := j.groups[slot]
	j.mu.Unlock()
	g.cancel()
	<-g.ended
	j.startGroup(slot)
}

func (j *job) end() {
	j.cancel()
	j.tasks.Wait()
}

// run is the process of a group.
func (g *group) run(ctx context.Context) {
	var err error
	for g.server == nil {
		g.server, err = fttest.NewManager(ctx, manager.ServerConfig{
			ReplicaID: g.name, LighthouseAddr: g.j.addresses, Job: "job", Hostname: g.j.hostname,
			Bind: g.j.bind, StoreAddr: g.j.hostname + ":1",
			WorldSize: 1, HeartbeatInterval: 100 * time.Millisecond, ConnectTimeout: 10 * time.Second,
			Security: auth.SecurityFromEnv(),
			Logger:   slog.New(slog.NewTextHandler(io.Writer(&g.j.log), nil)),
		})
		if ctx.Err() != nil && err != nil {
			return
		}
	}
	defer g.server.Shutdown()
	client, err := rankclient.Dial(ctx, g.server.Address(), 10*time.Second,
		rpc.Dialing{Network: fttest.OtherTCP, Security: auth.SecurityFromEnv()})
	if err != nil {
		return
	}
	defer func() { _ = client.Close() }()
	go g.abortFailed(ctx, client.Notices())
	for ctx.Err() == nil {
		if err := g.attempt(ctx, client); err != nil {
			g.j.mu.Lock()
			g.j.errors++
			g.j.mu.Unlock()
		}
		sleep(ctx, 10*time.Millisecond) // the computation
	}
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// abortFailed ends the collectives of a quorum of which a member has failed.
func (g *group) abortFailed(ctx context.Context, notices <-chan *torchftpb.Notice) {
	for {
		select {
		case n := <-notices:
			if n.GetKind() != torchftpb.Notice_MEMBER_FAILED {
				continue
			}
			g.j.mu.Lock()
			g.broken = max(g.broken, n.GetQuorumId())
			for key, c := range g.j.comms {
				if key.quorumID == n.GetQuorumId() {
					c.end(false)
				}
			}
			g.j.mu.Unlock()
		case <-ctx.Done():
			return
		}
	}
}

// attempt is one attempt at a step: quorum, heal, collective, vote.
func (g *group) attempt(ctx context.Context, client *rankclient.Client) error {
	j := g.j
	ctx, cancel := bounded(ctx)
	defer cancel()
	res, err := g.quorum(ctx, client)
	if err != nil {
		return err
	}
	passed := j.collect(ctx, g.name, commKey{res.GetQuorumId(), g.step + 1}, res.GetReplicaIds())
	decision, err := client.ShouldCommit(ctx, 0, g.step, passed)
	if err != nil {
		return err
	}
	committed := decision.GetShouldCommit()
	g.stands = decision.GetStands()
	j.mu.Lock()
	defer j.mu.Unlock()
	r := record{group: g.name, step: g.step + 1, quorumID: res.GetQuorumId(), members: res.GetReplicaIds(),
		committed: committed}
	g.failures++
	if committed {
		g.failures, g.committed = 0, r.quorumID
		r.state = fmt.Sprintf("%x", sha256.Sum256(fmt.Append(nil, g.states[g.step], r.step, r.quorumID)))
		g.step = r.step
		g.states[g.step] = r.state
	}
	j.records = append(j.records, r)
	return nil
}

// quorum asks for a quorum, unless the last one stands.
func (g *group) quorum(
	ctx context.Context, client *rankclient.Client,
) (*torchftpb.ManagerQuorumResponse, error) {
	j := g.j
	j.mu.Lock()
	stands := g.stands && g.failures == 0 && g.broken != g.last.GetQuorumId()
	req := &torchftpb.ManagerQuorumRequest{
		Step: g.step, CheckpointMetadata: g.name, CommitFailures: g.failures,
	}
	if *failures == 0 { // otherwise the groups ask for each step, like those of upstream
		req.CommittedQuorumId = cmp.Or(g.committed, -1)
	}
	j.mu.Unlock()
	if g.stands = false; stands {
		return g.last, nil
	}
	asked := time.Since(j.began)
	res, err := client.Quorum(ctx, req)
	if err == nil {
		g.last = res
		j.learned(g, res, asked)
	}
	return res, err
}

// learned notes an answer, and heals the group if the answer says so.
func (j *job) learned(g *group, res *torchftpb.ManagerQuorumResponse, asked time.Duration) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.answers = append(j.answers, porcupine.Operation{
		ClientId: g.slot, Input: nil, Call: int64(asked), Output: res.GetQuorumId(),
		Return: int64(time.Since(j.began)),
	})
	members := strings.Join(res.GetReplicaIds(), " ")
	if known := j.members[res.GetQuorumId()]; known != "" {
		assert.Equal(j.t, known, members, "the members of quorum %d", res.GetQuorumId())
	}
	j.members[res.GetQuorumId()] = members
	if !res.GetHeal() {
		return
	}
	for _, source := range j.groups {
		if source.name == res.GetReplicaIds()[res.GetRecoverSrcReplicaRank()] {
			g.step, g.committed = res.GetMaxStep(), res.GetCommittedQuorumId()
			g.states[g.step] = source.states[g.step]
		}
	}
}

// comm is the collective of a step in a quorum: it succeeds for all of its members, or for none.
type comm struct {
	missing map[string]bool
	over    chan struct{}
	ended   bool
	passed  bool
}

type commKey struct{ quorumID, step int64 }

func (c *comm) end(passed bool) {
	if !c.ended {
		c.ended, c.passed = true, passed
		close(c.over)
	}
}

// collect takes part in a collective, and waits for the other members.
func (j *job) collect(ctx context.Context, me string, key commKey, members []string) bool {
	j.mu.Lock()
	c := j.comms[key]
	if c == nil {
		c = &comm{missing: map[string]bool{}, over: make(chan struct{})}
		for _, m := range members {
			c.missing[m] = true
		}
		j.comms[key] = c
	}
	delete(c.missing, me)
	if len(c.missing) == 0 {
		c.end(true)
	}
	j.mu.Unlock()
	select {
	case <-c.over:
	case <-time.After(collectiveTime):
	case <-ctx.Done():
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	c.end(false) // if it has not ended yet
	return c.passed
}

// collectiveTime is the timeout of a collective.
const collectiveTime = 10 * time.Second

// lowest returns the lowest step of a group.
func (j *job) lowest() int64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	low := j.groups[0].step
	for _, g := range j.groups {
		low = min(low, g.step)
	}
	return low
}

// together reports whether all groups have committed a later step in a quorum of all of them.
func (j *job) together(than int64) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	seen := map[string]bool{}
	for _, r := range slices.Backward(j.records) {
		if r.committed && r.step > than && len(r.members) == len(j.groups) {
			seen[r.group] = true
		}
	}
	for _, g := range j.groups {
		if !seen[g.name] {
			return false
		}
	}
	return true
}

// nextQuorum returns how long after a moment every group had the answer to a request that it made after it.
func (j *job) nextQuorum(after time.Duration) (took time.Duration, all bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	first := map[int]time.Duration{}
	for _, a := range slices.Backward(j.answers) {
		if time.Duration(a.Return) < after {
			break
		}
		if time.Duration(a.Call) >= after {
			first[a.ClientId] = time.Duration(a.Return) - after
		}
	}
	for _, one := range first {
		took = max(took, one)
	}
	return took, len(first) == len(j.groups)
}

// attempts returns how many attempts at steps there were.
func (j *job) attempts() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.records)
}

// noStepIsLost checks that since a number of attempts each one was committed, by all groups and in the same
// quorum.
func (j *job) noStepIsLost(since int) {
	j.t.Helper()
	j.mu.Lock()
	defer j.mu.Unlock()
	assert.Zero(j.t, j.errors, "a call has failed\n%s", &j.log)
	for _, r := range j.records[since:] {
		if !assert.True(j.t, r.committed && len(r.members) == len(j.groups) &&
			r.quorumID == j.records[since].quorumID, "%+v after %+v", r, j.records[since]) {
			return
		}
	}
}

// check checks the history of the job:
//
//   - A step has one history: all groups that committed it did so in the same quorum, after the same steps in
//     the same quorums.
//   - The quorum ids that a group hears never go back.
//   - The quorum ids that all groups hear are linearizable: an answer to a request that began after another
//     answer does not have a smaller one.
func (j *job) check() {
	j.t.Helper()
	j.mu.Lock()
	defer j.mu.Unlock()
	first, last := map[int64]record{}, map[string]int64{}
	for _, r := range j.records {
		assert.LessOrEqual(j.t, last[r.group], r.quorumID, "%+v", r)
		last[r.group] = r.quorumID
		if !r.committed {
			continue
		}
		if before, found := first[r.step]; found {
			assert.Equal(j.t, before.state, r.state, "%+v and %+v", before, r)
		} else {
			first[r.step] = r
		}
	}
	result, _ := porcupine.CheckOperationsVerbose(rising, j.answers, time.Minute)
	assert.Equal(j.t, porcupine.Ok, result)
	j.t.Logf("%d steps, %d attempts, %d quorums, %d failed calls", len(first), len(j.records), len(j.members),
		j.errors)
}

// rising is the quorum id that a job has reached.
var rising = porcupine.Model{
	Init: func() any { return int64(0) },
	Step: func(state, _, output any) (bool, any) { return output.(int64) >= state.(int64), output },
}

// describe returns the last attempts, and the end of the log.
func (j *job) describe() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	var text strings.Builder
	for _, r := range j.records[max(0, len(j.records)-12):] {
		_, _ = fmt.Fprintf(&text, "%+v\n", r)
	}
	log := j.log.String()
	return text.String() + log[max(0, len(log)-6000):]
}
