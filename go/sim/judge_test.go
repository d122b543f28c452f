package sim

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// judge checks the rules in a history. The runner reports to it the faults, the actions of members and ranks,
// and the messages that they receive, in the order in which they happen; the judge has no other information.
// Calls of its methods do not overlap.
type judge struct {
	setup
	log    func(at time.Duration, line string)
	now    time.Duration
	result result

	places  []place
	cuts    [][]int // cuts[i][k]: number of cuts between slot i as the sender and slot k
	lives   []*life
	byID    map[string]*life
	planes  map[planeKey]*plane
	quorums map[int64][]string // the members of each

	up      bool          // the lighthouse runs
	over    bool          // the history is over: the groups end, one after the other
	rough   int           // number of current faults that suspend the rules with a time limit (fault.rough)
	unclear int           // number of current faults with fault.unclear
	blurred time.Duration // when the last fault with fault.unclear ended

	restarted time.Duration // when the lighthouse started or ended last
	excused   time.Duration // when a request kept newcomers out last, or a claim was examined
	mayLose   int           // steps that the faults so far may cost each rank
	changed   time.Duration // when a fault began or ended last
	moved     time.Duration // when the network or the lighthouse changed last
	paused    time.Duration // when the lighthouse was paused last
	held      time.Duration // until when it holds its messages back

	start    time.Time     // of the history
	created  []time.Time   // when the lighthouse formed each quorum
	latest   time.Time     // when it formed the latest one
	last     []string      // its members
	before   []string      // those of the previous one
	reached  int64         // largest step of its members
	stood    int64         // the last step of the latest quorum, while it stands
	deserted time.Duration // when there was no live group last
	lastTime time.Duration

	calmed bool // all groups have trained together since the last change
	// the only group that has failed since the job was calm; nil if there is none, or if there was another
	// change
	failed *life
	known  time.Duration // the latest time at which the others learn of this failure

	doubts []doubt
}

// result is the result of a history.
type result struct {
	broken      *violation // the first rule that did not hold, nil if all did
	rounds      int        // quorums
	commits     int        // of ranks
	heals       int        // of ranks
	replays     int        // of ranks
	lost        int        // of ranks: attempts at a step that were not committed
	notReplayed int        // of ranks: steps that could have been replayed, and were not
	joins       int        // groups that started during a replay of others
	failures    [killed + 1]int
	faults      int
	lastID      int64
}

// violation is a rule that did not hold.
type violation struct {
	rule, detail string
	at           time.Duration
}

func (v *violation) String() string { return fmt.Sprintf("%s: %s (%s)", v.rule, v.detail, v.at) }

// place is a slot, where one group runs at a time.
type place struct {
	l       *life // nil while no group runs here
	lives   int   // groups that have started here
	cutUp   int   // number of current cuts, towards the lighthouse
	cutDown int   // the same from the lighthouse
}

// life is one incarnation of a group.
type life struct {
	slot       int
	id         string
	ranks      []*model
	began      time.Duration
	ended      time.Duration
	lastCommit time.Duration
	killed     bool

	asked          quorum.Member // its latest request
	askedAt        time.Duration
	asks           int           // number of requests
	pending        bool          // its latest request has no answer yet
	unansweredFrom time.Duration // since when it is in a quorum that it has not received; 0: it is in none
	missed         int           // quorums without it while its request was pending

	quorum  *quorum.Quorum // that it received last
	learned time.Duration
	attempt int           // quorums that it received
	maxStep int64         // largest step in its quorum
	behind  bool          // it has to heal in its quorum
	out     int           // number of requests when it was reported as failed last, -1 before
	erred   time.Duration // when it lost a step, or a call of a rank failed last

	in       int64 // the quorum in which rank 0 committed last, 0 if none
	steps    int   // how many steps it has committed there since the last change
	wanted   bool  // it was asked to leave
	wantedAt time.Duration
	hinted   bool // a signal was reported, which may be lost before a request repeats it
	told     struct {
		attempt int
		last    bool
	} // whether a rank learned that the quorum of an attempt is the last of the group
	leaving   bool
	finished  bool // its training is complete
	announced bool // the lighthouse was told so
	claimed   bool // it has claimed a quorum
}

func newJudge(s setup, log func(time.Duration, string)) *judge {
	j := &judge{
		setup: s, log: log, places: make([]place, s.slots), byID: map[string]*life{},
		planes:  map[planeKey]*plane{},
		quorums: map[int64][]string{},
	}
	for range s.slots {
		j.cuts = append(j.cuts, make([]int, s.slots))
	}
	return j
}

