package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/round"
)

// replyMargin is how long before the ranks' deadline a request to the lighthouse ends, as in package manager.
const replyMargin = 100 * time.Millisecond

// group is one incarnation of a replica group: its ranks, and the shell around its machine, which is package manager in production.
// After its end another group starts in its slot, with another replica_id.
type group struct {
	w           *world
	slot        int
	id          string
	address     string
	machine     groupMachine
	killed      bool
	pausedUntil time.Duration
	ranks       []rank

	lastWaiter round.WaiterID
	calls      []call // calls of ranks that the machine has not answered
	asking     asking
	connection
	quorum      *quorum.Quorum // the latest quorum that the machine received
	before      int64          // the id of the previous one
	attempt     uint64         // the round in which the machine received the latest quorum
	askTimer    time.Duration  // time of the next askDeadline, 0 if there is none
	hasMetadata bool           // the last MetadataAsked was answered with metadata
	shrink      int            // steps for which it asks shrink_only
	asked       bool           // the lighthouse has asked for its progress
	leaving     bool           // it has completed its last step
	finished    bool           // its training is complete

	began      time.Duration
	lastCommit time.Duration

	seen      // the checker's record of the group
	view view // the checker's record of what the lighthouse knows of the group
}

type callKind uint8

const (
	quorumCall callKind = iota
	voteCall
	metadataCall // made by another group's rank
)

// call is a call of a rank to its manager server.
type call struct {
	waiter round.WaiterID
	kind   callKind
	rank   int16
	number uint64 // the rank's number of the call
}

// asking is the request to the lighthouse, with its attempts.
type asking struct {
	active   bool
	round    uint64
	req      uint64 // number of the pending attempt
	request  *request
	deadline time.Duration
	failed   int
}

func (w *world) startGroup(i int) {
	s := &w.slots[i]
	if s.g != nil {
		return
	}
	s.lives++
	w.countJoin()
	g := &group{w: w, slot: i, id: fmt.Sprintf("g%02d:%d", i, s.lives), began: w.now, lastCommit: w.now}
	g.spoke = w.now
	g.address = "http://" + g.id
	description := round.Group{
		ReplicaID: g.id, Address: g.address, StoreAddress: g.id, WorldSize: int64(w.Ranks),
	}
	machine := round.NewMachine(description)
	g.machine = machine
	if w.mistake.group != nil {
		g.machine = w.mistake.group(description, machine)
	}
	g.ranks = make([]rank, w.Ranks)
	s.g = g
	w.byID[g.id] = g
	w.logf("%s starts", g.id)
	w.after(w.upTo(w.HeartbeatInterval), event{kind: beatDue, g: g})
	if !w.calls(i) {
		g.connect()
	}
	for r := range g.ranks {
		g.ranks[r].init(g, r)
		w.after(w.upTo(w.Compute), event{kind: rankStart, g: g, rank: int16(r)})
	}
}

// crash ends the group. If its processes are killed, their connections break; if its host vanishes, the connections stay open.
func (g *group) crash(silent bool, why string) {
	w := g.w
	if g.killed {
		return
	}
	g.killed = true
	for i := range g.ranks {
		if r := &g.ranks[i]; r.again || r.phase == agreeing {
			w.result.replayFailures[r.phase]++
		}
	}
	w.slots[g.slot].g = nil
	w.logf("%s ends: %s", g.id, why)
	if k := g.link; k != nil {
		k.close(silent)
	}
	if l := &w.lh; g.asking.active && w.calls(g.slot) && l.up {
		notice := w.delay(g.slot)
		if silent || w.up(g.slot) {
			notice = 2 * w.Keepalive
		}
		w.after(notice, event{kind: lhWithdrawn, g: g, id: g.asking.req, life: l.life})
	}
	for r := range g.ranks {
		g.ranks[r].leaveComm(silent)
	}
}

// shutDown ends the group properly: the manager server answers all pending calls.
func (g *group) shutDown() {
	g.step(round.Closed{Reason: "the manager server of " + g.id + " is shutting down"})
	if len(g.calls) > 0 {
		g.w.broken(ruleWaiters, "%s shut down and did not answer %s", g.id, g.describeCalls())
	}
	g.sends(quorum.ShuttingDown{ReplicaID: g.id, Finished: g.finished})
	g.crash(false, "it leaves")
}

