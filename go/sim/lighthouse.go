package sim

import (
	"slices"
	"time"

	"github.com/torchft/torchft/go/quorum"
)

// answerMargin is the most that a wait ends before its caller's deadline, as in package lighthouse.
const answerMargin = 50 * time.Millisecond

// lighthouse is the shell around its machine: what package lighthouse is in production.
type lighthouse struct {
	w           *world
	machine     lighthouseMachine
	up          bool
	life        uint32
	skew        time.Duration // of its clock, after jumps
	pausedUntil time.Duration

	lastWaiter quorum.WaiterID
	refused    quorum.WaiterID // the last that was
	waiting    []waiting
	timer      time.Duration // when the next lhDeadline comes, 0 if none is on its way
}

// waiting is a request that has not been answered.
type waiting struct {
	id       quorum.WaiterID
	g        *group
	req      uint64
	deadline time.Duration // on the lighthouse's clock
	shrink   bool
	step     int64
}

// request is a quorum request on its way.
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
	l.waiting, l.timer = nil, 0
	begin := epoch.Add(w.now)
	if w.mistake.start != nil {
		begin = w.mistake.start(begin)
	}
	policy := w.Policy
	if w.mistake.policy != nil {
		policy = w.mistake.policy(policy)
	}
	machine := quorum.NewMachine(policy, begin)
	l.machine = machine
	if w.mistake.lighthouse != nil {
		l.machine = w.mistake.lighthouse(machine)
	}
	w.check.lighthouseStarts()
	w.say("the lighthouse starts")
	w.after(w.QuorumTick, event{kind: lhTick, life: l.life})
}

// crash ends it, and breaks its connections. A host that vanishes breaks none: the groups notice by themselves.
func (l *lighthouse) crash(silent bool, down time.Duration) {
	w := l.w
	if !l.up {
		return
	}
	l.up = false
	w.say("the lighthouse is killed")
	for i := range w.slots {
		if g := w.slots[i].g; g != nil && g.asking.active {
			notice := w.delay(i)
			if silent || w.down(i) {
				notice = w.Keepalive
			}
			w.after(notice, event{kind: refused, g: g, id: g.asking.req})
		}
	}
	w.after(down, event{kind: lhStart})
}

func (l *lighthouse) handle(e *event) {
	w := l.w
	switch e.kind {
	case lhAsk:
		r := e.x.(*request)
		remaining := r.deadline - w.now
		remaining -= min(answerMargin, remaining/10)
		if remaining <= 0 {
			return
		}
		l.lastWaiter++
		id := l.lastWaiter
		asked := quorum.Asked{Waiter: id, Member: r.member, KnownQuorumID: r.known, Number: e.id}
		if w.Published.has(e.g.slot) {
			asked.Number = 0
		} else if !w.check.newest(e.g, e.id) {
			l.refused = 0
			l.step(asked)
			if l.refused != id {
				w.broken(ruleStale, "%s sent request %d before others that are here, and it is taken", e.g.id, e.id)
			}
			return
		}
		deadline := l.clock() + remaining
		l.waiting = append(l.waiting, waiting{id, e.g, e.id, deadline, r.member.ShrinkOnly, r.member.Step})
		w.check.asked(e.g)
		l.arm(deadline)
		l.step(asked)
	case lhBeat:
		w.check.beat(e.g)
		l.step(quorum.Beat{ReplicaID: e.g.id})
	case lhGaveUp:
		for i := len(l.waiting) - 1; i >= 0; i-- {
			if q := l.waiting[i]; q.g == e.g && q.req == e.id {
				l.giveUp(i)
			}
		}
	case lhDeadline:
		l.timer = 0
		next := time.Duration(0)
		for i := len(l.waiting) - 1; i >= 0; i-- {
			if at := l.waiting[i].deadline; at <= l.clock() {
				l.giveUp(i)
			} else if next == 0 || at < next {
				next = at
			}
		}
		if next > 0 {
			l.arm(next)
		}
	case lhTick:
		l.step(quorum.Tick{})
		w.check.ticked()
		w.after(w.QuorumTick, event{kind: lhTick, life: l.life})
	}
}

// arm sees to it that lhDeadline comes at a time of the lighthouse's clock, or before.
func (l *lighthouse) arm(at time.Duration) {
	if at -= l.skew; l.timer == 0 || at < l.timer {
		l.timer = at
		l.w.push(event{at: at, kind: lhDeadline, life: l.life})
	}
}

func (l *lighthouse) giveUp(i int) {
	q := l.waiting[i]
	l.waiting = slices.Delete(l.waiting, i, i+1)
	l.w.check.gaveUp(q.g)
	l.step(quorum.GaveUp{Waiter: q.id})
}

// jump moves its clock.
func (l *lighthouse) jump(by time.Duration) {
	l.skew += by
	if l.up && len(l.waiting) > 0 {
		l.w.push(event{kind: lhDeadline, life: l.life})
	}
}

func (l *lighthouse) step(input quorum.Event) {
	w := l.w
	for _, action := range l.machine.Step(input, epoch.Add(l.clock())) {
		switch a := action.(type) {
		case quorum.Deliver:
			w.hash(uint64(a.Quorum.ID), uint64(len(a.Waiters)))
			w.check.delivered(a)
			if w.trace != nil {
				w.say("quorum %d: %s", a.Quorum.ID, describe(a.Quorum))
			}
			l.answer(a)
			w.served(a.Quorum)
		case quorum.Refuse:
			l.refused = a.Waiter
			w.say("a late request is refused: %s", a.Reason)
		case quorum.Changed:
			if w.trace != nil {
				w.say("  because %s", a.Reason)
			}
		case quorum.Waiting:
			if w.trace != nil {
				w.say("no quorum: %s", a.Reason)
			}
		}
	}
	w.check.lighthouseSize()
}

// answer sends the quorum to those who waited for it.
func (l *lighthouse) answer(a quorum.Deliver) {
	w := l.w
	kept := l.waiting[:0]
	for _, q := range l.waiting {
		if !slices.Contains(a.Waiters, q.id) {
			kept = append(kept, q)
			continue
		}
		i := q.g.slot
		if w.down(i) || w.lost() {
			w.after(w.Keepalive, event{kind: refused, g: q.g, id: q.req})
			continue
		}
		w.after(w.delay(i), event{kind: answered, g: q.g, id: q.req, x: a.Quorum})
		if w.doubled() {
			w.after(w.delay(i), event{kind: answered, g: q.g, id: q.req, x: a.Quorum})
		}
	}
	l.waiting = kept
}
