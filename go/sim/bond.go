package sim

import (
	"time"

	"github.com/torchft/torchft/go/quorum"
)

// With several lighthouses, the one that serves a group sends stamps, and the group answers them. Each stamp prolongs the group's
// bond: until the bond has run out, the group asks no other lighthouse (quorum/bond.go). A stamp is the time at which it was sent,
// on the lighthouse's clock.

// stamp sends the next stamp on a link, if it is due.
func (l *lighthouse) stamp(k *link) {
	if l.w.Lighthouses == 1 || l.w.now-k.stampedAt < quorum.BondTime/10 && k.stampedAt != 0 {
		return
	}
	k.stampedAt = l.w.now
	// A stamp counts only if it is later than the last release. In reality, some time passes between a release and the next stamp.
	// Here both may happen at the same time, so one nanosecond is added.
	k.down(event{kind: stamped, id: uint64(l.clock() + 1)})
}

// answered handles the answer to a stamp.
func (l *lighthouse) answered(k *link, stamp time.Duration) {
	l.step(quorum.Bound{ReplicaID: k.g.id, Since: epoch.Add(stamp)})
}

// takeStampAnswer returns the answer to the newest stamp on a link, to be sent with the group's next message on that link. It
// returns false if no stamp has arrived, or if the newest one was answered already.
func (k *link) takeStampAnswer() (e event, found bool) {
	found = k.stamp != 0 && k.stamp != k.answers
	k.answers = k.stamp
	return event{kind: lhStamp, id: uint64(k.stamp), link: k}, found
}

// stampedBy handles a stamp that arrives on a link: it binds the group to the lighthouse of that link.
func (g *group) stampedBy(k *link, stamp time.Duration) {
	first := k.stamp == 0
	g.promised, k.stamp = g.w.now+quorum.BondTime, stamp
	if first {
		k.up(event{kind: lhBeat, link: k})
	}
}

// mayLeave reports whether the bond allows the group to ask another lighthouse than the one that served last.
func (g *group) mayLeave() bool { return g.w.now >= g.promised }

// letGo ends the bond: the lighthouse has released the group, or the lighthouse's process has ended.
func (g *group) letGo() { g.promised = 0 }

// operatorEvery is the interval at which the operator checks a lighthouse.
const operatorEvery = time.Second

// operator waives the votes of missing groups, under the conditions that a careful operator would check:
//
//   - All missing groups have ended.
//   - No other running lighthouse knows a later quorum. If two know the same one, only the first of them waives votes.
//   - The quorum that each live group knows is the latest quorum here or one of its predecessors. A smaller id alone does not show
//     this: after an earlier waiver, the group's quorum may be on another branch.
//   - All live members of the latest quorum have a pending request here.
//
// The other lighthouses that know a quorum are restarted first: one of them may have the vote of a group that ended while bound
// there, and a vote must not count at two lighthouses.
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
		if g == nil || !g.killed { // the group is alive, and may continue elsewhere with the votes of others
			return
		}
		ended = append(ended, id)
	}
	if len(ended) > 0 {
		for i := range w.lhs { // another lighthouse may have the votes of ended groups, which a restart drops: they are on no disk
			if o := &w.lhs[i]; o != l && o.up && o.check.latest != 0 {
				o.crash(false, w.Keepalive)
				w.changed = w.now
			}
		}
		w.logf("an operator waives %v at %s", ended, l.name())
		w.check.waived = true
		l.step(quorum.VotesWaived{ReplicaIDs: ended, By: "an operator"})
	}
}
