package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
)

// This file simulates the reports of a group to its lighthouse (membership.Witness), and the lighthouse's checks on members and questions
// about their progress (watch.go in package lighthouse). Durations that are constants in production are scaled to the timeouts of the
// simulation.

// checkTime returns how long a suspected member may take to answer a check (checkTime in package lighthouse).
func (w *world) checkTime() time.Duration { return w.Policy.HeartbeatTimeout / 4 }

// answerTime returns how long ranks may take to report their progress (answerTime in package manager).
func (w *world) answerTime() time.Duration { return w.Policy.HeartbeatTimeout / 8 }

// rankGrace returns how long a rank whose connection broke may take to reconnect before its group is reported as incomplete (rankGrace in
// package manager).
func (w *world) rankGrace() time.Duration { return w.Policy.SuspectGrace }

// messageInterval returns the interval at which a lighthouse expects messages. If it receives none from a member for three intervals, the
// heartbeat timeout, the member counts as failed. A group fences itself half an interval earlier, since its messages may be delayed.
func (w *world) messageInterval() time.Duration { return w.Policy.HeartbeatTimeout / 3 }

// sends sends an event to the lighthouse. The event is dropped while there is no stream: the lighthouse sees the end of the stream itself,
// and the group counts as failed unless it reconnects within the grace. Only two events are sent again on the next stream: Leaving, and
// Incomplete if the rank is still disconnected (expectWithinGrace).
func (g *group) sends(message quorum.Event) {
	if k := g.link; k != nil && k.welcomed {
		g.speaks()
		k.up(event{kind: lhMessage, x: message, link: k})
	}
}

// speaks records the time of a message. The silence before it is checked first: otherwise the message would hide a silence during which
// the lighthouse may have continued without the group.
func (g *group) speaks() {
	g.noteSilence()
	g.spoke = g.w.now
}

// noteSilence fences the group if it has sent nothing for too long. The fence stays until the next quorum, which shows that the
// lighthouse counts the group as alive. A group that no lighthouse has welcomed yet is not fenced. Either it is in no quorum, or it makes
// calls instead of using a stream: production has no fence for such a group.
func (g *group) noteSilence() {
	silent := g.w.now - g.spoke
	g.fenced = g.fenced || g.served && silent > g.w.messageInterval()*5/2
	g.quiet = max(g.quiet, silent) // for the checker
}

// suspect reports a failed collective. In a quorum of two groups, the other group is the suspect; in a larger one, none is named.
func (g *group) suspect(c *comm) {
	message := quorum.Suspected{Reporter: g.id, QuorumID: c.key.quorumID}
	if len(c.members) == 2 {
		for i := range c.members {
			if id := c.members[i].id; id != g.id {
				message.Suspect = id
			}
		}
	}
	g.sends(message)
}

// memberFailed handles the notice that a member, which may be this one, counts as failed.
func (g *group) memberFailed(f *round.MemberFailed) {
	if f.ReplicaID == g.id {
		g.evicted = max(g.evicted, f.QuorumID)
	} else {
		g.w.check.forwards(g, f)
	}
	g.step(*f)
	for r := range g.ranks { // also if the group does not notify the member: collectives of that quorum may never complete
		g.ranks[r].peerFailed(f.QuorumID)
	}
}

// notify forwards to a member the lighthouse's report that it counts as failed. The manager server of an upstream group has no such call.
func (g *group) notify(f *round.MemberFailed) {
	w := g.w
	if other := w.byID[f.ReplicaID]; w.sends(g.slot, other.slot) && !w.lost() && !w.Upstream.has(other.slot) {
		w.after(max(w.delay(g.slot), w.delay(other.slot)), event{kind: noticed, g: other, x: f})
	}
}

// lag returns the time from the arrival of a notice of the lighthouse until the machine handles it. In production, notices and quorums
// are handled by different goroutines. So half of the notices are delayed, and a quorum that was sent shortly after such a notice reaches
// the machine before it.
func (w *world) lag() time.Duration {
	if w.now.Microseconds()%2 == 0 {
		return 0
	}
	return w.Delay
}

// accuse falsely reports a failed collective, and names another member of the quorum as the suspect.
func (g *group) accuse() {
	c := g.ranks[0].comm
	if c == nil {
		return
	}
	for i := range c.members {
		if id := c.members[(i+g.slot)%len(c.members)].id; id != g.id {
			g.w.logf("%s falsely reports that %s failed", g.id, id)
			g.sends(quorum.Suspected{Reporter: g.id, Suspect: id, QuorumID: c.key.quorumID})
			return
		}
	}
}

// rankBroke reports to the machine that a rank's connection broke. The machine must then end all pending calls of the group: they would
// wait for that rank.
func (g *group) rankBroke(rank int16) {
	g.ranks[rank].disconnected = true
	g.step(round.RankDisconnected{GroupRank: int64(rank)})
	if len(g.calls) > 0 {
		g.w.broken(ruleWaiters, "rank %d of %s has failed, and %s still waits", rank, g.id, g.describeCalls())
	}
	g.expectWithinGrace(rank)
}

// expectWithinGrace feeds StillDisconnected after rankGrace, which the machine ignores if the rank has reconnected. As in production, it
// is called again when a stream to a lighthouse is welcomed (lighthouseReached in package manager): that lighthouse may not have received
// the report.
func (g *group) expectWithinGrace(rank int16) {
	g.w.after(g.w.rankGrace(), event{kind: rankStill, g: g, rank: rank})
}

