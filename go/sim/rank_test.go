package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/rankclient"
	"github.com/torchft/torchft/go/torchftpb"
)

// rank is one rank of a group: the model of a rank, driven by a training loop that blocks in real calls.
type rank struct {
	g      *group
	index  int
	host   string
	model  *model
	rng    *rand.Rand
	client *rankclient.Client
	ctx    context.Context
	kill   context.CancelFunc

	// The job's mu guards these.
	comm     *comm
	flaky    bool  // its next collective fails at the end
	loseVote bool  // the next decision does not reach this rank
	signaled bool  // it was asked to leave
	broken   int64 // the last quorum of which a member failed

	// Only run uses these.
	last   *torchftpb.ManagerQuorumResponse // of its last quorum
	sent   *torchftpb.ManagerQuorumRequest  // its last request
	stands int64                            // the step that it may begin in that quorum; -1: none
}

func newRank(g *group, index, lives int) *rank {
	r := &rank{g: g, index: index, model: g.life.ranks[index], host: g.name, stands: -1}
	if index > 0 {
		r.host = fmt.Sprintf("%s.r%d", g.name, index)
	}
	r.ctx, r.kill = context.WithCancel(g.ctx)
	r.rng = rand.New(rand.NewPCG(g.j.setup.seed, uint64(g.slot)<<32|uint64(lives)<<8|uint64(index)))
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
	client, err := rankclient.Dial(r.ctx, address, time.Minute, rpc.Dialing{Network: network})
	if err != nil {
		return
	}
	defer func() { _ = client.Close() }()
	r.client = client
	r.g.j.tasks.Go(r.handleNotices)
	load := time.Duration(0)
	if r.index == 0 {
		load = r.upTo(r.g.j.setup.load)
	}
	if !sleep(r.ctx, load) {
		return
	}
	pause := min(r.g.j.setup.compute/10, r.g.j.setup.policy.JoinTimeout/4) // between two steps
	for sleep(r.ctx, r.upTo(pause)) && !r.leaves() {
		var failed *callError
		if err := r.attempt(); errors.As(err, &failed) && r.ctx.Err() == nil {
			r.failed(failed)
		}
		r.failInReplay()
	}
}

// callError is an error of a call to the manager server.
type callError struct {
	error
	vote  bool
	early time.Duration // how long before its deadline the call ended
}

// note reports to the judge (group.note), unless the rank has failed.
func (r *rank) note(what func(*judge)) (alive bool) {
	return r.g.note(func(judge *judge) {
		if alive = r.ctx.Err() == nil; alive {
			what(judge)
		}
	}) && alive
}

// failed handles the error of a call as training loops do: some make another attempt, in others the process
// ends.
func (r *rank) failed(err *callError) {
	s := r.g.j.setup
	raised, count := false, 0
	r.note(func(*judge) { raised, count = r.model.failedCall(err, err.early) })
	if raised && (err.vote && r.chance(0.3) || r.chance(0.1) || count > 3) {
		r.g.end(crash, "an error reached its training loop", r.upTo(s.quorumTimeout))
		return
	}
	sleep(r.ctx, s.delay+r.upTo(s.compute))
}

// failInReplay kills the group with some probability in the phase of a replay that the setup names, unless it
// is the only one left.
func (r *rank) failInReplay() {
	j := r.g.j
	if j.setup.failIn == idle || !r.chance(0.2) {
		return
	}
	fails := false
	r.note(func(judge *judge) {
		living := 0
		for i := range judge.places {
			if judge.places[i].l != nil {
				living++
			}
		}
		m := r.model
		if fails = r.index == 0 && living > 1 && m.phase == j.setup.failIn &&
			(m.again || m.phase == agreeing) && judge.now < j.setup.length; fails {
			judge.result.failures[m.phase]++
		}
	})
	if fails {
		r.g.end(crash, "killed in a replay", r.upTo(j.setup.timeout))
	}
}

// handleNotices handles the notices of the lighthouse, at any time.
func (r *rank) handleNotices() {
	for {
		select {
		case <-r.ctx.Done():
			return
		case n := <-r.client.Notices():
			switch n.GetKind() {
			case torchftpb.Notice_MEMBER_FAILED:
				r.note(func(*judge) {
					r.broken = max(r.broken, n.GetQuorumId())
					if c := r.comm; c != nil && c.key.quorumID == n.GetQuorumId() {
						c.abort(r)
						if w := c.waiting[r.g.life.id]; w != nil && !w.complete {
							c.end(w, false)
						}
					}
				})
			case torchftpb.Notice_PROGRESS_ASKED:
				waits := false
				r.note(func(*judge) { waits = r.comm != nil && r.comm.waiting[r.g.life.id] != nil })
				fttest.ReportProgress(r.client, int64(r.index), waits, "train")
			}
		}
	}
}

