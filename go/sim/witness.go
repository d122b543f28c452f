package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
)

// This file has the messages of groups other than requests (membership.Witness), and the questions of the lighthouse (watch.go in
// package lighthouse). Constants of some seconds are scaled to the timeouts of the simulation.

// checkTime returns how long a suspected member may take to give a sign of life.
func (w *world) checkTime() time.Duration { return w.Policy.HeartbeatTimeout / 4 }

// answerTime returns how long ranks may take to report their progress.
func (w *world) answerTime() time.Duration { return w.Policy.HeartbeatTimeout / 8 }

// rankGrace returns how long a rank whose connection broke may take to reconnect before that is reported to the other groups.
func (w *world) rankGrace() time.Duration { return w.Policy.SuspectGrace }

// aliveInterval returns the longest time between two messages of a group to its lighthouse.
func (w *world) aliveInterval() time.Duration {
	interval := w.messageInterval()
	if w.Lighthouses > 1 {
		interval = min(interval, quorum.BondTime/quorum.StampsInBond)
	}
	return interval
}

// messageInterval returns the interval at which a lighthouse expects messages. A group that sends none for two and a half intervals is
// fenced.
func (w *world) messageInterval() time.Duration { return w.Policy.HeartbeatTimeout / 3 }

// sends sends an event to the lighthouse. It is dropped while there is no stream: the lighthouse has seen the disconnect itself.
func (g *group) sends(message quorum.Event) {
	if k := g.link; k != nil && k.welcomed {
		g.speaks()
		k.up(event{kind: lhMessage, x: message, link: k})
	}
}

// speaks records the time of a message, and fences the group if the time since the last one was too long.
func (g *group) speaks() {
	g.noteSilence()
	g.spoke = g.w.now
}

func (g *group) noteSilence() {
	silent := g.w.now - g.spoke
	g.fenced = g.fenced || g.served && silent > g.w.messageInterval()*5/2
	g.quiet = max(g.quiet, silent)
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

// memberFailed handles the notice that a member, which may be this one, counts as failed. With elsewhere, the lighthouse that reports
// it may not have formed the quorum: another lighthouse may serve the member, so the machine must not notify the member.
func (g *group) memberFailed(f *round.MemberFailed, elsewhere bool) {
	own := f.ReplicaID == g.id
	switch {
	case own:
		g.evicted = max(g.evicted, f.QuorumID)
		g.step(*f)
	case !elsewhere:
		g.w.check.forwards(g, f)
		g.step(*f)
	}
	for r := range g.ranks {
		g.ranks[r].peerFailed(f.QuorumID)
	}
}

// notify forwards the lighthouse's report about a member to that member. An upstream member has no such call.
func (g *group) notify(f *round.MemberFailed) {
	w := g.w
	if other := w.byID[f.ReplicaID]; w.sends(g.slot, other.slot) && !w.lost() && !w.Upstream.has(other.slot) {
		w.after(max(w.delay(g.slot), w.delay(other.slot)), event{kind: noticed, g: other, x: f})
	}
}

// lag returns how long a notice of the lighthouse takes to reach the machine. Notices and quorums are handled by different
// goroutines: in half of the cases, a quorum that was sent after the notice arrives before it.
func (w *world) lag() time.Duration {
	if w.now.Microseconds()%2 == 0 {
		return 0
	}
	return w.Delay
}

// accuse falsely reports a failed collective, and suspects a healthy peer.
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

// rankBroke reports to the machine that a rank's connection broke and, after rankGrace, that it is still broken.
func (g *group) rankBroke(rank int16) {
	g.step(round.RankDisconnected{GroupRank: int64(rank)})
	if len(g.calls) > 0 {
		g.w.broken(ruleWaiters, "rank %d of %s has failed, and %s still waits", rank, g.id, g.describeCalls())
	}
	g.w.after(g.w.rankGrace(), event{kind: rankStill, g: g, rank: rank})
}

// askRanks asks all ranks for their progress.
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

// progress reports the group's progress to the lighthouse, when all ranks have answered or the time is over.
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

// endsLastStep ends the last step of a rank whose group is drained. The group leaves when all of its ranks have ended that step.
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

// goes ends a group that has left.
func (g *group) goes() {
	if g.leaving {
		g.shutDown()
		g.w.after(g.w.upTo(g.w.Timeout), event{kind: slotStart, id: uint64(g.slot)})
	}
}

// look is a check of a suspected member whose result is not known yet.
type look struct {
	of         quorum.Check
	sentBefore int // messages that the member had sent before the check
}

// lookAt checks on a member: a group with a stream has to answer on it; for a group without one, its host has to accept a
// connection.
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
	w.after(w.checkTime(), event{kind: lhChecked, g: g, lh: uint8(l.index), life: l.life, x: &look{a, g.views[l.index].messages}})
}

func (l *lighthouse) checked(g *group, c *look) {
	e := quorum.Checked{ReplicaID: g.id, QuorumID: c.of.QuorumID, Reached: g.views[l.index].messages != c.sentBefore}
	if !e.Reached {
		e.Reason = fmt.Sprintf("no answer within %s", l.w.checkTime())
		if !l.hasLink(g) {
			e.Reached = !g.killed && !l.w.cutOff(g.slot, l.index) // the kernel accepts the connection even if the process is stopped
		}
	}
	l.check.checked(g, e)
	l.step(e)
}

func (l *lighthouse) hasLink(g *group) bool {
	return slices.ContainsFunc(l.links, func(k *link) bool { return k.g == g })
}

// askProgress asks members for their progress. Members that make calls cannot be asked.
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
			l.machine.Step(e, epoch.Add(l.clock())) // without handling actions: the answer has no effect before the next tick
		}
	}
}

// message handles an event that a group sends on a stream.
func (l *lighthouse) message(e *event) {
	message := e.x.(quorum.Event)
	_, leaves := message.(quorum.Leaving)
	if !slices.Contains(l.links, e.link) || e.link.stale && !leaves {
		return
	}
	switch message.(type) {
	case quorum.Leaving, quorum.ShuttingDown:
	default: // also a sign of life
		l.check.beat(e.g)
		l.step(quorum.Beat{ReplicaID: e.g.id})
	}
	l.check.message(e.g, message)
	l.step(message)
}

// slept reports to the machine that the lighthouse itself was stopped, before it handles the next event: it received nothing meanwhile.
func (l *lighthouse) slept() {
	w := l.w
	if most := w.Policy.HeartbeatTimeout/2 + w.QuorumTick; l.clock()-l.stepped > most {
		slept := l.clock() - l.stepped
		l.check.slept(slept)
		l.do(quorum.Slept{For: slept})
	}
	l.stepped = max(l.stepped, l.clock()) // like the machine's clock, it never decreases
}
