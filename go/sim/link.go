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
	lh   int
	life uint32 // incarnation of the lighthouse
	term int64  // in the greeting

	ended        bool // the link has ended
	lostUp       bool // a message to the lighthouse was lost: later ones do not arrive, and both sides will notice
	lostDown     bool // the same for messages to the group
	welcomed     bool
	stale        bool          // the lighthouse has requested another link
	reaches      quorum.Places // the last report of reachable lighthouses
	known        int64         // quorum_id in the greeting
	first        int64         // the first quorum_id that the group received on the link, 0: none
	stampedAt    time.Duration // when the lighthouse sent the newest stamp
	stamp        time.Duration // the newest stamp that has arrived
	answers      time.Duration // the newest stamp that was answered
	upAt, downAt time.Duration // arrival of the last message of each direction
}

func (k *link) lighthouse() *lighthouse { return &k.g.w.lhs[k.lh] }

// up sends an event to the lighthouse.
func (k *link) up(e event) {
	w, l := k.g.w, k.lighthouse()
	switch {
	case k.ended || k.lostUp || !l.up || l.life != k.life:
	case w.up(k.g.slot, k.lh) || w.lost():
		k.jam(&k.lostUp)
	default:
		k.upAt = max(k.upAt, w.now+w.delay(k.g.slot))
		if s, found := k.takeStampAnswer(); found {
			s.at, s.lh, s.life, s.g = k.upAt, uint8(k.lh), k.life, k.g
			w.push(s)
		}
		e.at, e.lh, e.life, e.g = k.upAt, uint8(k.lh), k.life, k.g
		w.push(e)
	}
}