// leaves ends the rank's training after the last step of its group, if that is drained, and the group with
// its last rank.
func (r *rank) leaves() bool {
	s := r.g.j.setup
	last, began := false, time.Duration(0)
	r.note(func(judge *judge) {
		began = judge.now
		if last = r.model.plan.GetDraining() && r.model.phase == idle && !r.model.again; last {
			r.g.life.leaving, r.model.phase = true, left
		}
	})
	if !last {
		return false
	}
	ctx, cancel := context.WithTimeout(r.ctx, s.timeout)
	defer cancel()
	err := r.client.Leave(ctx) // after its timeout the group leaves anyway
	all := false
	r.note(func(judge *judge) {
		r.g.left++
		switch {
		case s.upstream.has(r.g.slot): // it asks no lighthouse whether it may end
		case err == nil:
			judge.released(r.g.life)
		case judge.changed < began:
			judge.unreleased(r.g.life, err)
		}
		all = r.g.left == len(r.g.ranks)
	})
	if all {
		r.g.end(leave, "it leaves", r.upTo(s.timeout))
	}
	return true
}

// inTime checks that a call ended by its deadline.
func (r *rank) inTime(what string, start time.Time, timeout time.Duration) {
	if took := time.Since(start); took > timeout+10*time.Millisecond {
		r.note(func(judge *judge) {
			judge.waits("the %s of %s ended after %s, its timeout is %s", what, r.model, took, timeout)
		})
	}
}

// attempt is one attempt at a step: quorum, heal, collective, vote.
func (r *rank) attempt() error {
	r.standStill()
	var args *torchftpb.ManagerQuorumRequest
	again := false
	if !r.note(func(judge *judge) {
		again = r.model.again
		args = r.model.ask()
		args.CheckpointMetadata, args.ReconfigureHandle = r.metadata(r.g.life.id), "h"
		if args.ShrinkOnly = r.g.shrink > 0; args.ShrinkOnly && r.index == 0 {
			r.g.shrink--
		}
		if args.Drain = r.signaled; args.Drain {
			judge.wants(r.g.life)
		}
	}) {
		return r.ctx.Err()
	}
	r.failInReplay()
	res, err := r.quorum(args)
	if err != nil {
		return err
	}
	own := r.stepTime()
	computed := time.Now().Add(own)
	var source string
	if !r.note(func(*judge) {
		source = r.model.follow(res)
		r.joinComm(res)
		if again && r.model.again {
			computed = time.Now()
		}
	}) {
		return r.ctx.Err()
	}
	r.failInReplay()
	if source != "" {
		digest, ok := r.heal(source, res)
		goesOn := true
		r.note(func(*judge) {
			if goesOn = r.model.healed(digest, ok); !goesOn {
				r.comm.abort(r)
			}
		})
		if !goesOn {
			return nil
		}
	}
	sleep(r.ctx, time.Until(computed))
	fttest.ReportOwn(r.client, int64(r.index), own)
	r.standStill()
	r.stall()
	sum, ok := r.reduce()
	if !ok {
		fttest.Suspect(r.client, res.GetQuorumId(), r.onlyPeer(res))
	}
	vote := false
	r.note(func(*judge) { vote = r.model.reduced(sum, ok) })
	r.failInReplay()
	return r.vote(vote)
}

// quorum asks for a quorum, unless the last one stands and there is nothing new to announce.
func (r *rank) quorum(args *torchftpb.ManagerQuorumRequest) (*torchftpb.ManagerQuorumResponse, error) {
	stands, broken := r.stands, int64(0)
	r.stands = -1
	r.note(func(*judge) { broken = r.broken })
	// not so in the second step of a quorum
	same := args.GetCommittedQuorumId() == r.sent.GetCommittedQuorumId()
	if args.GetStep() == stands && same && args.GetCommitFailures() == 0 &&
		args.GetShrinkOnly() == r.sent.GetShrinkOnly() && args.GetDrain() == r.sent.GetDrain() &&
		broken != r.last.GetQuorumId() {
		r.last = proto.CloneOf(r.last)
		r.last.MaxStep, r.last.CommittedQuorumId, r.last.CommitFailures = stands, r.last.GetQuorumId(), 0
		return r.last, nil
	}
	s := r.g.j.setup
	ctx, cancel := context.WithTimeout(r.ctx, s.quorumTimeout)
	defer cancel()
	start := time.Now()
	res, err := r.client.Quorum(ctx, args)
	r.inTime("quorum call", start, s.quorumTimeout)
	if err != nil {
		return res, &callError{err, false, time.Until(start.Add(s.quorumTimeout))}
	}
	r.last, r.sent = res, args
	return res, nil
}

