package sim

import (
	"slices"
	"strings"
	"time"

	"github.com/torchft/torchft/go/quorum"
)

// view is what a lighthouse has heard of a group, counted in the obvious way.
type view struct {
	number     uint64 // of its newest request
	listed     bool
	lastBeat   time.Duration
	beaten     bool
	presumed   bool // it was in the quorum before the start, and said nothing since
	suspect    bool // its last link has ended
	brokeAt    time.Duration
	waits      int           // requests that wait
	joined     time.Duration // since when it is a candidate
	previous   bool          // member of the latest quorum
	missed     int           // quorums that should have had it and had not
	shrinks    bool          // its newest request asks shrink_only
	asksStep   int64         // the step of its newest request
	knows      int64         // and the quorum that it knows
	recallable bool          // it can be asked for that
	expected   bool

	out      bool             // it counts as failed until it asks again
	ended    bool             // its host said that its process has ended
	ending   bool             // it said that its manager server ends
	finished bool             // and that its training has, on purpose
	draining bool             // somebody wants it to leave
	buried   bool             // it left, and its link has ended
	missing  bool             // a rank of it has failed, it said
	words    int              // that came from it
	reported bool             // that it lost a collective of the latest quorum
	suspects string           // whom it suspects of that, empty if it does not know
	silent   bool             // it did not answer when the lighthouse checked on it, in the latest quorum
	tooOld   time.Duration    // when something was last said of it after its signs of life had become so
	says     *quorum.Progress // since the latest quorum
	recalled int              // how often the lighthouse asked for what it knows
}

// watch looks at what goes into a lighthouse's machine and at what comes out, and knows nothing else of it.
type watch struct {
	l     *lighthouse
	clock time.Duration // of the machine: never decreases
	known []*group      // that the lighthouse may remember, ordered by replica_id

	latest   int64         // id of its latest quorum
	reached  int64         // largest step of that
	stepWas  int64         // the same of the quorum before
	behind   time.Duration // since when a quorum is due that would go on below it, 0 if none is
	looking  time.Duration // since when a member knows a later quorum, 0 if none does
	began    time.Duration // when it was formed, or heard of
	away     bool          // all were sent to another lighthouse
	lastTime time.Duration // of its last quorum, on the clock of the world
	unasked  view          // of the group that asked last, and behind, as they were before
	unbehind time.Duration
}

func (c *watch) of(g *group) *view { return &g.views[c.l.index] }

func (c *watch) begins() {
	for _, g := range c.known {
		number := c.of(g).number
		*c.of(g) = view{number: number}
	}
	c.known = c.known[:0]
	c.clock, c.latest, c.reached, c.behind, c.looking, c.away = c.l.clock(), 0, 0, 0, 0, false
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
	v.words++
	v.beaten, v.lastBeat, v.presumed, v.suspect = true, c.clock, false, false
	c.list(g)
	if !was && v.waits > 0 {
		v.joined = c.clock
	}
}

func (c *watch) asked(g *group, step int64) {
	c.beat(g)
	if step >= c.reached {
		c.behind = 0 // whom the others wait for is there
	}
	if v := c.of(g); true {
		v.out, v.ending, v.finished, v.ended, v.missing = false, false, false, false, false
		if v.waits++; v.waits == 1 {
			v.joined = c.clock
		}
	}
}

// before notes what is known of a group before it asks.
func (c *watch) before(g *group) {
	c.move()
	c.expire(g)
	c.unasked, c.unbehind = *c.of(g), c.behind
}

// keptOut: the request was refused. It never counted, and its member does not until another one is taken.
func (c *watch) keptOut(g *group) {
	v := c.of(g)
	c.unasked.listed = v.listed
	*v, c.behind = c.unasked, c.unbehind
	v.out = v.out || c.healthy(g) && v.waits == 0 && !v.previous
}

// unshown: the request was refused of a group that does not show the quorum that it knows, as it says. If it never counted
// (atOnce), its member is what it was. Nobody waits for it.
func (c *watch) unshown(g *group, atOnce bool) {
	if v := c.of(g); atOnce {
		c.unasked.listed = v.listed
		*v, c.behind = c.unasked, c.unbehind
	}
	v := c.of(g)
	if v.recalled < leastRecalls {
		c.l.w.broken(ruleCause, "%s is refused for what it does not show, and was asked for it %d times", g.id, v.recalled)
	}
	if c.healthy(g) && v.waits == 0 {
		v.out, v.suspect = true, false
	}
}

// leastRecalls is how often a group is asked for what it knows before that counts no more.
const leastRecalls = 3

// recalls: the lighthouse asks a group for the quorum that it knows.
func (c *watch) recalls(g *group) { c.of(g).recalled++ }

// newest reports whether a request is newer than all that the lighthouse has of this group, and notes it.
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

func (c *watch) ended(g *group) {
	c.move()
	if v := c.of(g); v.beaten && !c.beating(g) {
		v.tooOld = c.clock
	}
	if v := c.of(g); v.waits == 0 && (!c.healthy(g) || v.presumed || v.suspect) {
		v.ended = true
		v.beaten = v.beaten && v.out
	}
}

// failsBack: all are sent to another lighthouse.
func (c *watch) failsBack() {
	c.away = true
	for _, g := range c.known {
		if v := c.of(g); c.beating(g) {
			v.beaten, v.out = false, false
		}
	}
}

// cameBack: a member of the latest quorum is here again. The others have the time to come, too.
func (c *watch) cameBack(known int64) {
	if !c.away || known == 0 || known != c.latest {
		return
	}
	c.away = false
	for _, g := range c.known {
		if v := c.of(g); v.previous && !c.healthy(g) {
			if v.beaten && !c.beating(g) {
				v.tooOld = c.clock
			}
			v.beaten, v.lastBeat, v.presumed, v.suspect = true, c.clock, true, false
		}
	}
}