func (g *group) handle(e *event) {
	w := g.w
	switch e.kind {
	case beatDue:
		g.alive()
	case linkRetry:
		g.connect()
	case welcomed, linkDue, linkBroken, recall, memberFailed, probed, progressDue, drained, released:
		g.handleLink(e)
	case noticed:
		g.memberFailed(e.x.(*round.MemberFailed))
	case answered:
		if a := &g.asking; a.active && a.req == e.id {
			a.active = false
			q := e.x.(*quorum.Quorum)
			if g.quorum != nil && g.quorum.ID != q.ID {
				g.before = g.quorum.ID
			}
			g.quorum, g.attempt = q, a.round
			g.last = g.quorum
			g.fenced, g.quiet, g.claimed = false, 0, g.claims
			w.check.learned(g, g.quorum)
			g.step(round.QuorumKnown{Round: a.round, Quorum: g.quorum})
		}
	case refused:
		g.refused(e.id)
	case retryDue:
		if a := &g.asking; a.active && a.round == e.id {
			g.call()
		}
	case askDeadline:
		g.askTimer = 0
		switch a := &g.asking; {
		case !a.active:
		case a.deadline > w.now:
			g.armAsk()
		default:
			g.cancel()
			g.step(round.QuorumKnown{Round: a.round, Failure: &round.Failure{Kind: round.KindTimeout, Reason: "the lighthouse formed no quorum before the deadline"}})
		}
	case managerAsk:
		g.managerAsk(&g.ranks[e.rank], e.id)
	case managerVote:
		g.managerVote(&g.ranks[e.rank], e.id)
	case rankDisconnected:
		g.rankBroke(e.rank)
	case rankStill:
		g.step(round.StillDisconnected{GroupRank: int64(e.rank)})
	case rankBack:
		g.ranks[e.rank].disconnected = false
		g.step(round.RankBack{GroupRank: int64(e.rank)})
	case rankProgress:
		g.step(round.RankProgressed{GroupRank: int64(e.rank), Waits: e.ok, What: "in the step"})
		g.progress(false)
	case progressEnd:
		g.progress(true)
	case leaveDue:
		g.goes()
	case healAsk:
		g.serveHeal(e.x.(*heal))
	default:
		g.ranks[e.rank].handle(e)
	}
}

// begin records a rank's call, and returns the waiter that identifies it to the machine.
func (g *group) begin(r *rank, kind callKind, number uint64) round.WaiterID {
	g.lastWaiter++
	g.calls = append(g.calls, call{g.lastWaiter, kind, int16(r.index), number})
	return g.lastWaiter
}

func (g *group) managerAsk(r *rank, number uint64) {
	if r.number != number {
		return // the deadline has passed before the request arrived
	}
	w := g.w
	r.disconnected = false
	remaining := r.deadline - w.now
	id := g.begin(r, quorumCall, number)
	w.check.wants(r)
	g.step(round.QuorumAsked{Waiter: id, Deadline: epoch.Add(w.now + remaining), Request: round.Request{
		GroupRank:          int64(r.index),
		Step:               r.step,
		CheckpointMetadata: "state",
		ShrinkOnly:         g.shrink > 0,
		InitSync:           w.InitSync,
		CommitFailures:     r.failures,
		CommittedQuorumID:  r.reportedQuorum(),
		Handle:             "h",
		GroupWorldSize:     int64(len(g.ranks)),
		ReplaysFailedSteps: w.replays(g.slot),
		Drain:              r.signalled,
	}})
}

func (g *group) managerVote(r *rank, number uint64) {
	if r.number != number {
		return
	}
	r.disconnected = false
	id := g.begin(r, voteCall, number)
	r.cast = vote{yes: r.votesYes, step: r.step, attempt: r.attempt}
	g.noteSilence()
	g.step(round.Voted{Waiter: id, GroupRank: int64(r.index), Step: r.step, ShouldCommit: r.votesYes, Fenced: g.fenced})
}

// withdraw ends a rank's call at its deadline, or when its connection broke.
func (g *group) withdraw(r *rank, number uint64, timeout bool) {
	for _, c := range g.calls {
		if c.rank != int16(r.index) || c.number != number {
			continue
		}
		g.step(round.Withdrawn{Waiter: c.waiter, Timeout: timeout})
		if i := g.find(c.waiter); i >= 0 {
			g.w.broken(ruleWaiters, "the deadline of %s has passed, and it has no answer", g.describeCalls())
		}
		return
	}
}

func (g *group) find(id round.WaiterID) int {
	return slices.IndexFunc(g.calls, func(c call) bool { return c.waiter == id })
}