func (r *rank) vote(yes bool) error {
	commit, err := r.ballot(yes)
	if err != nil {
		return err
	}
	agree, all := false, false
	r.note(func(*judge) { agree, all = r.model.decided(commit), r.model.votesYes })
	if !agree {
		return nil
	}
	r.failInReplay()
	all, err = r.ballot(all)
	if err != nil {
		return err
	}
	r.note(func(*judge) { r.model.agreed(all) })
	return nil
}

// ballot makes one vote of the group's ranks.
func (r *rank) ballot(yes bool) (all bool, err error) {
	s := r.g.j.setup
	lost, step := false, int64(0)
	r.note(func(*judge) { lost, r.loseVote, step = r.loseVote, false, r.model.step })
	ctx, cancel := context.WithTimeout(r.ctx, s.timeout)
	defer cancel()
	start := time.Now()
	d, err := r.client.ShouldCommit(ctx, int64(r.index), step, yes)
	r.inTime("vote", start, s.timeout)
	if lost && err == nil {
		<-ctx.Done()
		err = ctx.Err()
	}
	if err != nil {
		return false, &callError{err, true, time.Until(start.Add(s.timeout))}
	}
	if d.GetStands() {
		r.stands = step + 1
	}
	return d.GetShouldCommit(), nil
}

func (r *rank) stepTime() time.Duration {
	j := r.g.j
	d := j.setup.compute/2 + r.upTo(j.setup.compute)
	j.netMu.Lock()
	defer j.netMu.Unlock()
	if j.slow[machineOf(r.g.slot)] > 0 {
		d *= 8
	}
	return d
}

// standStill blocks while the rank's host is stopped, stall while the rank does not reach its collective.
func (r *rank) standStill() {
	var until time.Time
	r.note(func(*judge) { until = r.g.stopped })
	sleep(r.ctx, time.Until(until))
}

func (r *rank) stall() {
	var until time.Time
	r.note(func(*judge) { until = r.g.stalled })
	sleep(r.ctx, time.Until(until))
}

func (r *rank) metadata(id string) string { return fmt.Sprintf("http://%s/%d", id, r.index) }

// onlyPeer returns the other group in the rank's quorum, if there is exactly one.
func (r *rank) onlyPeer(res *torchftpb.ManagerQuorumResponse) string {
	if len(res.GetReplicaIds()) != 2 {
		return ""
	}
	return res.GetReplicaIds()[1-res.GetReplicaRank()]
}

// accuse falsely reports a failed collective, and names another member of the quorum as the suspect.
func (r *rank) accuse() {
	quorumID, suspect := int64(0), ""
	r.note(func(*judge) {
		p := r.model.plan
		if n := int64(len(p.GetReplicaIds())); n > 1 {
			quorumID, suspect = p.GetQuorumId(), p.GetReplicaIds()[(p.GetReplicaRank()+1)%n]
		}
	})
	if suspect != "" {
		fttest.Suspect(r.client, quorumID, suspect)
	}
}

// heal fetches the state of a group, and returns its digest. The metadata comes from the real manager server
// of that group; the transfer of the state is simulated.
func (r *rank) heal(source string, res *torchftpb.ManagerQuorumResponse) (digest uint64, ok bool) {
	j := r.g.j
	ctx, cancel := context.WithTimeout(r.ctx, j.setup.timeout)
	defer cancel()
	client, err := rankclient.Dial(ctx, res.GetRecoverSrcManagerAddress(), j.setup.timeout,
		rpc.Dialing{Network: j.net.Host(r.host)})
	if err != nil {
		return 0, false
	}
	defer func() { _ = client.Close() }()
	metadata, err := client.CheckpointMetadata(ctx, int64(r.index))
	if err != nil {
		return 0, false
	}
	if metadata != r.metadata(source) {
		r.note(func(judge *judge) {
			judge.broken(ruleHeal, "%s heals from %s, whose metadata is %q", r.model, source, metadata)
		})
	}
	for !ok {
		r.note(func(judge *judge) {
			if judge.connected(r.g.life.id, source) {
				digest, ok = judge.byID[source].ranks[r.index].serves(res.GetQuorumId())
			}
		})
		if wait := j.setup.heal; ok && sleep(ctx, wait) || !ok && sleep(ctx, 20*time.Millisecond) {
			continue
		}
		return 0, false
	}
	return digest, true
}