func (j *judge) logf(format string, args ...any) { j.log(j.now, fmt.Sprintf(format, args...)) }

func (j *judge) broken(rule, format string, args ...any) {
	if j.result.broken == nil {
		j.result.broken = &violation{rule, fmt.Sprintf(format, args...), j.now}
		j.logf("BROKEN: %s: %s", rule, j.result.broken.detail)
	}
}

// waits reports that a wait did not end by its deadline.
func (j *judge) waits(format string, args ...any) { j.broken(ruleWaiters, format, args...) }

// change records a change of the network or of the lighthouse.
func (j *judge) change() {
	j.changed, j.moved = max(j.changed, j.now), j.now
	j.unsettle()
}

// unsettle records that the job is not calm until all groups have trained together again.
func (j *judge) unsettle() {
	j.calmed, j.failed = false, nil
	for _, l := range j.lives {
		l.steps = 0
	}
}

// lighthouse reports that the lighthouse goes up or down.
func (j *judge) lighthouse(up bool) {
	j.change()
	j.up, j.restarted = up, j.now
	j.logf("the lighthouse is up: %t", up)
}

// begins reports that a fault begins. The ends of groups and of the lighthouse are reported by fails and
// lighthouse.
func (j *judge) begins(f *fault) {
	j.result.faults++
	j.mayLose += f.cost(&j.setup)
	j.logf("FAULT %s", *f)
	j.count(f, 1)
	j.changed = max(j.changed, j.now)
	switch f.kind {
	case crash, vanish, leave, finish, killLighthouse, vanishLighthouse:
		return
	case rankFails:
		j.unsettle()
		return
	case shrinkOnly: // a group that is in no quorum asks so many times in vain
		j.changed = max(j.changed, j.now+time.Duration(f.n)*j.quorumTimeout)
	case pauseLighthouse:
		j.paused, j.held = j.now, max(j.held, j.now+f.lasts)
	}
	j.change()
	for i := range j.places {
		if l := j.places[i].l; l != nil && f.slots.has(i) {
			l.claimed = l.claimed || f.kind == claim
		}
	}
}

// ends reports that a fault ends.
func (j *judge) ends(f *fault) {
	j.changed = max(j.changed, j.now)
	if f.ofNetwork() || f.rough() {
		j.change()
	}
	j.count(f, -1)
}

// count counts the current faults.
func (j *judge) count(f *fault, by int) {
	if f.rough() && (f.kind != claim || !j.onlyClaims) {
		j.rough += by
	}
	if f.unclear() {
		j.unclear += by
		j.blurred = j.now
	}
	for i := range j.places {
		if !f.slots.has(i) {
			continue
		}
		switch f.kind {
		case partition, cutLighthouse, cutUp, cutDown:
			if f.kind != cutDown {
				j.places[i].cutUp += by
			}
			if f.kind != cutUp {
				j.places[i].cutDown += by
			}
		}
		for k := range j.places {
			if f.slots.has(k) || f.kind != partition && f.kind != cutPeers && f.kind != cutPeersOneWay {
				continue
			}
			j.cuts[i][k] += by
			if f.kind != cutPeersOneWay {
				j.cuts[k][i] += by
			}
		}
	}
}

// starts reports that a group starts in a slot, with the replica_id of the result.
func (j *judge) starts(slot int) *life {
	p := &j.places[slot]
	j.calmed = false
	p.lives++
	l := &life{slot: slot, id: fmt.Sprintf("%s:%d", machineOf(slot), p.lives), began: j.now,
		lastCommit: j.now, out: -1}
	for i := range j.ranks {
		l.ranks = append(l.ranks, newModel(j, l, i))
	}
	p.l, j.byID[l.id] = l, l
	j.lives = append(j.lives, l)
	j.logf("%s starts", l.id)
	if slices.ContainsFunc(j.places, func(o place) bool { return o.l != nil && o.l.ranks[0].again }) {
		j.result.joins++
	}
	return l
}

// fails reports that a group has failed, and whether its host has vanished with it.
func (j *judge) fails(l *life, why string, silent bool) {
	if l.killed {
		return
	}
	calm := j.calmed
	l.announced = l.finished && j.clear() && j.attached(l.slot)
	l.killed, l.ended = true, j.now
	j.unsettle()
	if calm && j.upstream == 0 && slices.Contains(j.last, l.id) {
		// a group of upstream has no stream, whose end would show its failure
		j.failed, j.known = l, j.now+j.policy.SuspectGrace
		if silent {
			j.known = j.now + j.policy.HeartbeatTimeout
		}
	}
	j.places[l.slot].l = nil
	j.logf("%s ends: %s", l.id, why)
}

