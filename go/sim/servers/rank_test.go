package servers

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/rankclient"
	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/sim"
)

// rank is one rank of a group: the simulation's model of a rank, driven by a training loop that blocks in real calls.
type rank struct {
	g      *group
	index  int
	host   string
	model  *sim.Model
	rng    *rand.Rand
	client *rankclient.Client
	ctx    context.Context
	kill   context.CancelFunc

	// The job's mu guards these.
	comm     *comm
	flaky    bool // its next collective fails at the end
	loseVote bool // the next decision does not reach this rank
}

func newRank(g *group, index int, model *sim.Model) *rank {
	r := &rank{g: g, index: index, model: model, host: g.name}
	if index > 0 {
		r.host = fmt.Sprintf("%s.r%d", g.name, index)
	}
	r.ctx, r.kill = context.WithCancel(g.ctx)
	r.rng = rand.New(rand.NewPCG(g.j.setup.Seed, uint64(g.slot)<<32|uint64(g.j.lives[g.slot])<<8|uint64(index)))
	return r
}

func (r *rank) upTo(d time.Duration) time.Duration { return time.Duration(r.rng.Int64N(int64(d) + 1)) }

func (r *rank) chance(p float64) bool { return r.rng.Float64() < p }

func (r *rank) run(address string) {
	defer r.kill()
	network := r.g.host // rank 0 is in the process of the server
	if r.index > 0 {
		network = r.g.j.net.Host(r.host)
	}
	client, err := rankclient.Dial(r.ctx, address, time.Minute, rankclient.WithNetwork(network))
	if err != nil {
		return
	}
	defer func() { _ = client.Close() }()
	r.client = client
	r.g.j.tasks.Go(r.handleNotices)
	for sleep(r.ctx, r.upTo(r.g.j.setup.Compute/10)) && !r.left() {
		var failed *callError
		if err := r.attempt(); errors.As(err, &failed) && r.ctx.Err() == nil {
			r.failed(failed)
		}
	}
}

// callError is an error of a call to the manager server.
type callError struct {
	error
	vote  bool
	early time.Duration // how long before its deadline the call ended
}

// note reports to the judge (group.note), unless the rank has failed.
func (r *rank) note(what func(*sim.Judge)) (alive bool) {
	return r.g.note(func(judge *sim.Judge) {
		if alive = r.ctx.Err() == nil; alive {
			what(judge)
		}
	}) && alive
}

// failed handles the error of a call as training loops do: some make another attempt, in others the process ends.
func (r *rank) failed(err *callError) {
	s := r.g.j.setup
	count := 0
	r.note(func(*sim.Judge) { count = r.model.Failed(err, err.early) })
	if err.vote && r.chance(0.3) || r.chance(0.1) || count > 3 {
		r.g.end(sim.Crash, "an error reached its training loop", r.upTo(s.QuorumTimeout))
		return
	}
	sleep(r.ctx, s.Delay+r.upTo(s.Compute))
}

// handleNotices handles the notices of the lighthouse, at any time.
func (r *rank) handleNotices() {
	for {
		select {
		case <-r.ctx.Done():
			return
		case n := <-r.client.Notices():
			switch n.Kind {
			case membership.MemberFailed:
				r.note(func(*sim.Judge) {
					if c := r.comm; c != nil && c.key.quorumID == n.QuorumID {
						c.abort(r)
						c.end(r, false)
					}
				})
			case membership.ProgressAsked:
				waits := false
				r.note(func(*sim.Judge) { waits = r.comm != nil && r.comm.waiting[r.g.id] != nil })
				r.client.ReportProgress(int64(r.index), waits, "train")
			}
		}
	}
}

// left ends the rank's group, between two steps, if the group was asked to leave. It reports whether it ended the group.
func (r *rank) left() bool {
	leaves := false
	r.note(func(*sim.Judge) { leaves = r.g.leaves })
	if leaves {
		s := r.g.j.setup
		ctx, cancel := context.WithTimeout(r.ctx, s.Timeout)
		defer cancel()
		_ = r.client.Leave(ctx) // an error is ignored: after its timeout the group leaves anyway
		r.g.end(sim.Leave, "it leaves", r.upTo(s.Timeout))
	}
	return leaves
}

// inTime checks that a call ended by its deadline.
func (r *rank) inTime(what string, start time.Time, timeout time.Duration) {
	if took := time.Since(start); took > timeout+10*time.Millisecond {
		r.note(func(judge *sim.Judge) {
			judge.Break("the %s of %s ended after %s, its timeout is %s", what, r.model, took, timeout)
		})
	}
}

