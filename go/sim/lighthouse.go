package sim

import (
	"slices"
	"time"

	"github.com/torchft/torchft/go/quorum"
)

// answerMargin bounds how long before its caller's deadline a wait ends, as in package lighthouse.
const answerMargin = 50 * time.Millisecond

// lighthouse is the shell around its machine, like package lighthouse in production.
type lighthouse struct {
	w           *world
	machine     lighthouseMachine
	check       watch
	up          bool
	life        uint32
	skew        time.Duration // of its clock, after jumps
	pausedUntil time.Duration
	disk        *quorum.Recalled // the state on disk, nil if there is none
	keeping     *quorum.Recalled // the state that is being written to disk

	lastWaiter quorum.WaiterID
	refused    quorum.WaiterID // the last refused waiter
	waiting    []waiting
	links      []*link
	greeting   *link         // the link that greeted last
	stepped    time.Duration // when it handled the last event, on its clock
	timer      time.Duration // time of the next lhDeadline, 0 if there is none
}

// waiting is a request that has not been answered.
type waiting struct {
	id       quorum.WaiterID
	g        *group
	link     *link // nil for a call
	req      uint64
	deadline time.Duration // on the lighthouse's clock
	shrink   bool
	step     int64
	known    int64
}

// request is a quorum request that is on its way.
type request struct {
	member   quorum.Member
	known    int64
	deadline time.Duration
}

func (l *lighthouse) clock() time.Duration { return l.w.now + l.skew }

func (l *lighthouse) start() {
	w := l.w
	l.life++
	l.up, l.skew, l.pausedUntil = true, 0, 0
	l.waiting, l.links, l.timer, l.keeping = nil, nil, 0, nil
	l.stepped = l.clock()
	begin := epoch.Add(w.now)
	if w.mistake.start != nil {
		begin = w.mistake.start(begin)
	}
	policy := w.Policy
	if w.mistake.policy != nil {
		policy = w.mistake.policy(policy)
	}
	term := int64(0)
	if w.Cluster {
		term = int64(l.life)
	}
	machine := quorum.NewMachine(policy, begin, term)
	l.machine = machine
	if w.mistake.lighthouse != nil {
		l.machine = w.mistake.lighthouse(machine)
	}
	l.check.begins()
	w.logf("%s starts", "the lighthouse")
	if l.disk != nil {
		l.remember(*l.disk)
	}
	w.after(w.QuorumTick, event{kind: lhTick, life: l.life})
}

// crash ends the lighthouse, and breaks its connections. If its host vanishes, no connection breaks, and the groups have to notice
// the end by the silence.
func (l *lighthouse) crash(silent bool, down time.Duration) {
	w := l.w
	if !l.up {
		return
	}
	l.up = false
	w.logf("%s is killed", "the lighthouse")
	for i := range w.slots {
		g := w.slots[i].g
		if g == nil {
			continue
		}
		notice := w.delay(i)
		if silent || w.down(i) {
			notice = w.Keepalive
		}
		if k := g.link; k != nil {
			k.ended = true
			w.after(notice, event{kind: linkBroken, g: g, link: k})
		}
		if g.asking.active && w.calls(i) {
			w.after(notice, event{kind: refused, g: g, id: g.asking.req})
		}
	}
	w.after(down, event{kind: lhStart})
}

func (l *lighthouse) handle(e *event) {
	w := l.w
	l.slept()
	switch e.kind {
	case lhMessage:
		l.message(e)
	case lhChecked:
		l.checked(e.g, e.x.(*look))
	case lhDrain:
		d := quorum.Drained{ReplicaID: e.g.id, Reason: "an operator wants it"}
		l.check.message(e.g, d)
		l.step(d)
	case lhAsk:
		l.ask(e)
	case lhBeat:
		if e.link == nil || l.listens(e.link) {
			l.check.beat(e.g)
			l.step(quorum.Beat{ReplicaID: e.g.id})
		}
	case lhGreet:
		l.links = append(l.links, e.link)
		l.check.beat(e.g)
		l.check.of(e.g).finished = false
		l.greeting = e.link
		l.step(quorum.Greeted{ReplicaID: e.g.id, Term: e.link.term, KnownQuorumID: e.link.known})
	case lhKept:
		if kept := e.x.(*quorum.Recalled); kept == l.keeping { // otherwise a newer state is being written
			l.disk = kept
		}
	case lhDisconnected:
		l.linkEnded(e.link)
	case lhPast:
		l.remember(quorum.Recalled{Past: *e.x.(*quorum.Past), From: e.g.id})
	case lhWithdrawn:
		l.withdraw(func(q *waiting) bool { return q.g == e.g && q.req == e.id })
	case lhDeadline:
		l.timer = 0
		l.withdraw(func(q *waiting) bool { return q.deadline <= l.clock() })
		next := time.Duration(0)
		for i := range l.waiting {
			if at := l.waiting[i].deadline; next == 0 || at < next {
				next = at
			}
		}
		if next > 0 {
			l.arm(next)
		}
	case lhWake:
		l.check.move()
		l.step(quorum.Woken{})
	case lhTick:
		l.step(quorum.Tick{})
		l.check.ticked()
		w.after(w.QuorumTick, event{kind: lhTick, life: l.life})
	}
}

