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
	moved  time.Duration // when the network or a lighthouse changed last
	paused time.Duration // when a lighthouse was paused last
	held   time.Duration // until when it holds its messages back
	latest time.Time     // when the latest quorum was formed
	calmed bool          // all groups have trained together since moved
	failed *life         // the only group that has failed since the job was calm; nil if there is none, or if there was another change
	known  time.Duration // the latest time at which the others learn of this failure

	failover time.Duration // the latest time of the first quorum after the failure of the job's lighthouse; 0: there is no bound

	ends      time.Duration // when a group failed last while the job was calm
	delivered []int64       // quorums that groups have received, in that order
	abandoned []int64       // those of them that an operator abandoned by a waiver
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
	voted     bool  // its end counts as its vote at the lighthouse that serves the job
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
	// A lighthouse may continue after a quorum whose members have all ended, which no live group can report to the judge. So a
	// quorum without live members does not count as a branch.
	w.check = checker{w: w, quorums: map[int64]*formed{}, waived: true}
	for i := range w.links {
		w.links[i] = make([]int, s.Slots)
	}
	for i := range w.lhs {
		w.lhs[i].w, w.lhs[i].index = w, i
	}
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

// change records a change of the network or of a lighthouse. Bit i of at is set if the change is at lighthouse i; 0 means that the
// change may affect all of the job. A change only at lighthouses that do not serve the job must not affect it, so the job stays calm.
func (j *Judge) change(at uint8) {
	j.w.changed = j.w.now
	if at != 0 && at>>j.place(j.w.result.LastID)&1 == 0 {
		return
	}
	j.moved = j.w.now
	j.unsettle()
	for _, l := range j.lives {
		l.voted = false // a restarted lighthouse does not have the votes of ended members
	}
}

// unsettle records that the job is not calm until all groups have trained together again.
func (j *Judge) unsettle() {
	j.calmed, j.failed, j.failover = false, nil, 0
	for _, l := range j.lives {
		l.steps = 0
	}
}

// place returns which lighthouse of the list formed the quorum with this id, as an index.
func (j *Judge) place(id int64) int { return int(id >> termBits % int64(max(j.w.Lighthouses, 1))) }

// Lighthouse reports that a lighthouse of the list goes up or down.
func (j *Judge) Lighthouse(i int, up bool) {
	calm := j.calmed
	j.change(1 << i)
	j.w.lhs[i].up = up
	if calm && !j.calmed && !up {
		j.failover = j.w.now + failoverTime
	}
}

// Begins reports that a fault begins. The ends of groups and lighthouses are reported by Fails and Lighthouse.
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
	j.change(f.at())
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
		j.change(f.at())
		j.w.endFault(f)
	}
}

// at returns the lighthouses that a fault affects, as bits, if the fault ends lighthouses or cuts groups off from them only. It
// returns 0 if these are all lighthouses, and for all other faults.
func (f *Fault) at() uint8 {
	if k := f.Kind; k == KillLighthouse || k == VanishLighthouse || k == CutLighthouse || k == CutUp || k == CutDown {
		return f.Of
	}
	return 0
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
	if calm && j.together() == "" { // all groups are bound to their lighthouse, so the end of the group is its vote (go/quorum/bond.go)
		j.ends = j.w.now
	}
	l.killed, l.ended = true, j.w.now
	l.voted = !silent && j.ends == j.w.now
	j.unsettle()
	if calm && j.w.Lighthouses == 1 {
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

// Lives reports whether a group is alive.
func (j *Judge) Lives(id string) bool {
	l := j.life(id)
	return l != nil && !l.killed
}

// Known returns the latest quorum that a live group knows.
func (j *Judge) Known() (id int64) {
	for _, l := range j.lives {
		if !l.killed {
			id = max(id, l.lastID)
		}
	}
	return id
}

// Waives reports that an operator waives votes of groups at a lighthouse, so that the job continues there after the given quorum.
// Later quorums, which no live group knows, are abandoned.
func (j *Judge) Waives(ids []string, lighthouse int, quorumID int64) {
	j.w.logf("an operator waives %v at lighthouse %d, after quorum %d", ids, lighthouse, quorumID)
	for _, id := range ids {
		if l := j.life(id); l.voted {
			j.w.broken(ruleOperator, "an operator waives the vote of %s at lighthouse %d, although the end of its process %s before, while the job was calm, counts as its vote",
				id, lighthouse, j.w.now-l.ended)
		}
	}
	for _, id := range j.delivered {
		if id > quorumID {
			j.abandoned = append(j.abandoned, id)
		}
	}
}

// Abandoned reports whether a quorum was abandoned by a waiver. A lighthouse that was down at that time may still have it, with a
// higher id than the quorums of the continuing branch.
func (j *Judge) Abandoned(id int64) bool { return slices.Contains(j.abandoned, id) }

// Connected reports whether two groups can reach each other.
func (j *Judge) Connected(a, b string) bool { return j.w.connected(j.life(a).slot, j.life(b).slot) }

// Asks reports a request of a group to a lighthouse.
func (j *Judge) Asks(id string, m quorum.Member) { j.life(id).asked = m }

// Learned reports that a group receives a quorum.
func (j *Judge) Learned(id string, q *quorum.Quorum) {
	w, l := j.w, j.life(id)
	if !slices.ContainsFunc(q.Members, func(m quorum.Member) bool { return m.ReplicaID == id }) {
		w.broken(ruleMembers, "%s receives quorum %d, and is not in it", id, q.ID)
		return
	}
	if isNew := q.Created.After(j.latest); isNew || w.check.quorums[q.ID] == nil {
		if isNew { // its id may be below those of an abandoned branch
			j.move(j.place(w.result.LastID), j.place(q.ID))
			j.latest, w.result.LastID = q.Created, q.ID
		}
		w.result.Rounds++
		if w.check.quorums[q.ID] == nil {
			j.delivered = append(j.delivered, q.ID)
		}
		if w.trace != nil {
			w.logf("quorum %d: %s", q.ID, describe(q))
		}
		j.formed(q)
	}
	j.soon(l, q)
	j.failover = 0
	l.quorum, l.learned = q, w.now
	l.attempt++
	w.check.learned(l.group, q)
}

// failbackTime bounds the time from a cut until no lighthouse sends members across it: the member has to notice it in two probes.
const failbackTime = 4 * time.Second

// move handles a new quorum, formed by another lighthouse than the one before or by the same one. If some group was cut off from the
// other lighthouse just when the members failed back to it, the job is not calm.
func (j *Judge) move(from, to int) {
	if from == to || j.w.now-j.w.changed > failbackTime {
		return
	}
	for i := range j.w.slots {
		if j.w.slots[i].g != nil && !j.w.reached(i, to) {
			j.unsettle()
		}
	}
}

// Evicted reports that a group is notified that it counts as failed in a quorum.
func (j *Judge) Evicted(id string, quorumID int64) {
	l := j.life(id)
	l.evicted, l.evictedAt = max(l.evicted, quorumID), j.w.now
	j.w.logf("%s is notified that it counts as failed in quorum %d", id, quorumID)
}