// recalled: the lighthouse learns of a quorum, and goes on after it if it is a later one.
func (c *watch) recalled(p quorum.Past) {
	c.move()
	if p.ID <= c.latest {
		return
	}
	for _, g := range c.known {
		c.of(g).previous = false
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
	c.latest, c.reached, c.began, c.away = p.ID, p.Step, c.clock, false
	c.newQuorum()
}

// tally is who is healthy, who is a candidate, and whether there has to be a quorum.
type tally struct {
	healthy, candidates, eligible, presumed int
	shrink, fast                            bool
	waited                                  time.Duration // since the first candidate joined
	joining                                 time.Duration // the same of those who were in the quorum before, if there are any
	known                                   int64         // latest quorum that a candidate knows of and can show
}

func (c *watch) tally() tally {
	t := tally{fast: true}
	previous, former := 0, false
	for i := range c.l.waiting {
		q := &c.l.waiting[i]
		v := c.of(q.g) // the newest is the last
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

// due reports that there has to be a quorum: docs/design.md, the lighthouse's machine.
func (c *watch) due(t tally) bool {
	p := c.l.w.Policy
	return t.candidates > 0 && (t.fast || t.eligible >= p.MinReplicas && 2*t.candidates > t.healthy &&
		(t.candidates == t.healthy || t.joining >= p.JoinTimeout && t.presumed == 0))
}

// mayWait reports that a quorum that is due may wait for a while: for what a member knows, or, where it would go on below
// the step that the job had reached, for somebody who lives and was there.
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

// lasts reports that something is so, and has not been for too long.
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

// delivered checks a quorum before anybody hears of it.
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
	if w.Lighthouses > 1 {
		c.ofThisTerm(q)
	}
	c.stepWas, c.reached, c.behind, c.looking = c.reached, 0, 0, 0
	for i := range q.Members {
		c.reached = max(c.reached, q.Members[i].Step)
	}
	c.sameMembers(q)
	c.sameWaiters(d)
	w.check.ids(c, d)
	c.latest, c.began = q.ID, c.clock
	c.newQuorum()

	for _, g := range c.known {
		v := c.of(g)
		if v.previous = v.expected; v.expected {
			v.waits, v.missed = 0, 0
		} else if c.candidate(g) {
			v.joined = c.clock // it waits on, for the next
		}
	}
	c.lastTime = w.now
}

// ofThisTerm: where there is a list, each member of a quorum has shown what it knows, and has been let go since by no term that began.
func (c *watch) ofThisTerm(q *quorum.Quorum) {
	w := c.l.w
	for i := range c.l.waiting {
		p := &c.l.waiting[i]
		switch v := c.of(p.g); {
		case !v.expected || p.link == nil:
		case p.link.stale:
			w.broken(ruleTerm, "%s is in quorum %d with a request of before", p.g.id, q.ID)
		case v.knows > c.latest:
			w.broken(ruleKnown, "%s is in quorum %d, which comes after quorum %d, and knows of quorum %d", p.g.id, q.ID, c.latest, v.knows)
		}
	}
}

// notBehind: a quorum below the step that the job had reached has waited for those who were there.
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
	if c.behind > 0 { // by a tick, a tick late at most
		waited = max(waited, c.clock-c.behind+c.l.w.QuorumTick)
	}
	if step < c.reached && lives != "" && waited < c.l.w.Policy.HeartbeatTimeout {
		c.l.w.broken(ruleBehind, "quorum %d goes on at step %d, %s of the one before, which was at step %d, is alive", q.ID, step, lives, c.reached)
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
			w.broken(ruleMembers, "%s is in quorum %d and does not wait (a ghost)", g.id, q.ID)
		case v.expected:
			if v.missed++; v.missed >= 2 {
				w.broken(ruleNewcomer, "%s waits, and quorum %d is the second without it", g.id, q.ID)
			}
			v.expected = false
		}
	}
	if i < len(q.Members) {
		w.broken(ruleMembers, "quorum %d has %s, which nobody knows, or is not in order", q.ID, q.Members[i].ReplicaID)
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

// ticked checks that no quorum is late, that the lighthouse forgets, and that the job goes on.
func (c *watch) ticked() {
	w := c.l.w
	c.move()
	switch t := c.tally(); {
	case !c.due(t):
		if c.looking = 0; t.candidates == 0 { // else who comes and goes does not begin the wait for those ahead again
			c.behind = 0
		}
	case !c.mayWait(t) && w.Lighthouses == 1: // else others may serve the job: progress looks at what must be
		w.broken(ruleForms, "%d of %d healthy wait, for %s, and there is no quorum", t.candidates, t.healthy, t.waited)
	}
	c.known = slices.DeleteFunc(c.known, func(g *group) bool {
		v := c.of(g)
		left := !c.beating(g) && v.waits == 0 && !v.previous
		if left { // also what would be a sign of life to a lighthouse whose clock was set back
			*v = view{number: v.number}
		}
		return left
	})
	if !w.mistake.anySize {
		c.memory()
	}
	w.check.progress(c)
}

// memory compares how much the lighthouse remembers.
func (c *watch) memory() {
	w := c.l.w
	replicas, waiters := c.l.machine.Remembers()
	if replicas != len(c.known) {
		w.broken(ruleMemory, "the lighthouse remembers %d replicas, %d are alive, wait or are in the latest quorum", replicas, len(c.known))
	}
	if waiters != len(c.l.waiting) {
		w.broken(ruleWaiters, "the lighthouse remembers %d waiters, %d wait", waiters, len(c.l.waiting))
	}
}
