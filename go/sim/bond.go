package sim

import (
	"time"

	"github.com/torchft/torchft/go/quorum"
)

// Where there are several lighthouses, a group answers the stamps of the one that serves it, and asks no other until the
// newest has run out (quorum/bond.go). A stamp is the time at which it was sent, on the lighthouse's clock.

// stamp sends the next one on a link, if it is time for one.
func (l *lighthouse) stamp(k *link) {
	if l.w.Lighthouses == 1 || l.w.now-k.stampedAt < quorum.BondTime/10 && k.stampedAt != 0 {
		return
	}
	k.stampedAt = l.w.now
	// A clock goes on between a release and the next stamp. Here both are in one moment, and a stamp of that moment would not count.
	k.down(event{kind: stamped, id: uint64(l.clock() + 1)})
}

// answered takes a stamp that came back.
func (l *lighthouse) answered(k *link, stamp time.Duration) {
	l.step(quorum.Bound{ReplicaID: k.g.id, Since: epoch.Add(stamp)})
}

// stampSays is what a group says with whatever it says on a link.
func (k *link) stampSays() (e event, says bool) {
	says = k.stamp != 0 && k.stamp != k.answers
	k.answers = k.stamp
	return event{kind: lhStamp, id: uint64(k.stamp), link: k}, says
}

// stampedBy binds the group.
func (g *group) stampedBy(k *link, stamp time.Duration) {
	first := k.stamp == 0
	g.promised, k.stamp = g.w.now+quorum.BondTime, stamp
	if first {
		k.up(event{kind: lhBeat, link: k})
	}
}

// mayLeave reports whether the group may ask another lighthouse than the one that served last.
func (g *group) mayLeave() bool { return g.w.now >= g.promised }

// letGo ends a promise: the lighthouse said so, or its process has ended.
func (g *group) letGo() { g.promised = 0 }

// operatorEvery is how often an operator looks at a lighthouse.
const operatorEvery = time.Second

// operator waives groups whose votes are missing, as one does that knows: all that are missing have ended, and no group that
// lives knows of a quorum that the latest one here does not come after (one of a branch that an operator let go on before may have a
// smaller id), no other lighthouse knows of a later one, and all members that live wait here. The other
// lighthouses are restarted before: one may have a vote of a group that ended while it was bound there, and a vote that is given
// at two is one for two histories.
func (l *lighthouse) operator() {
	w := l.w
	if w.Lighthouses == 1 || w.now-l.looked < operatorEvery {
		return
	}
	l.looked = w.now
	for i := range w.lhs {
		if o := &w.lhs[i]; o.up && (o.check.latest > l.check.latest || i < l.index && o.check.latest == l.check.latest) {
			return
		}
	}
	for i := range w.slots {
		g := w.slots[i].g
		if g == nil {
			continue
		}
		if v := l.check.of(g); !w.check.comesAfter(l.check.latest, g.known()) || v.previous && v.waits == 0 {
			return
		}
	}
	var ended []string
	for _, id := range l.describe().MissingVotes {
		g := w.byID[id]
		if g == nil || !g.killed { // it lives, and may go on elsewhere with the votes of others
			return
		}
		ended = append(ended, id)
	}
	if len(ended) > 0 {
		for i := range w.lhs { // of those that have ended another one may have a vote: it is on no disk
			if o := &w.lhs[i]; o != l && o.up && o.check.latest != 0 {
				o.crash(false, w.Keepalive)
				w.changed = w.now
			}
		}
		w.say("an operator waives %v at %s", ended, l.name())
		w.check.waived = true
		l.step(quorum.VotesWaived{ReplicaIDs: ended, By: "an operator"})
	}
}