func (l *lighthouse) ask(e *event) {
	w, r := l.w, e.x.(*request)
	remaining := r.deadline - w.now
	remaining -= min(answerMargin, remaining/10)
	if remaining <= 0 {
		return
	}
	if k := e.link; k != nil {
		if !l.listens(k) {
			return // the group will notice that the link has ended
		}
		l.withdraw(func(q *waiting) bool { return q.link == k })
	}
	l.lastWaiter++
	id := l.lastWaiter
	asked := quorum.Asked{Waiter: id, Member: r.member, KnownQuorumID: r.known, Number: e.id, Recallable: e.link != nil}
	if w.Upstream.has(e.g.slot) {
		asked.Number, asked.KnownQuorumID, r.known = 0, 0, 0 // upstream requests do not have these fields
	} else if !l.check.newest(e.g, e.id) {
		l.refused = 0
		l.step(asked)
		if l.refused != id {
			w.broken(ruleStale, "%s sent request %d before others that are here, and it is taken", e.g.id, e.id)
		}
		return
	}
	deadline := l.clock() + remaining
	l.waiting = append(l.waiting, waiting{id, e.g, e.link, e.id, deadline, r.member.ShrinkOnly, r.member.Step, r.known})
	l.check.asked(e.g, r.member.Step)
	l.arm(deadline)
	l.step(asked)
}

// listens reports whether messages on a link are handled.
func (l *lighthouse) listens(k *link) bool { return slices.Contains(l.links, k) }

// linkEnded handles the end of a link.
func (l *lighthouse) linkEnded(k *link) {
	i := slices.Index(l.links, k)
	if i < 0 {
		return
	}
	l.links = slices.Delete(l.links, i, i+1)
	if !k.ended && !k.g.killed && !l.w.down(k.g.slot) {
		l.w.after(l.w.delay(k.g.slot), event{kind: linkBroken, g: k.g, link: k})
	}
	k.ended = true
	l.withdraw(func(q *waiting) bool { return q.link == k })
	if !slices.ContainsFunc(l.links, func(o *link) bool { return o.g == k.g }) {
		l.check.broke(k.g)
		l.step(quorum.Disconnected{ReplicaID: k.g.id})
	}
}

// remember passes the quorum that a member shows, or that is on disk, to the machine.
func (l *lighthouse) remember(r quorum.Recalled) {
	if l.w.trace != nil {
		l.w.logf("%s learns of quorum %d", "the lighthouse", r.Past.ID)
	}
	l.step(r)
}

// arm ensures that an lhDeadline is scheduled for the given time of the lighthouse's clock, or for an earlier time.
func (l *lighthouse) arm(at time.Duration) {
	if at -= l.skew; l.timer == 0 || at < l.timer {
		l.timer = at
		l.w.push(event{at: at, kind: lhDeadline, life: l.life})
	}
}

// withdraw withdraws requests, the newest first. Each withdrawal may end other requests, too.
func (l *lighthouse) withdraw(which func(*waiting) bool) {
	for i := len(l.waiting) - 1; i >= 0; i = min(i, len(l.waiting)) - 1 {
		if q := l.waiting[i]; which(&q) {
			l.waiting = slices.Delete(l.waiting, i, i+1)
			l.check.withdrew(q.g)
			l.step(quorum.Withdrawn{Waiter: q.id})
		}
	}
}

// jump changes the lighthouse's clock.
func (l *lighthouse) jump(by time.Duration) {
	l.skew += by
	if l.up {
		l.slept()
	}
	if l.up && len(l.waiting) > 0 {
		l.w.push(event{kind: lhDeadline, life: l.life})
	}
}

func (l *lighthouse) step(input quorum.Event) {
	l.do(input)
	l.check.move()
}