func (g *group) step(input round.Event) {
	w := g.w
	for _, action := range g.machine.Step(input, epoch.Add(w.now)) {
		switch a := action.(type) {
		case round.AskLighthouse:
			g.ask(a)
		case round.CancelLighthouse:
			if g.asking.active && g.asking.round == a.Round {
				g.cancel()
			}
		case round.AnswerQuorum:
			if c, ok := g.answered(a.Waiter); ok {
				r := &g.ranks[c.rank]
				w.check.answered(r, a.Result)
				g.answer(r, event{kind: rankQuorum, id: c.number, x: &news{*a.Result, g.quorum, g.attempt}})
			}
		case round.AnswerVote:
			if c, ok := g.answered(a.Waiter); ok {
				r := &g.ranks[c.rank]
				w.check.decided(r, a.ShouldCommit)
				if r.loseVote {
					r.loseVote = false
					w.logf("%s rank %d does not receive the decision", g.id, r.index)
					continue
				}
				g.answer(r, event{kind: rankVoted, id: c.number, ok: a.ShouldCommit})
			}
		case round.ReportIncomplete:
			g.sends(quorum.Incomplete{ReplicaID: g.id, Reason: a.Reason})
		case round.NotifyFailed:
			g.notify(&a.Failed)
		case round.AnswerMetadata:
			_, g.hasMetadata = g.answered(a.Waiter)
		case round.Fail:
			if c, ok := g.answered(a.Waiter); ok && c.kind != metadataCall {
				if w.OnlyClaims && !g.claimed && c.kind == quorumCall {
					w.broken(ruleUnshown, "%s has no quorum: %s", g.id, a.Failure.Reason)
				}
				if w.trace != nil {
					w.logf("%s rank %d: %s", g.id, c.rank, a.Failure.Reason)
				}
				g.answer(&g.ranks[c.rank], event{kind: rankFailed, id: c.number})
			}
		}
	}
}

// news is a message to a rank about its quorum.
type news struct {
	recovery.Result
	quorum  *quorum.Quorum
	attempt uint64
}

// answer sends an answer to a rank. To rank 0, which is in the process of the manager server, it takes no time.
func (g *group) answer(r *rank, e event) {
	d := time.Duration(0)
	if r.index > 0 {
		d = g.w.delay(g.slot) / 4
	}
	e.g, e.rank = g, int16(r.index)
	g.w.after(d, e)
}

// answered records that the machine has answered a call, and checks that it does so only once.
func (g *group) answered(id round.WaiterID) (call, bool) {
	i := g.find(id)
	if i < 0 {
		g.w.broken(ruleWaiters, "%s answers call %d, which has no waiter", g.id, id)
		return call{}, false
	}
	c := g.calls[i]
	g.calls = slices.Delete(g.calls, i, i+1)
	return c, true
}

func (g *group) describeCalls() string {
	text := ""
	for _, c := range g.calls {
		what := "quorum"
		if c.kind == voteCall {
			what = "vote"
		}
		text += fmt.Sprintf("[%s call of rank %d]", what, c.rank)
	}
	return text
}

// armAsk ensures that an askDeadline is scheduled for the deadline or earlier. There is one timer for all rounds, since most rounds
// do not reach their deadline.
func (g *group) armAsk() {
	if at := g.asking.deadline; g.askTimer == 0 || at < g.askTimer {
		g.askTimer = at
		g.w.push(event{at: at, kind: askDeadline, g: g})
	}
}

// refused handles a failed attempt. Another one follows if there is time.
func (g *group) refused(req uint64) {
	a := &g.asking
	if !a.active || a.req != req {
		return
	}
	w := g.w
	if l := &w.lh; l.up { // the lighthouse notices the broken connection, too, with some delay
		w.after(w.upTo(w.Keepalive), event{kind: lhWithdrawn, g: g, id: req, life: l.life})
	}
	a.failed++
	wait := 20 * time.Millisecond << min(a.failed-1, 6)
	wait = min(wait, time.Second)
	wait -= w.upTo(wait / 4)
	if w.now+wait > a.deadline {
		a.active = false
		g.step(round.QuorumKnown{Round: a.round, Failure: &round.Failure{Kind: round.KindTimeout, Reason: "the lighthouse could not be reached"}})
		return
	}
	w.after(wait, event{kind: retryDue, g: g, id: a.round})
}

// cancel ends the request. The message that withdraws it at the lighthouse may be lost.
func (g *group) cancel() {
	w := g.w
	g.asking.active = false
	switch l := &w.lh; {
	case g.link != nil:
		g.link.up(event{kind: lhWithdrawn, id: g.asking.req, link: g.link})
	case w.calls(g.slot) && l.up && !w.up(g.slot) && !w.lost():
		w.after(w.delay(g.slot), event{kind: lhWithdrawn, g: g, id: g.asking.req, life: l.life})
	}
}