// down sends an event to the group.
func (k *link) down(e event) {
	w := k.g.w
	switch {
	case k.ended || k.lostDown || k.g.killed:
	case w.down(k.g.slot, k.lh) || w.lost():
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
	w.after(w.Keepalive/2+w.upTo(w.Keepalive), event{kind: lhDisconnected, g: k.g, link: k, lh: uint8(k.lh), life: k.life})
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
	if silent || k.lostUp || w.up(k.g.slot, k.lh) {
		notice = 2 * w.Keepalive
	}
	w.after(max(notice, k.upAt-w.now), event{kind: lhDisconnected, g: k.g, link: k, lh: uint8(k.lh), life: k.life})
}

// connection is a group's side of its links, like package membership/lighthouses in production.
type connection struct {
	link  *link         // nil: no link is open or being opened
	tries int           // failed attempts in a row
	term  int64         // the highest term that it has received from a lighthouse
	spoke time.Duration // time of its last message

	fenced bool // since its last quorum, the group was silent for so long that the others may have continued without it

	at         int // the lighthouse that served last
	served     bool
	broke      time.Duration                 // when its link broke, 0 if it is not broken
	back       int                           // the earlier lighthouse that all fail back to, -1 if there is none
	sees       quorum.Places                 // the earlier lighthouses that the last probe has reached
	avoid      [maxLighthouses]time.Duration // until when the group asks other lighthouses first
	avoidances [maxLighthouses]int           // in a row; each one lasts longer
	last       *quorum.Quorum                // the last quorum that it received

	claims  bool // fault: it falsely claims to know a later quorum
	claimed bool // it has claimed that since its last quorum: a pending request may still contain the claim

	withholds time.Duration // fault: until when it does not show the quorum that it knows

	promised time.Duration // end of its bond: until then it asks no other lighthouse
}

// probeInterval returns the interval at which a group probes the earlier lighthouses.
func (w *world) probeInterval() time.Duration { return 2 * w.Keepalive }

// order returns the lighthouses to try, in order.
func (g *group) order() (order [maxLighthouses]int, n int) {
	c, w := &g.connection, g.w
	avoided := func(i int) bool { return w.now < c.avoid[i] }
	if w.Lighthouses == 1 || !g.mayLeave() || c.served && c.back < 0 && !avoided(c.at) && (c.broke == 0 || w.now-c.broke < w.Keepalive) {
		order[0] = c.at
		return order, 1
	}
	if c.back >= 0 {
		order[0], n = c.back, 1
	}
	for _, want := range [2]bool{false, true} {
		for i := range w.Lighthouses {
			if avoided(i) == want && i != c.back {
				order[n] = i
				n++
			}
		}
	}
	return order, n
}

// connect opens a link if there is none.
func (g *group) connect() {
	c, w := &g.connection, g.w
	if c.link != nil {
		return
	}
	order, n := g.order()
	i := order[c.tries%n]
	c.tries++
	l := &w.lhs[i]
	w.req++
	k := &link{id: w.req, g: g, lh: i, life: l.life, term: c.term, known: g.known()}
	c.link = k
	switch {
	case w.cutOff(g.slot, i):
		k.ended = true
		w.after(w.Keepalive, event{kind: linkBroken, g: g, link: k})
	case !l.up:
		k.ended = true
		if i == c.at {
			g.letGo()
		}
		w.after(w.delay(g.slot), event{kind: linkBroken, g: g, link: k})
	default:
		g.speaks()
		k.up(event{kind: lhGreet, link: k})
		w.after(4*w.Keepalive, event{kind: linkDue, g: g, link: k})
	}
}

// reconnect ends the link, and opens another one.
func (g *group) reconnect() {
	if k := g.link; k != nil {
		g.link = nil
		k.close(false)
	}
	g.tries = 0
	g.connect()
}

func (g *group) handleLink(e *event) {
	c, k, w := &g.connection, e.link, g.w
	if e.kind != probeEarlier && c.link != k {
		return
	}
	switch e.kind {
	case welcomed:
		k.welcomed = true
		c.term = max(c.term, int64(e.id))
		if c.at != k.lh {
			c.sees = 0
		}
		c.at, c.served, c.broke, c.back, c.tries = k.lh, true, 0, -1, 0
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
	case stamped:
		g.stampedBy(k, time.Duration(e.id))
	case linkDue:
		if !k.welcomed {
			k.close(false)
			g.linkEnded()
		}
	case closing: // the lighthouse has released the group from its bond
		k.ended = true
		g.letGo()
		g.linkEnded()
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
		w.after(w.lag(), event{kind: noticed, g: g, ok: w.Lighthouses > 1 && (k.first == 0 || f.QuorumID < k.first), x: &round.MemberFailed{
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
	case failBack:
		c.back, c.avoid[e.id] = int(e.id), 0
		g.letGo()
		g.reconnect()
	case probeEarlier:
		g.probeEarlier()
	}
}

func (g *group) linkEnded() {
	c, w := &g.connection, g.w
	if k := c.link; k.lh == c.back { // the probe had reached this lighthouse, but it does not serve
		c.back = -1
		g.avoidFor(k.lh)
	}
	c.link = nil
	if c.broke == 0 {
		c.broke = w.now
	}
	wait := min(20*time.Millisecond<<min(c.tries, 6), time.Second)
	w.after(wait-w.upTo(wait/4), event{kind: linkRetry, g: g})
}

// probeEarlier probes the lighthouses before the serving one, and reports which of them were reached.
func (g *group) probeEarlier() {
	c, w := &g.connection, g.w
	w.after(w.probeInterval()-w.upTo(w.probeInterval()/5), event{kind: probeEarlier, g: g})
	var sees quorum.Places
	for i := range c.at {
		if w.now >= c.avoid[i] && w.lhs[i].up && !w.cutOff(g.slot, i) {
			sees |= quorum.PlacesOf(i)
		}
	}
	twice := sees & c.sees
	c.sees = sees
	if k := c.link; k != nil && k.welcomed && k.reaches != twice {
		k.reaches = twice
		k.up(event{kind: lhReaches, id: uint64(twice), link: k})
	}
}

// failOver handles a refusal after which the group asks another lighthouse.
func (g *group) failOver() {
	g.avoidFor(g.at)
	g.letGo()
	g.reconnect()
}

// avoidFor makes the group avoid a lighthouse for a while, longer each time.
func (g *group) avoidFor(i int) {
	c, w := &g.connection, g.w
	c.avoid[i] = w.now + 2*w.Policy.HeartbeatTimeout<<min(c.avoidances[i], 3)
	c.avoidances[i]++
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
		g.asking.request.reaches = k.reaches
		k.up(event{kind: lhAsk, id: g.asking.req, x: g.asking.request, link: k})
	}
}

// call makes the request of a group without a stream. With several lighthouses, it asks the one that was reached last, or the next
// one. An upstream group knows the first one only.
func (g *group) call() {
	w := g.w
	for range w.Lighthouses {
		if w.Upstream.has(g.slot) || w.lhs[g.at].up && !w.cutOff(g.slot, g.at) {
			break
		}
		g.at = (g.at + 1) % w.Lighthouses
	}
	l := &w.lhs[g.at]
	w.req++
	a := &g.asking
	a.req = w.req
	d := w.delay(g.slot)
	asks := event{kind: lhAsk, g: g, id: a.req, x: a.request, lh: uint8(g.at), life: l.life}
	switch {
	case !l.up && !w.up(g.slot, g.at) && !w.down(g.slot, g.at):
		w.after(d, event{kind: refused, g: g, id: a.req})
	case !l.up || w.up(g.slot, g.at) || w.lost():
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
		if l := &w.lhs[g.at]; l.up && !w.up(g.slot, g.at) && !w.lost() {
			w.after(w.delay(g.slot), event{kind: lhBeat, g: g, lh: uint8(g.at), life: l.life})
		}
		w.after(w.HeartbeatInterval, event{kind: beatDue, g: g})
		return
	}
	interval := w.aliveInterval()
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