func (l *lighthouse) do(input quorum.Event) {
	w, delivered := l.w, false
	actions := l.machine.Step(input, epoch.Add(l.clock()))
	if r, is := input.(quorum.Recalled); is && !slices.ContainsFunc(actions, doubts) {
		l.check.recalled(r.Past)
	}
	for _, action := range actions {
		if failed, ok := action.(quorum.Failed); ok { // checked before any action is done
			l.check.failed(&failed)
		}
	}
	for _, action := range actions {
		switch a := action.(type) {
		case quorum.Deliver:
			delivered = true
			w.hash(uint64(a.Quorum.ID), uint64(len(a.Waiters)))
			l.check.delivered(a)
			if w.trace != nil {
				w.logf("quorum %d: %s", a.Quorum.ID, describe(a.Quorum))
			}
			l.answer(a)
			w.served(a.Quorum)
		case quorum.Keep:
			l.keep(a)
		case quorum.Redeliver:
			w.logf("quorum %d is sent once more", a.Quorum.ID)
			l.redeliver(a)
		case quorum.Refuse:
			l.refused = a.Waiter
			w.logf("a request is refused: %s", a.Reason)
			l.refuse(a)
		case quorum.Welcome:
			l.greeting.down(event{kind: welcomed, id: uint64(a.Term)})
			if a.Draining != "" { // in case the member has missed the request
				l.greeting.down(event{kind: drained})
			}
		case quorum.Recall:
			for _, k := range l.links {
				if k.g.id == a.ReplicaID {
					k.down(event{kind: recall, id: uint64(a.QuorumID)})
				}
			}
		case quorum.Failed:
			if w.trace != nil {
				w.logf("%s of quorum %d has failed: %s", a.ReplicaID, a.QuorumID, a.Reason)
			}
			for _, k := range l.links {
				k.down(event{kind: memberFailed, x: &a})
			}
			l.w.check.reported(&a)
		case quorum.Check:
			l.check.looks(&a)
			l.lookAt(a)
		case quorum.AskProgress:
			l.askProgress(a.ReplicaIDs)
		case quorum.Stalled:
			w.logf("%s makes no progress: %s", a.ReplicaID, a.Reason)
		case quorum.Drain:
			for _, k := range l.links {
				if k.g.id == a.ReplicaID {
					k.down(event{kind: drained})
				}
			}
		case quorum.Release:
			l.release(a.ReplicaID, input, delivered)
		case quorum.Wake:
			w.push(event{at: a.At.Sub(epoch) - l.skew, kind: lhWake, life: l.life})
		case quorum.Regressed:
			l.check.regressed(&a)
			w.logf("  it regresses: %s", a.Reason)
		case quorum.Changed:
			if w.trace != nil {
				w.logf("  because %s", a.Reason)
			}
		case quorum.Waiting:
			if w.trace != nil {
				w.logf("no quorum: %s", a.Reason)
			}
		}
	}
}

func doubts(a quorum.Action) bool {
	_, is := a.(quorum.Doubted)
	return is
}

// release lets a group that has left end: its peers no longer need it.
func (l *lighthouse) release(id string, input quorum.Event, delivered bool) {
	if _, ends := input.(quorum.ShuttingDown); !ends && !delivered {
		l.check.released(l.w.byID[id])
	}
	for _, k := range l.links {
		if k.g.id == id {
			k.down(event{kind: released})
		}
	}
}

// redeliver sends the latest quorum to a member whose answer was lost.
func (l *lighthouse) redeliver(a quorum.Redeliver) {
	i := slices.IndexFunc(l.waiting, func(q waiting) bool { return q.id == a.Waiter })
	q := l.waiting[i]
	l.waiting = slices.Delete(l.waiting, i, i+1)
	l.check.withdrew(q.g)
	q.link.down(event{kind: answered, id: q.req, x: a.Quorum})
}

// refuse ends a refused request.
func (l *lighthouse) refuse(a quorum.Refuse) {
	i := slices.IndexFunc(l.waiting, func(q waiting) bool { return q.id == a.Waiter })
	if i < 0 {
		return
	}
	q := l.waiting[i]
	l.waiting = slices.Delete(l.waiting, i, i+1)
	l.check.withdrew(q.g)
}

// keep writes a state to disk, which takes some time. If the lighthouse ends meanwhile, it starts again with the previous state,
// although its members may have the later quorum. The log of a cluster has the state before any member hears of it.
func (l *lighthouse) keep(a quorum.Keep) {
	w := l.w
	state := &quorum.Recalled{Past: a.Past, Highest: a.Highest}
	if w.Cluster {
		l.disk = state
		return
	}
	if !w.Disk {
		return
	}
	takes := w.upTo(2 * w.Delay)
	if w.chance(0.05) {
		takes += w.upTo(w.Policy.HeartbeatTimeout)
	}
	state.Highest += 10
	l.keeping = state
	w.after(takes, event{kind: lhKept, life: l.life, x: state})
}

// answer answers the requests of a quorum's members.
func (l *lighthouse) answer(a quorum.Deliver) {
	kept := l.waiting[:0]
	for _, q := range l.waiting {
		if !slices.Contains(a.Waiters, q.id) {
			kept = append(kept, q)
			continue
		}
		l.send(q, a.Quorum)
	}
	l.waiting = kept
}

// send answers a pending request with its quorum.
func (l *lighthouse) send(q waiting, with *quorum.Quorum) {
	w, i := l.w, q.g.slot
	switch {
	case q.link != nil:
		q.link.down(event{kind: answered, id: q.req, x: with})
		return
	case w.down(i) || w.lost():
		w.after(w.Keepalive, event{kind: refused, g: q.g, id: q.req})
		return
	}
	w.after(w.delay(i), event{kind: answered, g: q.g, id: q.req, x: with})
	if w.doubled() {
		w.after(w.delay(i), event{kind: answered, g: q.g, id: q.req, x: with})
	}
}