// meet reports whether messages of two slots reach each other; connected reports the same of two groups.
func (j *judge) meet(i, k int) bool { return j.cuts[i][k] == 0 && j.cuts[k][i] == 0 }

func (j *judge) connected(a, b string) bool { return j.meet(j.byID[a].slot, j.byID[b].slot) }

// attached reports whether there is a group in a slot that can reach the lighthouse, and be reached by it.
func (j *judge) attached(i int) bool {
	p := &j.places[i]
	return p.l != nil && p.cutUp == 0 && p.cutDown == 0
}

// asks reports a request of a group to the lighthouse.
func (j *judge) asks(l *life, m quorum.Member) {
	l.asked, l.askedAt, l.pending, l.unansweredFrom = m, j.now, true, 0
	l.asks++
}

// unanswered reports that a request of a group to the lighthouse ended without a quorum.
func (j *judge) unanswered(l *life) { l.pending, l.unansweredFrom = false, 0 }

// learns reports that a group receives a quorum.
func (j *judge) learns(l *life, q *quorum.Quorum) {
	if !slices.ContainsFunc(q.Members, func(m quorum.Member) bool { return m.ReplicaID == l.id }) {
		j.broken(ruleMembers, "%s receives quorum %d, and is not in it", l.id, q.ID)
		return
	}
	if q.Created.After(j.latest) {
		j.created = append(j.created, q.Created)
		j.latest, j.result.lastID = q.Created, q.ID
		j.result.rounds++
		j.stood = 0
		j.logf("quorum %d: %s", q.ID, describe(q))
		j.formed(q)
	}
	j.soon(l, q)
	if l.quorum != nil && q.ID < l.quorum.ID {
		j.broken(ruleIDs, "%s receives quorum %d after quorum %d", l.id, q.ID, l.quorum.ID)
	}
	l.quorum, l.learned, l.pending, l.unansweredFrom, l.missed = q, j.now, false, 0, 0
	l.attempt++
	l.maxStep, l.behind = behind(l.id, q)
}

// trainsOn records that a group begins a later step of a quorum that stands.
func (j *judge) trainsOn(l *life, a *torchftpb.ManagerQuorumResponse) {
	q := l.quorum
	if !q.Stands || q.ID != a.GetQuorumId() || a.GetMaxStep() <= l.maxStep {
		return
	}
	l.quorum = q.At(quorum.State{Step: a.MaxStep, CommittedQuorumID: q.ID})
	l.attempt++
	l.maxStep, l.behind = behind(l.id, l.quorum)
	if q.ID == j.result.lastID && a.GetMaxStep() > j.stood {
		j.stood = a.GetMaxStep()
		j.result.rounds++
	}
}

// describe returns a quorum as text: each member, its step, and the quorum of its last commit.
func describe(q *quorum.Quorum) string {
	var texts []string
	for _, m := range q.Members {
		text := fmt.Sprintf("%s at step %d", m.ReplicaID, m.Step)
		if m.CommittedQuorumID > 0 {
			text += fmt.Sprintf(" of quorum %d", m.CommittedQuorumID)
		}
		if m.CommitFailures > 0 {
			text += fmt.Sprintf(" (%d failed)", m.CommitFailures)
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, ", ")
}

// noticed reports that a group receives the notice that a member, which may be this group, counts as failed.
func (j *judge) noticed(l *life, quorumID int64, replicaID, reason string) {
	o := j.byID[replicaID]
	j.logf("%s is told that %s counts as failed in quorum %d: %s", l.id, replicaID, quorumID, reason)
	if o == nil {
		j.broken(ruleCause, "%s is told that %s failed, which never started", l.id, replicaID)
		return
	}
	if o != l {
		j.hasCause(o, reason)
	} else {
		j.doubt(func() { // it may be told of a later quorum, for which it was too late
			if j.result.lastID == quorumID {
				j.hasCause(o, reason)
			}
		})
	}
	o.out = o.asks
}

// wants reports that a group was asked to leave, by its rank or by the lighthouse.
func (j *judge) wants(l *life) {
	if !l.wanted {
		l.wanted, l.wantedAt = true, j.now
		j.logf("%s is asked to leave", l.id)
	}
}
