package rendezvous

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

var epoch = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)

var timing = Timing{Grace: 200 * time.Millisecond, Timeout: 5 * time.Second}

// agent behaves as TorchRendezvousService does: it has one pending request, and sends the next one with the
// last view that it received.
type agent struct {
	group, name string
	settings    Settings
	ask         int64
	view        View
	was         int64 // the last round that it was in
	open        WaiterID
	cut         bool // it no longer reaches the lighthouse
	refused     string
}

// trains reports whether the agent trains, by its own view.
func (a *agent) trains() bool { return a.ask > 0 && a.view.Ask == a.ask && a.view.Round > 0 }

// world is a machine and its nodes.
type world struct {
	m        *Machine
	now      time.Time
	wake     time.Time
	agents   map[string]*agent
	of       map[WaiterID]*agent
	last     WaiterID
	kept     State
	out      []string
	released func(Released)
}

func newWorld() *world {
	return &world{m: NewMachine(timing, State{}, epoch), now: epoch, agents: map[string]*agent{},
		of: map[WaiterID]*agent{}, released: func(Released) {}}
}

func (w *world) printf(format string, args ...any) {
	w.out = append(w.out, fmt.Sprintf(format, args...))
}

// sorted returns the agents in the order of their names.
func (w *world) sorted() []*agent {
	return slices.SortedFunc(maps.Values(w.agents), func(a, b *agent) int {
		return cmp.Or(cmp.Compare(a.group, b.group), cmp.Compare(a.name, b.name))
	})
}

// step feeds an event, and makes all answered agents poll again.
func (w *world) step(event Event) {
	w.feed(event)
	w.poll()
}

func (w *world) poll() {
	for again := true; again; {
		again = false
		for _, a := range w.sorted() {
			if a.open == 0 && !a.cut && a.refused == "" {
				w.attend(a)
				again = true
			}
		}
	}
}

func (w *world) attend(a *agent) {
	w.last++
	a.open = w.last
	w.of[w.last] = a
	w.feed(Attended{w.last, Request{Group: a.group, Node: a.name, Store: a.name + ":1", Ask: a.ask,
		Seen: a.view, Settings: a.settings}})
}

func (w *world) feed(event Event) {
	for _, action := range w.m.Step(event, w.now) {
		switch action := action.(type) {
		case Answer:
			if a := w.of[action.Waiter]; a != nil {
				w.answered(a, action)
			}
			delete(w.of, action.Waiter)
		case Refuse:
			a := w.of[action.Waiter]
			a.open, a.refused = 0, action.Reason
			delete(w.of, action.Waiter)
			w.printf("%s is refused: %s", a.name, action.Reason)
		case Released:
			w.printf("%sround %d: %s", action.Group, action.Round, strings.Join(action.Nodes, " "))
			w.released(action)
		case Keep:
			w.kept = action.State
		case Wake:
			w.wake = action.At
		}
	}
}

func (w *world) answered(a *agent, answer Answer) {
	a.open = 0
	v := answer.View
	if v.Waiting > 0 && v.Waiting != a.view.Waiting {
		w.printf("%s: %d waiting", a.name, v.Waiting)
	}
	if v.Closed && !a.view.Closed {
		w.printf("%s: closed", a.name)
	}
	a.view = v
	a.was = max(a.was, v.Round)
}

// ask makes a node ask, as when it starts, or when its workers fail.
func (w *world) ask(a *agent) {
	a.ask++
	if a.open == 0 {
		w.poll()
		return
	}
	w.last++ // a second request, as sent by set_state
	w.step(Attended{w.last, Request{Group: a.group, Node: a.name, Store: a.name + ":1", Ask: a.ask,
		Seen: a.view, Settings: a.settings}})
	w.step(Ended{Waiter: w.last})
}

// cut breaks the connection of a node.
func (w *world) cut(a *agent) {
	id := a.open
	a.cut, a.open = true, 0
	delete(w.of, id)
	w.step(Ended{Waiter: id, Broke: true})
}

// leave ends a node.
func (w *world) leave(a *agent, done bool) {
	a.cut = true
	delete(w.agents, a.name)
	w.last++
	w.step(Attended{w.last, Request{Group: a.group, Node: a.name, Leave: true, Close: done}})
}

// restart replaces the machine by a new one, with the state of the old one or without.
func (w *world) restart(s State) {
	w.m, w.wake, w.of = NewMachine(timing, s, w.now), time.Time{}, map[WaiterID]*agent{}
	for _, a := range w.agents {
		a.open = 0
	}
	w.step(Woken{})
}

// pass lets time pass. Pending requests are answered every two seconds.
func (w *world) pass(d time.Duration) {
	const poll = 2 * time.Second
	for end := w.now.Add(d); w.now.Before(end); {
		next := w.now.Add(poll)
		if end.Before(next) {
			next = end
		}
		if !w.wake.IsZero() && w.wake.After(w.now) && w.wake.Before(next) {
			next = w.wake
		}
		w.now = next
		w.step(Woken{})
		for _, a := range w.sorted() {
			if a.open != 0 {
				w.step(Ended{Waiter: a.open})
			}
		}
	}
}
