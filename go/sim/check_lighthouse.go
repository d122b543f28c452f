package sim

import (
	"slices"
	"strings"
	"time"

	"github.com/torchft/torchft/go/quorum"
)

// view is the checker's record of what the lighthouse knows of a group.
type view struct {
	number     uint64 // of its newest request
	listed     bool
	lastBeat   time.Duration
	beaten     bool
	presumed   bool // it counts as alive only because it was in the last quorum: it has sent nothing since
	suspect    bool // its last link has ended
	brokeAt    time.Duration
	waits      int           // pending requests
	joined     time.Duration // since when it is a candidate
	previous   bool          // member of the latest quorum
	missed     int           // quorums that should have included it, and did not
	shrinks    bool          // its newest request asks shrink_only
	asksStep   int64         // the step of its newest request
	knows      int64         // the quorum id that its newest request claims to know
	recallable bool          // it can be asked to show that quorum
	expected   bool

	out      bool             // it counts as failed until it asks again
	ending   bool             // it has reported that its manager server ends
	finished bool             // it has reported that its training is complete
	draining bool             // it was requested to leave
	buried   bool             // it has left, and its link has ended
	missing  bool             // it has reported that one of its ranks has failed
	messages int              // messages that it has sent
	reported bool             // it has reported that a collective of the latest quorum failed
	suspects string           // the peer that it suspects to have caused that failure, empty if it names none
	silent   bool             // a check of the lighthouse did not reach it, in the latest quorum
	tooOld   time.Duration    // time of the last event about it that came when its signs of life were already too old
	progress *quorum.Progress // its answer to AskProgress since the latest quorum
}

// watch checks the lighthouse's machine by its events and actions only.
type watch struct {
	l     *lighthouse
	clock time.Duration // of the machine: never decreases
	known []*group      // the groups that the lighthouse may remember, ordered by replica_id

	latest   int64         // id of its latest quorum
	reached  int64         // largest step of its members
	stepWas  int64         // the same of the previous quorum
	behind   time.Duration // since when a quorum below the step reached is due, 0 if none is
	looking  time.Duration // since when a member knows a later quorum, 0 if none does
	began    time.Duration // when the latest quorum was formed or learned
	lastTime time.Duration // of its last quorum, on the clock of the world
}

func (c *watch) of(g *group) *view { return &g.view }

func (c *watch) begins() {
	for _, g := range c.known {
		number := c.of(g).number
		*c.of(g) = view{number: number}
	}
	c.known = c.known[:0]
	c.clock, c.latest, c.reached, c.behind, c.looking = c.l.clock(), 0, 0, 0, 0
}

func (c *watch) healthy(g *group) bool { return c.beating(g) && !c.of(g).out }

func (c *watch) beating(g *group) bool {
	v, p := c.of(g), c.l.w.Policy
	return v.beaten && c.clock-v.lastBeat < p.HeartbeatTimeout && (!v.suspect || c.clock-v.brokeAt < p.SuspectGrace)
}

func (c *watch) candidate(g *group) bool { return c.of(g).waits > 0 && c.healthy(g) }

func (c *watch) move() { c.clock = max(c.clock, c.l.clock()) }

func (c *watch) list(g *group) {
	if v := c.of(g); !v.listed {
		v.listed = true
		at, _ := slices.BinarySearchFunc(c.known, g, func(a, b *group) int { return strings.Compare(a.id, b.id) })
		c.known = slices.Insert(c.known, at, g)
	}
}

func (c *watch) beat(g *group) {
	c.move()
	c.expire(g)
	v, was := c.of(g), c.candidate(g)
	if v.beaten && !c.beating(g) {
		v.tooOld = c.clock
	}
	v.messages++
	v.beaten, v.lastBeat, v.presumed, v.suspect = true, c.clock, false, false
	c.list(g)
	if !was && v.waits > 0 {
		v.joined = c.clock
	}
}

func (c *watch) asked(g *group, step int64) {
	c.beat(g)
	if step >= c.reached {
		c.behind = 0 // a member with the step that the job has reached is here
	}
	if v := c.of(g); true {
		v.out, v.ending, v.finished, v.missing = false, false, false, false
		if v.waits++; v.waits == 1 {
			v.joined = c.clock
		}
	}
}

// newest reports whether a request is newer than all earlier ones of this group, and records its number.
func (c *watch) newest(g *group, number uint64) bool {
	c.move()
	v := c.of(g)
	if v.listed && (c.healthy(g) || v.waits > 0 || v.previous) && number <= v.number {
		return false
	}
	v.number = number
	return true
}

func (c *watch) withdrew(g *group) {
	c.move()
	c.of(g).waits--
}

func (c *watch) broke(g *group) {
	c.move()
	v := c.of(g)
	if v.draining && v.out && c.beating(g) {
		v.beaten, v.buried = false, true
	}
	if c.healthy(g) && !v.suspect {
		v.suspect, v.brokeAt = true, c.clock
	}
}