// askRanks asks all ranks for their progress. Killed and stalled ranks do not answer.
func (g *group) askRanks() {
	w := g.w
	g.asked = true
	g.step(round.ProgressAsked{})
	for i := range g.ranks {
		if r := &g.ranks[i]; r.phase != killed && w.now >= r.stalledUntil {
			g.answer(r, event{kind: rankProgress, ok: r.phase == reducing})
		}
	}
	w.after(w.answerTime(), event{kind: progressEnd, g: g})
}

// progress reports the group's progress to the lighthouse, once, when all ranks have answered or answerTime is over.
func (g *group) progress(timeUp bool) {
	m, ok := g.machine.(interface {
		Progress(time.Time) (round.Progress, bool)
	})
	if !ok || !g.asked {
		return
	}
	p, complete := m.Progress(epoch.Add(g.w.now))
	if complete || timeUp {
		g.asked = false
		g.sends(quorum.Progressed{ReplicaID: g.id, Progress: quorum.Progress{
			Step: p.Step, Rank: p.GroupRank, Phase: p.Phase, For: p.For, Waits: p.Waits,
		}})
	}
}

// endsLastStep ends the last step of a rank whose group is drained. When all ranks have ended that step, the group sends Leaving, and
// waits for its release. If no release arrives, it shuts down at leaveDue.
func (r *rank) endsLastStep() {
	g, w := r.g, r.g.w
	r.phase, r.deadline = left, 0
	for i := range g.ranks {
		if g.ranks[i].phase != left {
			return
		}
	}
	w.logf("%s has ended its last step", g.id)
	g.leaving = true
	g.sends(quorum.Leaving{ReplicaID: g.id})
	w.after(2*w.Timeout, event{kind: leaveDue, g: g})
}

// goes shuts down a drained group that was released, or whose wait for the release is over. Another group starts in its slot later.
func (g *group) goes() {
	if g.leaving {
		g.shutDown()
		g.w.after(g.w.upTo(g.w.Timeout), event{kind: slotStart, id: uint64(g.slot)})
	}
}

// look is a check of a suspected member whose result is not known yet.
type look struct {
	of         quorum.Check
	sentBefore int // number of messages from the member that the lighthouse had handled before the check
}

// lookAt begins the check of a suspected member. A member with a stream must answer a probe on it: an open connection does not show that
// its process runs. If a member has no stream, its host must accept a connection.
func (l *lighthouse) lookAt(a quorum.Check) {
	w := l.w
	g := w.byID[a.ReplicaID]
	if g == nil {
		return
	}
	for _, k := range l.links {
		if k.g == g {
			k.down(event{kind: probed})
		}
	}
	w.after(w.checkTime(), event{kind: lhChecked, g: g, life: l.life, x: &look{a, g.view.messages}})
}

// checked passes the result of a check to the machine, checkTime after it began. Any message since then counts as an answer.
func (l *lighthouse) checked(g *group, c *look) {
	e := quorum.Checked{ReplicaID: g.id, QuorumID: c.of.QuorumID, Reached: g.view.messages != c.sentBefore}
	if !e.Reached {
		e.Reason = fmt.Sprintf("no answer within %s", l.w.checkTime())
		if !l.hasLink(g) {
			e.Reached = !g.killed && !l.w.cutOff(g.slot) // the kernel accepts connections even while the process is stopped
		}
	}
	l.check.checked(g, e)
	l.step(e)
}

func (l *lighthouse) hasLink(g *group) bool {
	return slices.ContainsFunc(l.links, func(k *link) bool { return k.g == g })
}

// askProgress asks members for their progress. A member without a stream cannot be asked. It counts as waiting for others, so that it is
// never reported as stalled.
func (l *lighthouse) askProgress(ids []string) {
	l.check.asksAll()
	for _, id := range ids {
		g := l.w.byID[id]
		for _, k := range l.links {
			if k.g == g {
				k.down(event{kind: progressDue})
			}
		}
		if !l.hasLink(g) {
			e := quorum.Progressed{ReplicaID: id, Progress: quorum.Progress{Phase: "not known", Waits: true}}
			l.check.message(g, e)
			// There are no actions to do: the event only records the answer, and no time has passed since the Step that asked.
			l.machine.Step(e, epoch.Add(l.clock()))
		}
	}
}

// message handles an event that a group sends on a stream. Events on an ended stream are ignored.
func (l *lighthouse) message(e *event) {
	message := e.x.(quorum.Event)
	if !l.listens(e.link) {
		return
	}
	switch message.(type) {
	case quorum.Leaving, quorum.ShuttingDown:
	default: // The event counts as a heartbeat, too: after any message, a group sends no heartbeat for some time.
		l.check.beat(e.g)
		l.step(quorum.Beat{ReplicaID: e.g.id})
	}
	l.check.message(e.g, message)
	l.step(message)
}

// slept reports to the machine that the lighthouse itself was stopped. It runs before the next event is handled: the messages of that
// time have not been handled yet, and without the report all members would count as failed by their silence.
func (l *lighthouse) slept() {
	w := l.w
	if most := w.Policy.HeartbeatTimeout/2 + w.QuorumTick; l.clock()-l.stepped > most { // a running lighthouse has an event at each tick
		slept := l.clock() - l.stepped
		l.check.slept(slept)
		l.do(quorum.Slept{For: slept})
	}
	l.stepped = max(l.stepped, l.clock()) // like the machine's clock, it never decreases
}