// attempt is one attempt at a step: quorum, heal, collective, vote.
func (r *rank) attempt() error {
	s := r.g.j.setup
	r.standStill()
	args := rankclient.Request{GroupRank: int64(r.index), CheckpointMetadata: r.metadata(r.g.id), InitSync: s.InitSync, Handle: "h", GroupWorldSize: int64(s.Ranks)}
	r.note(func(*sim.Judge) {
		args.Step, args.CommitFailures, args.CommittedQuorumID = r.model.Ask()
		if args.ShrinkOnly = r.g.shrink > 0; args.ShrinkOnly && r.index == 0 {
			r.g.shrink--
		}
	})
	ctx, cancel := context.WithTimeout(r.ctx, s.QuorumTimeout)
	defer cancel()
	start := time.Now()
	res, err := r.client.Quorum(ctx, args)
	r.inTime("quorum call", start, s.QuorumTimeout)
	if err != nil {
		return &callError{err, false, time.Until(start.Add(s.QuorumTimeout))}
	}
	computed := time.Now().Add(r.stepTime())
	var source string
	if !r.note(func(*sim.Judge) {
		source = r.model.Follow(&res)
		r.joinComm(&res)
	}) {
		return r.ctx.Err()
	}
	if source != "" {
		digest, ok := r.heal(source, &res)
		r.note(func(*sim.Judge) { r.model.Healed(digest, ok) })
	}
	sleep(r.ctx, time.Until(computed))
	r.standStill()
	sum, ok := r.reduce()
	if !ok {
		r.client.Suspect(res.QuorumID, r.onlyPeer(&res))
	}
	vote := false
	r.note(func(*sim.Judge) { vote = r.model.Reduced(sum, ok) })
	return r.vote(vote)
}

func (r *rank) vote(yes bool) error {
	s := r.g.j.setup
	lost, step := false, int64(0)
	r.note(func(*sim.Judge) { lost, r.loseVote, step = r.loseVote, false, r.model.Step() })
	ctx, cancel := context.WithTimeout(r.ctx, s.Timeout)
	defer cancel()
	start := time.Now()
	commit, err := r.client.ShouldCommit(ctx, int64(r.index), step, yes)
	r.inTime("vote", start, s.Timeout)
	if lost && err == nil {
		<-ctx.Done()
		err = ctx.Err()
	}
	if err != nil {
		return &callError{err, true, time.Until(start.Add(s.Timeout))}
	}
	r.note(func(*sim.Judge) { r.model.Decided(commit) })
	return nil
}

func (r *rank) stepTime() time.Duration {
	j := r.g.j
	d := j.setup.Compute/2 + r.upTo(j.setup.Compute)
	j.netMu.Lock()
	defer j.netMu.Unlock()
	if j.slow[machineOf(r.g.slot)] > 0 {
		d *= 8
	}
	return d
}

// standStill blocks while the rank's host is stopped.
func (r *rank) standStill() {
	var until time.Time
	r.note(func(*sim.Judge) { until = r.g.stopped })
	sleep(r.ctx, time.Until(until))
}

func (r *rank) metadata(id string) string { return fmt.Sprintf("http://%s/%d", id, r.index) }

// onlyPeer returns the other group in the rank's quorum, if there is exactly one.
func (r *rank) onlyPeer(res *recovery.Result) string {
	if len(res.ReplicaIDs) != 2 {
		return ""
	}
	return res.ReplicaIDs[1-res.ReplicaRank]
}

// heal fetches the state of a group, and returns its digest. The metadata comes from the real manager server of that group; the
// transfer of the state is simulated.
func (r *rank) heal(source string, res *recovery.Result) (digest uint64, ok bool) {
	j := r.g.j
	ctx, cancel := context.WithTimeout(r.ctx, j.setup.Timeout)
	defer cancel()
	client, err := rankclient.Dial(ctx, res.Sources[0].ManagerAddress, j.setup.Timeout, rankclient.WithNetwork(j.net.Host(r.host)))
	if err != nil {
		return 0, false
	}
	defer func() { _ = client.Close() }()
	metadata, err := client.CheckpointMetadata(ctx, int64(r.index))
	if err != nil {
		return 0, false
	}
	if metadata != r.metadata(source) {
		r.note(func(judge *sim.Judge) {
			judge.Break("%s heals from %s, whose metadata is %q", r.model, source, metadata)
		})
	}
	for !ok {
		r.note(func(judge *sim.Judge) {
			if judge.Connected(r.g.id, source) {
				digest, ok = judge.Model(source, r.index).Serves(res.QuorumID)
			}
		})
		if wait := j.setup.Heal; ok && sleep(ctx, wait) || !ok && sleep(ctx, 20*time.Millisecond) {
			continue
		}
		return 0, false
	}
	return digest, true
}
