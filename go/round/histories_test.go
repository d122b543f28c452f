package round

import (
	"flag"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
	"github.com/torchft/torchft/go/quorum"
)

// deviation is one change of the schedule, at the action with this number: a delay of what is next, or an
// event.
type deviation struct {
	at     int
	event  int // index in events; -1: a delay
	member int // to which the event happens
}

// events are the deviations other than delays. Each happens to one member.
var events = []struct {
	name string
	of   func(groups, member int, upstream bool) bool // whether it can happen to this one of so many members
	do   func(h *together, m *member)
}{
	{"joins", last, func(h *together, m *member) {
		if m.machine == nil {
			h.start(m)
		}
	}},
	{"is killed", anyone, func(h *together, m *member) {
		if m.alive {
			m.alive = false
			h.faults++
			h.breaks(m)
		}
	}},
	{"loses its step", anyone, func(h *together, m *member) { h.faults, m.loses = h.faults+1, true }},
	{"votes against its step", anyone, func(h *together, m *member) {
		h.faults, m.votesNo = h.faults+1,
			true
	}},
	{"reconnects", attends, func(h *together, m *member) {
		if m.alive {
			h.breaks(m)
			h.greet(m)
		}
	}},
	{"is cut off for a time", attends, func(h *together, m *member) {
		if m.alive {
			h.faults++
			h.breaks(m)
			m.up, m.answers, m.notices, m.away = nil, nil, nil, h.now.Add(300*time.Millisecond)
		}
	}},
	{"has another setting", attends, func(h *together, m *member) {
		if m.alive && m.away.IsZero() {
			m.up = append(m.up, quorum.Changes{ReplicaID: m.id, Reason: "another setting"})
		}
	}},
	{"is drained", attends, func(h *together, m *member) {
		if h.goesOnWithout(m) {
			m.drained = m.alive
			h.feed(quorum.Drained{ReplicaID: m.id, Reason: "an operator"})
		}
	}},
	{"ends between two steps", func(groups, member int,
		upstream bool) bool {
		return upstream && member == groups-1
	}, func(h *together, m *member) {
		m.ends = m.alive && h.goesOnWithout(m)
	}},
	{"is heard late", anyone, func(h *together, m *member) {
		if len(m.up) == 0 || reflect.TypeOf(m.up[0]) != reflect.TypeFor[quorum.Greeted]() {
			// a greeting that is late is a failure
			m.late[0] = h.played + late
		}
	}},
	{"gets its answer late", anyone, func(h *together, m *member) { m.late[1] = h.played + late }},
	{"gets notices late", attends, func(h *together, m *member) { m.late[2] = h.played + late }},
	{"sees the lighthouse restart", func(_, member int, _ bool) bool { return member == 0 },
		func(h *together, _ *member) { h.restart() }},
}

// goesOnWithout reports whether another group has weights of the training.
func (h *together) goesOnWithout(m *member) bool {
	return slices.ContainsFunc(h.members, func(o *member) bool { return o != m && o.alive && o.step > 0 })
}

// late is for how many actions a path may be late.
const late = 20

// second are the events that are combined with each other event at about the same time.
var second = func() (found []int) {
	for i := range events {
		if strings.Contains(events[i].name, "late") || strings.Contains(events[i].name, "reconnects") {
			found = append(found, i)
		}
	}
	return found
}()

func anyone(_, _ int, _ bool) bool { return true }

func last(groups, member int, _ bool) bool { return member == groups-1 }

func attends(groups, member int, upstream bool) bool { return !upstream || member < groups-1 }

// restart restarts the lighthouse, with what is on its disk. With a group of upstream in the job it may cost
// a step: see the limits on the page.
func (h *together) restart() {
	h.restarts++
	h.lighthouse = quorum.NewMachine(togetherPolicy, h.now, 0)
	clear(h.waiters)
	if h.kept.Past.ID != 0 {
		h.feed(quorum.Recalled{Kept: quorum.Kept{Past: h.kept.Past, Highest: h.kept.Highest}})
	}
	for _, m := range h.members {
		if m.alive && !m.upstream {
			h.greet(m)
		} else if m.alive {
			h.faults++
			m.up, m.answers = nil, nil
			h.again(m)
		}
	}
}

