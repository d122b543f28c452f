package sim

import (
	"time"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
)

// link is a stream between a group and a lighthouse. The messages of each direction arrive in order, or the stream breaks.
type link struct {
	id   uint64
	g    *group
	life uint32 // incarnation of the lighthouse
	term int64  // in the greeting

	ended        bool // the link has ended
	lostUp       bool // a message to the lighthouse was lost: later ones do not arrive, and both sides will notice
	lostDown     bool // the same for messages to the group
	welcomed     bool
	known        int64         // quorum_id in the greeting
	upAt, downAt time.Duration // arrival of the last message of each direction
}

// up sends an event to the lighthouse.
func (k *link) up(e event) {
	w := k.g.w
	switch {
	case k.ended || k.lostUp || !w.lh.up || w.lh.life != k.life:
	case w.up(k.g.slot) || w.lost():
		k.jam(&k.lostUp)
	default:
		k.upAt = max(k.upAt, w.now+w.delay(k.g.slot))
		e.at, e.life, e.g = k.upAt, k.life, k.g
		w.push(e)
	}
}

// down sends an event to the group.
func (k *link) down(e event) {
	w := k.g.w
	switch {
	case k.ended || k.lostDown || k.g.killed:
	case w.down(k.g.slot) || w.lost():
		k.jam(&k.lostDown)
	default:
		k.downAt = max(k.downAt, w.now+w.delay(k.g.slot))
		e.at, e.g, e.link = k.downAt, k.g, k
		w.push(e)
	}
}

// jam drops all further messages of one direction. The other direction works until one of the sides notices the loss.
func (k *link) jam(direction *bool) {
	w := k.g.w
	if *direction = true; k.lostUp && k.lostDown {
		return // the first loss already makes both sides notice
	}
	w.after(w.Keepalive, event{kind: linkBroken, g: k.g, link: k})
	w.after(w.Keepalive/2+w.upTo(w.Keepalive), event{kind: lhDisconnected, g: k.g, link: k, life: k.life})
}

// close ends the link from the group's side. The lighthouse learns of the end at once if it can be reached, and after a timeout
// otherwise, or if the end is silent.
func (k *link) close(silent bool) {
	w := k.g.w
	if k.ended {
		return
	}
	k.ended = true
	notice := w.delay(k.g.slot)
	if silent || k.lostUp || w.up(k.g.slot) {
		notice = 2 * w.Keepalive
	}
	w.after(max(notice, k.upAt-w.now), event{kind: lhDisconnected, g: k.g, link: k, life: k.life})
}

// connection is a group's side of its links, like package membership/lighthouses in production.
type connection struct {
	link  *link         // nil: no link is open or being opened
	tries int           // failed attempts in a row
	term  int64         // the highest term that it has received from a lighthouse
	spoke time.Duration // time of its last message

	fenced bool // since its last quorum, the group was silent for so long that the others may have continued without it

	served bool           // a lighthouse has welcomed it
	broke  time.Duration  // when its link broke, 0 if it is not broken
	last   *quorum.Quorum // the last quorum that it received

	claims  bool // fault: it falsely claims to know a later quorum
	claimed bool // it has claimed that since its last quorum: a pending request may still contain the claim

	withholds time.Duration // fault: until when it does not show the quorum that it knows
}

// connect opens a link if there is none.
func (g *group) connect() {
	c, w := &g.connection, g.w
	if c.link != nil {
		return
	}
	c.tries++
	l := &w.lh
	w.req++
	k := &link{id: w.req, g: g, life: l.life, term: c.term, known: g.known()}
	c.link = k
	switch {
	case w.cutOff(g.slot):
		k.ended = true
		w.after(w.Keepalive, event{kind: linkBroken, g: g, link: k})
	case !l.up:
		k.ended = true
		w.after(w.delay(g.slot), event{kind: linkBroken, g: g, link: k})
	default:
		g.speaks()
		k.up(event{kind: lhGreet, link: k})
		w.after(4*w.Keepalive, event{kind: linkDue, g: g, link: k})
	}
}

