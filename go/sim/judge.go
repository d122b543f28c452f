package sim

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/torchft/torchft/go/quorum"
)

// Judge checks the simulation's rules in histories of real servers (go/sim/servers). The runner of the servers reports to it the
// actions of members and ranks, and the messages that they receive, in the order in which they happen; the judge has no other
// information. The ranks are the simulation's model, but the runner starts their steps and ends their waits. Calls of the judge's
// methods must not overlap.
type Judge struct {
	w      *world
	lives  []*life
	moved  time.Duration // when the network or the lighthouse changed last
	paused time.Duration // when the lighthouse was paused last
	held   time.Duration // until when it holds its messages back
	latest time.Time     // when the latest quorum was formed
	calmed bool          // all groups have trained together since moved
	failed *life         // the only group that has failed since the job was calm; nil if there is none, or if there was another change
	known  time.Duration // the latest time at which the others learn of this failure
}

// life is the judge's record of one incarnation of a group, in addition to the checker's record.
type life struct {
	*group
	asked     quorum.Member // its latest request
	attempt   uint64        // quorums that it received
	learned   time.Duration // when it received the latest quorum
	ended     time.Duration
	evicted   int64 // the latest quorum in which it was notified that it counts as failed
	evictedAt time.Duration
	in        int64 // the quorum in which rank 0 committed last
	steps     int   // how many steps it has committed there since the last change
}

// DrawFaults draws a new schedule of faults, for settings that were changed after Draw.
func (s *Setup) DrawFaults(every int) {
	s.Faults = drawFaults(rand.New(rand.NewPCG(s.Seed, 4)), *s, every)
}

// NewJudge begins a history. The tracer, if it is not nil, receives lines that describe the history.
func NewJudge(s Setup, trace Tracer) *Judge {
	w := &world{
		Setup: s, trace: trace, slots: make([]slot, s.Slots), links: make([][]int, s.Slots),
		comms: map[commKey]*comm{}, byID: map[string]*group{},
	}
	w.check = checker{w: w, quorums: map[int64][]string{}}
	for i := range w.links {
		w.links[i] = make([]int, s.Slots)
	}
	w.lh.w = w
	return &Judge{w: w}
}

// At sets the time. It is called before the events of that time are reported.
func (j *Judge) At(now time.Duration) { j.w.now = max(j.w.now, now) }

// Result returns the result of the history so far.
func (j *Judge) Result() Result { return j.w.result }

// Logf adds a line to the history.
func (j *Judge) Logf(format string, args ...any) { j.w.logf(format, args...) }

// Break reports that a rule about waiting is broken: a wait did not end by its deadline.
func (j *Judge) Break(format string, args ...any) { j.w.broken(ruleWaiters, format, args...) }

// change records a change of the network or of the lighthouse.
func (j *Judge) change() {
	j.w.changed, j.moved = j.w.now, j.w.now
	j.unsettle()
}

// unsettle records that the job is not calm until all groups have trained together again.
func (j *Judge) unsettle() {
	j.calmed, j.failed = false, nil
	for _, l := range j.lives {
		l.steps = 0
	}
}

// Lighthouse reports that the lighthouse goes up or down.
func (j *Judge) Lighthouse(up bool) {
	j.change()
	j.w.lh.up = up
}

// Begins reports that a fault begins. The ends of groups and of the lighthouse are reported by Fails and Lighthouse.
func (j *Judge) Begins(f *Fault) {
	w := j.w
	w.result.FaultsHit++
	w.logf("FAULT %s", *f)
	switch f.Kind {
	case Crash, Vanish, Leave, Finish, KillLighthouse, VanishLighthouse: // reported by Fails and Lighthouse
		w.changed = w.now
		return
	case RankFails:
		w.changed = w.now
		j.unsettle()
		return
	}
	j.change()
	for i := range w.slots {
		if f.Slots.has(i) && f.Kind.ofNetwork() {
			w.strike(f, i)
		}
	}
	if f.Kind == PauseLighthouse {
		j.paused, j.held = w.now, max(j.held, w.now+f.For)
	}
	if f.rough(&w.Setup) {
		w.rough++
	}
}

// Ends reports that a fault ends.
func (j *Judge) Ends(f *Fault) {
	j.w.changed = j.w.now
	if f.Kind.ofNetwork() || f.rough(&j.w.Setup) {
		j.change()
		j.w.endFault(f)
	}
}

func (k FaultKind) ofNetwork() bool {
	return k == Partition || k == CutLighthouse || k == CutUp || k == CutDown || k == CutPeers || k == CutPeersOneWay || k == Slow
}

// Starts reports that a group starts in a slot, with this replica_id.
func (j *Judge) Starts(slot int) string {
	w, s := j.w, &j.w.slots[slot]
	j.calmed = false
	s.lives++
	g := &group{w: w, slot: slot, id: fmt.Sprintf("g%02d:%d", slot, s.lives), began: w.now, lastCommit: w.now}
	g.ranks = make([]rank, w.Ranks)
	for r := range g.ranks {
		g.ranks[r].init(g, r)
	}
	s.g = g
	w.byID[g.id] = g
	j.lives = append(j.lives, &life{group: g})
	w.logf("%s starts", g.id)
	return g.id
}

// Fails reports that a group has failed, and whether its host has vanished with it.
func (j *Judge) Fails(id, why string, silent bool) {
	l := j.life(id)
	if l.killed {
		return
	}
	calm := j.calmed
	l.killed, l.ended = true, j.w.now
	j.unsettle()
	if calm {
		j.failed, j.known = l, j.w.now+j.w.Policy.SuspectGrace
		if silent {
			j.known = j.w.now + j.w.Policy.HeartbeatTimeout
		}
	}
	j.w.slots[l.slot].g = nil
	j.w.logf("%s ends: %s", id, why)
}

func (j *Judge) life(id string) *life {
	for _, l := range j.lives {
		if l.id == id {
			return l
		}
	}
	return nil
}

// Connected reports whether two groups can reach each other.
func (j *Judge) Connected(a, b string) bool { return j.w.connected(j.life(a).slot, j.life(b).slot) }

// Asks reports a request of a group to the lighthouse.
func (j *Judge) Asks(id string, m quorum.Member) { j.life(id).asked = m }

// Learned reports that a group receives a quorum.
func (j *Judge) Learned(id string, q *quorum.Quorum) {
	w, l := j.w, j.life(id)
	if !slices.ContainsFunc(q.Members, func(m quorum.Member) bool { return m.ReplicaID == id }) {
		w.broken(ruleMembers, "%s receives quorum %d, and is not in it", id, q.ID)
		return
	}
	if q.Created.After(j.latest) {
		j.latest, w.result.LastID = q.Created, q.ID
		w.result.Rounds++
		if w.trace != nil {
			w.logf("quorum %d: %s", q.ID, describe(q))
		}
		j.formed(q)
	}
	j.soon(l, q)
	l.quorum, l.learned = q, w.now
	l.attempt++
	w.check.learned(l.group, q)
}

// Evicted reports that a group is notified that it counts as failed in a quorum.
func (j *Judge) Evicted(id string, quorumID int64) {
	l := j.life(id)
	l.evicted, l.evictedAt = max(l.evicted, quorumID), j.w.now
	j.w.logf("%s is notified that it counts as failed in quorum %d", id, quorumID)
}
