// Package sim runs the machines of the lighthouse and of the manager servers, and a model of the ranks, on one thread with a
// simulated clock and network. A run depends on its Setup only: there is no goroutine, no select, no iteration over a map, and no
// real clock. So the seed of a failed run replays it byte for byte.
//
// After every event the rules of docs/correctness.md are checked.
package sim

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/torchft/torchft/go/quorum"
)

// epoch is the time at which every run begins. Quorum ids begin at the milliseconds of the clock: 1001 is the first.
var epoch = time.UnixMilli(1000).UTC()

// Result is the result of a run.
type Result struct {
	Broken      *Violation // the first rule that did not hold, nil if all did
	Hash        uint64     // of all events and their results
	Rounds      int        // quorums
	Events      uint64
	Commits     uint64 // of ranks
	Heals       uint64 // of ranks
	Replays     uint64 // of ranks
	Lost        uint64 // of ranks: attempts at a step that were not committed
	NotReplayed uint64 // of ranks: steps that could have been replayed, and were not
	LastID      int64
	Elapsed     time.Duration // on the clock of the simulation
	FaultsHit   int

	replayFailures [killed + 1]int // failures of ranks in a replay, by their phase
	replayJoins    int             // groups that started during a replay of others
}

// Violation is a rule that did not hold.
type Violation struct {
	Rule   string
	Detail string
	At     time.Duration
	Round  int
}

func (v *Violation) Error() string {
	return fmt.Sprintf("%s: %s (round %d, %s)", v.Rule, v.Detail, v.Round, v.At)
}

// world is the state of one run.
type world struct {
	Setup
	rng   *rand.Rand
	now   time.Duration
	event event // the current event
	queue queue
	trace Tracer

	lh      lighthouse
	slots   []slot
	links   [][]int // links[i][j]: number of cuts between slot i as the sender and slot j
	cuts    int     // current cuts between groups
	comms   map[commKey]*comm
	byID    map[string]*group // all groups of the run, including ended ones
	noise   int               // current faults of kind Noise
	req     uint64            // of the last request to the lighthouse
	next    int               // index of the next fault
	rough   int               // number of current faults that suspend the rules with a time limit (Fault.rough)
	mayLose int               // steps that the faults so far may cost each rank
	changed time.Duration     // when the network or the set of groups changed last
	calm    time.Duration     // when the last fault ends
	ending  bool
	end     time.Duration

	check  checker
	result Result
}

// slot is a place where a group runs: a host, with its connections.
type slot struct {
	g       *group // nil while no group runs here
	lives   int    // groups that have started here
	cutUp   int    // number of current cuts, towards the lighthouse
	cutDown int    // the same from the lighthouse
	slow    int    // current faults that slow it down
}

// Run plays one history. The tracer, if it is not nil, receives lines that describe the history.
func Run(s Setup, trace Tracer) Result {
	w := &world{
		Setup: s,
		rng:   rand.New(rand.NewPCG(s.Seed, 2)),
		trace: trace,
		slots: make([]slot, s.Slots),
		links: make([][]int, s.Slots),
		comms: map[commKey]*comm{},
		byID:  map[string]*group{},
	}
	w.check = checker{w: w, quorums: map[int64][]string{}}
	for i := range w.links {
		w.links[i] = make([]int, s.Slots)
	}
	w.lh.w, w.lh.check.l = w, &w.lh
	w.push(event{kind: lhStart})
	for i := range w.slots {
		w.push(event{at: w.upTo(100 * time.Millisecond), kind: slotStart, id: uint64(i)})
	}
	for w.result.Broken == nil && !w.over() {
		w.step()
	}
	w.result.Elapsed = w.now
	return w.result
}

// calls reports whether the group in a slot makes calls instead of using a stream.
func (w *world) calls(i int) bool { return (w.Upstream | w.Calls).has(i) }

// push schedules an event, at the earliest for now.
func (w *world) push(e event) {
	e.at = max(e.at, w.now)
	w.queue.push(&e)
}

func (w *world) after(d time.Duration, e event) {
	e.at = w.now + d
	w.push(e)
}

// upTo returns a random duration below d.
func (w *world) upTo(d time.Duration) time.Duration {
	return time.Duration(w.rng.Uint64N(uint64(d)))
}

func (w *world) chance(p float64) bool { return p > 0 && w.rng.Float64() < p }