func (g *group) handleLink(e *event) {
	c, k, w := &g.connection, e.link, g.w
	if c.link != k {
		return
	}
	switch e.kind {
	case welcomed:
		k.welcomed = true
		c.term = max(c.term, int64(e.id))
		c.served, c.broke, c.tries = true, 0, 0
		if g.leaving {
			g.sends(quorum.Leaving{ReplicaID: g.id})
		}
		for i := range g.ranks {
			if g.ranks[i].disconnected {
				g.expectWithinGrace(int16(i))
			}
		}
		if g.asking.active {
			g.send()
		}
	case linkDue:
		if !k.welcomed {
			k.close(false)
			g.linkEnded()
		}
	case linkBroken:
		k.ended = true
		g.linkEnded()
	case recall:
		if c.last != nil && c.last.ID >= int64(e.id) && w.now >= c.withholds {
			p := c.last.Past()
			k.up(event{kind: lhPast, x: &p})
		}
	case memberFailed:
		f := e.x.(*quorum.Failed)
		w.after(w.lag(), event{kind: noticed, g: g, x: &round.MemberFailed{
			QuorumID: f.QuorumID, ReplicaID: f.ReplicaID, Reason: f.Reason,
		}})
	case probed:
		g.speaks()
		k.up(event{kind: lhBeat, link: k})
	case progressDue:
		g.askRanks()
	case drained:
		g.wanted = true
		g.step(round.Drained{})
	case released:
		g.goes()
	}
}

func (g *group) linkEnded() {
	c, w := &g.connection, g.w
	c.link = nil
	if c.broke == 0 {
		c.broke = w.now
	}
	wait := min(20*time.Millisecond<<min(c.tries, 6), time.Second)
	w.after(wait-w.upTo(wait/4), event{kind: linkRetry, g: g})
}

// known returns the id of the last quorum that the group received, 0 if there is none; with the fault Claim, a larger id.
func (g *group) known() int64 {
	id := int64(0)
	if g.last != nil {
		id = g.last.ID
	}
	if g.claims {
		id += (2 * time.Hour).Milliseconds() // further ahead than a lighthouse tolerates for a difference of clocks
	}
	return id
}

// ask starts the request of a round.
func (g *group) ask(a round.AskLighthouse) {
	w := g.w
	if g.asking.active {
		w.broken(ruleWaiters, "%s asks the lighthouse for round %d while it asks for round %d", g.id, a.Round, g.asking.round)
	}
	deadline := a.Deadline.Sub(epoch)
	deadline -= min(replyMargin, (deadline-w.now)/10)
	g.asking = asking{active: true, round: a.Round, deadline: deadline,
		request: &request{member: a.Member, known: max(a.KnownQuorumID, g.known()), deadline: deadline}}
	g.armAsk()
	g.send()
}

// send makes one attempt, as soon as there is a link.
func (g *group) send() {
	w := g.w
	if w.calls(g.slot) {
		g.call()
		return
	}
	k := g.link
	if k == nil {
		if g.broke == 0 { // otherwise another attempt is about to follow
			g.connect()
		}
		return
	}
	if k.welcomed {
		w.req++
		g.asking.req = w.req
		g.speaks()
		k.up(event{kind: lhAsk, id: g.asking.req, x: g.asking.request, link: k})
	}
}

// call makes the request of a group without a stream.
func (g *group) call() {
	w := g.w
	l := &w.lh
	w.req++
	a := &g.asking
	a.req = w.req
	d := w.delay(g.slot)
	asks := event{kind: lhAsk, g: g, id: a.req, x: a.request, life: l.life}
	switch {
	case !l.up && !w.up(g.slot) && !w.down(g.slot):
		w.after(d, event{kind: refused, g: g, id: a.req})
	case !l.up || w.up(g.slot) || w.lost():
		w.after(w.Keepalive, event{kind: refused, g: g, id: a.req})
	default:
		w.after(d, asks)
		if w.doubled() {
			w.after(w.delay(g.slot), asks)
		}
	}
}

// alive sends a heartbeat, unless another message was sent within the interval.
func (g *group) alive() {
	w := g.w
	if w.calls(g.slot) {
		if l := &w.lh; l.up && !w.up(g.slot) && !w.lost() {
			w.after(w.delay(g.slot), event{kind: lhBeat, g: g, life: l.life})
		}
		w.after(w.HeartbeatInterval, event{kind: beatDue, g: g})
		return
	}
	interval := w.messageInterval()
	if silent := w.now - g.spoke; silent < interval {
		w.after(interval-silent, event{kind: beatDue, g: g})
		return
	}
	if k := g.link; k != nil && k.welcomed {
		g.speaks()
		k.up(event{kind: lhBeat, link: k})
	}
	w.after(interval, event{kind: beatDue, g: g})
}