// recalled records that the lighthouse learns of a quorum. If that quorum is later than the lighthouse's latest one, the lighthouse
// continues after it.
func (c *watch) recalled(p quorum.Past) {
	c.move()
	if p.ID <= c.latest {
		return
	}
	for _, g := range c.known { // a member of both quorums keeps previous, so that expire below does not drop its view
		in := slices.ContainsFunc(p.Members, func(v quorum.Voter) bool { return v.ReplicaID == g.id })
		c.of(g).previous = c.of(g).previous && in
	}
	for _, voter := range p.Members {
		g := c.l.w.byID[voter.ReplicaID]
		c.expire(g)
		v := c.of(g)
		v.previous, v.missed = true, 0
		if !c.healthy(g) {
			waits := v.waits > 0
			v.beaten, v.lastBeat, v.presumed, v.suspect = true, c.clock, true, false
			if waits {
				v.joined = c.clock
			}
		}
		c.list(g)
	}
	c.latest, c.reached, c.began = p.ID, p.Step, c.clock
	c.newQuorum()
}

// tally has the counts that determine whether a quorum has to be formed.
type tally struct {
	healthy, candidates, eligible, presumed int
	shrink, fast                            bool
	waited                                  time.Duration // since the first candidate joined
	joining                                 time.Duration // since the first candidate of the latest quorum joined; waited if there is none
	known                                   int64         // latest quorum that a candidate knows and can show
}

func (c *watch) tally() tally {
	t := tally{fast: true}
	previous, former := 0, false
	for i := range c.l.waiting {
		q := &c.l.waiting[i]
		v := c.of(q.g) // the newest request of a group is the last one in the loop
		v.shrinks, v.asksStep, v.knows, v.recallable = q.shrink, q.step, q.known, q.link != nil
	}
	for _, g := range c.known {
		v, candidate := c.of(g), false
		if c.healthy(g) {
			t.healthy++
			if v.presumed {
				t.presumed++
			}
			if candidate = v.waits > 0; candidate {
				t.candidates++
				t.waited = max(t.waited, c.clock-v.joined)
				if v.previous {
					former, t.joining = true, max(t.joining, c.clock-v.joined)
				}
				t.shrink = t.shrink || v.shrinks
				if v.recallable {
					t.known = max(t.known, v.knows)
				}
			}
		}
		if v.previous {
			previous++
			t.fast = t.fast && candidate
		}
		v.expected = candidate
	}
	if !former {
		t.joining = t.waited
	}
	t.fast = t.fast && previous > 0
	t.shrink = t.shrink && previous > 0
	for _, g := range c.known {
		v := c.of(g)
		v.expected = v.expected && (v.previous || !t.shrink)
		if v.expected {
			t.eligible++
		}
	}
	return t
}

// due reports whether a quorum has to be formed: docs/design.md, the lighthouse's machine.
func (c *watch) due(t tally) bool {
	p := c.l.w.Policy
	return t.candidates > 0 && (t.fast || t.eligible >= p.MinReplicas && 2*t.candidates > t.healthy &&
		(t.candidates == t.healthy || t.joining >= p.JoinTimeout && t.presumed == 0))
}

// mayWait reports whether a quorum that is due may still be delayed, for one of two reasons: a member that knows a later quorum may
// still show it; or the quorum would be below the step that the job had reached, and a live member with that step may still ask.
func (c *watch) mayWait(t tally) bool {
	timeout := c.l.w.Policy.HeartbeatTimeout + c.l.w.QuorumTick
	step, lives := int64(-1), false
	for _, g := range c.known {
		v := c.of(g)
		if v.expected {
			step = max(step, v.asksStep)
		}
		lives = lives || v.previous && c.healthy(g) && !c.candidate(g)
	}
	return c.lasts(&c.looking, t.known > c.latest, timeout) || c.lasts(&c.behind, !t.fast && step < c.reached && lives, timeout)
}

// lasts reports whether a condition holds, and has held for less than the longest delay.
func (c *watch) lasts(since *time.Duration, so bool, most time.Duration) bool {
	if !so {
		*since = 0
		return false
	}
	if *since == 0 {
		*since = c.clock
	}
	return c.clock-*since <= most
}