// step handles the next event, and checks the rules.
func (w *world) step() {
	e := &w.event
	w.queue.pop(e)
	w.now = e.at
	switch {
	case e.kind < lastOfLighthouse:
		l := &w.lh
		if e.life != l.life || !l.up {
			return
		}
		if l.pausedUntil > w.now {
			e.at = l.pausedUntil
			w.push(*e)
			return
		}
	case e.kind < lastOfGroup:
		if e.g.killed {
			if e.kind == healAsk {
				w.refuseHeal(e.x.(*heal))
			}
			return
		}
		if e.g.pausedUntil > w.now {
			e.at = e.g.pausedUntil
			w.push(*e)
			return
		}
	}
	w.result.Events++
	w.hash(uint64(e.at), uint64(e.kind)<<32|uint64(uint16(e.rank)), e.id)
	switch {
	case e.kind < lastOfLighthouse:
		w.lh.handle(e)
	case e.kind < lastOfGroup:
		e.g.handle(e)
		w.failInReplay(e.g)
	case e.kind == lhStart:
		w.lh.start()
	case e.kind == slotStart:
		w.startGroup(int(e.id))
	case e.kind == faultBegin:
		w.beginFault(&w.Faults[e.id])
	case e.kind == faultEnd:
		w.endFault(&w.Faults[e.id])
	}
}

// served counts a quorum, and schedules the faults that begin after it.
func (w *world) served(q *quorum.Quorum) {
	w.result.Rounds++
	w.result.LastID = q.ID
	for w.next < len(w.Faults) && w.Faults[w.next].Round <= w.result.Rounds {
		w.after(w.Faults[w.next].After, event{kind: faultBegin, id: uint64(w.next)})
		w.disturbedUntil(w.now + w.Faults[w.next].After + w.Faults[w.next].For)
		w.next++
	}
}

func (w *world) disturbedUntil(t time.Duration) { w.calm = max(w.calm, t) }

// over reports whether the run is over: it has had its rounds, all faults have ended, and after that the time has passed in which the
// job must become healthy (bound).
func (w *world) over() bool {
	if w.result.Rounds < w.Rounds {
		if most := time.Duration(w.Rounds+300) * 3 * w.QuorumTimeout; w.now > most {
			w.broken(ruleForms, "there were %d of %d quorums in %s", w.result.Rounds, w.Rounds, w.now)
		}
		return false
	}
	if !w.ending {
		w.ending = true
		w.Loss, w.Duplicate, w.Straggle = 0, 0, 0
		w.disturbedUntil(w.now)
		w.end = w.calm + w.bound() + w.QuorumTick
	}
	w.end = max(w.end, w.calm+w.bound()+w.QuorumTick)
	return w.now >= w.end
}

func (w *world) broken(rule, format string, args ...any) {
	if w.result.Broken == nil {
		w.result.Broken = &Violation{Rule: rule, Detail: fmt.Sprintf(format, args...), At: w.now, Round: w.result.Rounds}
		w.logf("BROKEN: %s: %s", rule, w.result.Broken.Detail)
	}
}

// delay returns how long a message of a slot takes.
func (w *world) delay(i int) time.Duration {
	d := w.Delay/2 + w.upTo(w.Delay)
	if w.chance(w.Straggle) {
		d *= 20
	}
	if w.slots[i].slow > 0 {
		d *= 15
	}
	return d
}

func (w *world) lost() bool {
	return w.chance(w.Loss) || w.noise > 0 && w.chance(0.05)
}

func (w *world) doubled() bool {
	return w.chance(w.Duplicate) || w.noise > 0 && w.chance(0.05)
}

// up and down report whether messages from a slot to the lighthouse, or from the lighthouse to the slot, are lost.
func (w *world) up(i int) bool   { return w.slots[i].cutUp > 0 }
func (w *world) down(i int) bool { return w.slots[i].cutDown > 0 }

// cutOff reports whether a request from a slot to the lighthouse gets no answer, because messages are lost in one direction or both.
func (w *world) cutOff(i int) bool { return w.up(i) || w.down(i) }

// reached reports whether there is a group in a slot that can reach the lighthouse.
func (w *world) reached(i int) bool { return w.slots[i].g != nil && !w.cutOff(i) }

// sends reports whether messages from slot i arrive at slot j; connected reports whether messages arrive in both directions.
func (w *world) sends(i, j int) bool     { return w.links[i][j] == 0 }
func (w *world) connected(i, j int) bool { return w.sends(i, j) && w.sends(j, i) }

// Tracer receives the lines of a history.
type Tracer func(at time.Duration, line string)

func (w *world) logf(format string, args ...any) {
	if w.trace != nil {
		w.trace(w.now, fmt.Sprintf(format, args...))
	}
}

func (w *world) hash(values ...uint64) {
	h := w.result.Hash
	for _, v := range values {
		h = mix(h, v)
	}
	w.result.Hash = h
}

// mix hashes two numbers to one.
func mix(a, b uint64) uint64 {
	a ^= b + 0x9e3779b97f4a7c15 + a<<6 + a>>2
	a *= 0xbf58476d1ce4e5b9
	a ^= a >> 29
	a *= 0x94d049bb133111eb
	return a ^ a>>32
}

func mixString(h uint64, s string) uint64 {
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 0x100000001b3
	}
	return mix(h, uint64(len(s)))
}