// broken returns which rule the history has broken; empty: none.
func (h *together) broken(before []commitment) string {
	// All groups that commit a step in one quorum took part in all of its collectives, so a step has two
	// histories only if one of the quorums ended without all of its members.
	at := map[int64]map[int64]bool{}
	for _, c := range h.commits {
		if at[c.step] == nil {
			at[c.step] = map[int64]bool{}
		}
		at[c.step][c.quorumID] = true
	}
	for step, quorums := range at {
		if len(quorums) > 1 && h.faults == 0 {
			return fmt.Sprintf("step %d is committed in several quorums, and nothing has failed", step)
		}
	}
	if h.faults == 0 && h.lost > 0 {
		return fmt.Sprintf("%d attempts are lost, and nothing has failed", h.lost)
	}
	ours := h.restarts == 0 && !slices.ContainsFunc(h.members, func(m *member) bool { return m.upstream })
	if ours && h.timeouts > 0 {
		return "a group waits for the timeout of a collective, although each failure is reported"
	}
	for _, m := range h.members {
		switch {
		case m.alive && m.phase == "left":
			return m.id + " has left, and is not released"
		case m.alive && m.drained && ours && h.faults == 0: // an evicted one is not asked
			return m.id + " was asked to leave, and has not"
		case m.lost > h.faults && ours:
			return fmt.Sprintf("%s has lost %d steps by %d faults", m.id, m.lost, h.faults)
		}
		made := 0
		for _, c := range h.commits[len(before):] {
			if c.member == m.id {
				made++
			}
		}
		if m.alive && made < 3 {
			return fmt.Sprintf("%s has committed %d steps at the end, when nothing fails any more", m.id,
				made)
		}
	}
	// At the end all live groups are together.
	var last *member
	for _, m := range h.members {
		if !m.alive {
			continue
		}
		if last != nil && (m.committed != last.committed || max(m.step-last.step, last.step-m.step) > 1) {
			return fmt.Sprintf("%s is at step %d of quorum %d, %s at step %d of quorum %d", last.id,
				last.step, last.committed, m.id, m.step, m.committed)
		}
		last = m
	}
	return ""
}

// timeout is that of a collective.
const timeout = 5 * time.Second

const (
	horizon = 90  // actions in which a history may deviate
	rest    = 300 // actions after them
)

// scenario is a history: of so many groups, of which so many run from the beginning. The last one may be one
// of upstream.
type scenario struct {
	groups, running int
	upstream        bool
	deviations      []deviation
}

func (s scenario) play(logs bool) (*together, string) {
	h := newTogether(s.groups)
	h.logs, h.members[s.groups-1].upstream = logs, s.upstream
	for _, m := range h.members[:s.running] {
		h.start(m)
	}
	h.run(horizon, s.deviations)
	before := slices.Clone(h.commits)
	h.run(rest, nil)
	return h, h.broken(before)
}

// one returns all deviations of a scenario.
func (s scenario) one() (all []deviation) {
	for at := range horizon {
		all = append(all, deviation{at, -1, 0})
		for e := range events {
			all = append(all, s.happens(at, e)...)
		}
	}
	return all
}

func (s scenario) happens(at, event int) (all []deviation) {
	for m := range s.groups {
		if at >= 0 && events[event].of(s.groups, m, s.upstream) {
			all = append(all, deviation{at, event, m})
		}
	}
	return all
}

// search plays histories of one to four groups, until play returns false: all with at most one deviation,
// each stride-th one with any two, and of two groups each stride-th one, by another stride, with an event and
// a path that is late, or a broken stream, at about that time.
func search(stride, nearStride int, play func(scenario) bool) {
	pair, apart := 0, 0
	for groups := 1; groups <= 4; groups++ {
		for running := max(1, groups-1); running <= groups; running++ {
			for _, upstream := range []bool{false, true} {
				s := scenario{groups: groups, running: running, upstream: upstream}
				if upstream && groups == 1 {
					continue
				}
				with := func(deviations ...deviation) bool {
					s.deviations = deviations
					return play(s)
				}
				if !with() {
					return
				}
				all := s.one()
				for i, first := range all {
					if !with(first) {
						return
					}
					for k := i + stride - 1 - (pair+i)%stride; k < len(all); k += stride {
						if k > i && !with(first, all[k]) {
							return
						}
					}
					pair += len(all) - i - 1
					if groups != 2 || first.event < 0 {
						continue
					}
					for _, l := range second {
						for at := first.at - 4; at <= first.at+8; at += 2 {
							for _, other := range s.happens(at, l) {
								if apart++; apart%nearStride == 0 && !with(first, other) {
									return
								}
							}
						}
					}
				}
			}
		}
	}
}

// Primes: so the pairs of all kinds are played.
const defaultStride, defaultNearStride = 24001, 101

var pairsFlag = flag.Bool("pairs", false, "TestAllHistoriesOfFewMembers: all pairs of deviations, which "+
	"takes hours, and not each of some thousand")

func TestAllHistoriesOfFewMembers(t *testing.T) {
	t.Parallel()
	stride, nearStride := defaultStride, defaultNearStride
	switch {
	case *pairsFlag:
		stride, nearStride = 1, 1
	case testmain.Full() && !testmain.Race(): // a history has a single goroutine
		stride, nearStride = 401, 1
	}
	played := 0
	search(stride, nearStride, func(s scenario) bool {
		played++
		if _, why := s.play(false); why != "" {
			h, _ := s.play(true)
			require.Fail(t, why, "%+v\n%s", s, strings.Join(h.log, "\n"))
		}
		return true
	})
	t.Log(played)
}