// delivered checks a quorum before it is sent to its members.
func (c *watch) delivered(d quorum.Deliver) {
	w, q := c.l.w, d.Quorum
	c.move()
	t := c.tally()
	switch p := w.Policy; {
	case t.fast:
	case 2*t.candidates <= t.healthy:
		w.broken(ruleMajority, "quorum %d has %d members, of %d healthy", q.ID, len(q.Members), t.healthy)
	case t.eligible < p.MinReplicas:
		w.broken(ruleMajority, "quorum %d has %d members, min_replicas is %d", q.ID, len(q.Members), p.MinReplicas)
	case t.candidates < t.healthy && (t.joining < p.JoinTimeout || t.presumed > 0):
		w.broken(ruleMajority, "quorum %d does not wait for the healthy that have not asked", q.ID)
	}
	if !t.fast {
		c.notBehind(q, t)
	}
	c.stepWas, c.reached, c.behind, c.looking = c.reached, 0, 0, 0
	for i := range q.Members {
		c.reached = max(c.reached, q.Members[i].Step)
	}
	c.sameMembers(q)
	c.sameWaiters(d)
	w.check.ids(q)
	c.latest, c.began = q.ID, c.clock
	c.newQuorum()

	for _, g := range c.known {
		v := c.of(g)
		if v.previous = v.expected; v.expected {
			v.waits, v.missed = 0, 0
		} else if c.candidate(g) {
			v.joined = c.clock // its request stays pending, for the next quorum
		}
	}
	c.lastTime = w.now
}

// notBehind checks that a quorum below the step that the job had reached was delayed for members with that step.
func (c *watch) notBehind(q *quorum.Quorum, t tally) {
	step, lives := int64(-1), ""
	for i := range q.Members {
		step = max(step, q.Members[i].Step)
	}
	for _, g := range c.known {
		if c.of(g).previous && c.healthy(g) && !c.candidate(g) {
			lives = g.id
		}
	}
	waited := t.waited
	if c.behind > 0 { // a tick ends the delay, at most one tick late
		waited = max(waited, c.clock-c.behind+c.l.w.QuorumTick)
	}
	if step < c.reached && lives != "" && waited < c.l.w.Policy.HeartbeatTimeout {
		c.l.w.broken(ruleBehind, "quorum %d continues at step %d, %s of the one before, which was at step %d, is alive", q.ID, step, lives, c.reached)
	}
}

func (c *watch) sameMembers(q *quorum.Quorum) {
	w, i := c.l.w, 0
	for _, g := range c.known {
		v := c.of(g)
		switch in := i < len(q.Members) && q.Members[i].ReplicaID == g.id; {
		case in && v.expected:
			i++
		case in:
			i++
			w.broken(ruleMembers, "%s is in quorum %d and has no pending request", g.id, q.ID)
		case v.expected:
			if v.missed++; v.missed >= 2 {
				w.broken(ruleNewcomer, "%s waits, and quorum %d is the second without it", g.id, q.ID)
			}
			v.expected = false
		}
	}
	if i < len(q.Members) {
		w.broken(ruleMembers, "quorum %d has %s, which never started, or is not in order", q.ID, q.Members[i].ReplicaID)
	}
}

func (c *watch) sameWaiters(d quorum.Deliver) {
	w, n := c.l.w, 0
	for i := range c.l.waiting {
		q := &c.l.waiting[i]
		if !c.of(q.g).expected {
			continue
		}
		n++
		if !slices.Contains(d.Waiters, q.id) {
			w.broken(ruleBroadcast, "%s is in quorum %d and gets no answer", q.g.id, d.Quorum.ID)
		}
	}
	if len(d.Waiters) != n {
		w.broken(ruleBroadcast, "quorum %d goes to %d waiters, %d wait", d.Quorum.ID, len(d.Waiters), n)
	}
}

// ticked checks that no quorum is late, that the lighthouse forgets ended groups, and that the job makes progress.
func (c *watch) ticked() {
	w := c.l.w
	c.move()
	switch t := c.tally(); {
	case !c.due(t):
		if c.looking = 0; t.candidates == 0 { // while there is a candidate, membership churn must not restart the delay
			c.behind = 0
		}
	case !c.mayWait(t):
		w.broken(ruleForms, "%d of %d healthy wait, for %s, and there is no quorum", t.candidates, t.healthy, t.waited)
	}
	c.known = slices.DeleteFunc(c.known, func(g *group) bool {
		v := c.of(g)
		left := !c.beating(g) && v.waits == 0 && !v.previous
		if left { // without this reset, its last sign of life would seem recent after a restart with a clock that was set back
			*v = view{number: v.number}
		}
		return left
	})
	if !w.mistake.anySize {
		c.memory()
	}
	w.check.progress(c)
}

// memory checks how many groups and requests the lighthouse remembers.
func (c *watch) memory() {
	w := c.l.w
	members, waiters := c.l.machine.Remembers()
	if members != len(c.known) {
		w.broken(ruleMemory, "the lighthouse remembers %d members, %d are alive, wait or are in the latest quorum", members, len(c.known))
	}
	if waiters != len(c.l.waiting) {
		w.broken(ruleWaiters, "the lighthouse remembers %d waiters, %d wait", waiters, len(c.l.waiting))
	}
}
