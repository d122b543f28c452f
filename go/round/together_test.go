package round

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/recovery"
)

// This file plays the lighthouse's machine together with the machines of up to four groups of one rank, in all histories with a bounded number
// of deviations from one schedule (delay-bounded scheduling: Emmi, Qadeer, Rakamarić, POPL 2011). A deviation delays what would happen next, or
// is a fault. Messages of one path arrive in order; a group receives quorums and notices by two paths.

// together is one history.
type together struct {
	now        time.Time
	lighthouse *quorum.Machine
	members    []*member
	waiters    map[quorum.WaiterID]*member
	waiter     quorum.WaiterID
	arrived    map[string]int // how many members have arrived at a collective, by quorum and step
	commits    []commitment
	formed     []*quorum.Quorum
	turn       int
	lost       int // failed attempts
	faults     int
	log        []string
}

type commitment struct {
	id, step, quorumID int64
	member             string
}

// member is a group: its machine, the model of its rank, and its stream.
type member struct {
	id               string
	alive            bool
	greeted          bool
	machine          *Machine
	known, knownStep int64 // of the round that it received last

	up      []quorum.Event // to the lighthouse
	answers []Event        // from it, by one path
	notices []Event        // by the other one
	asking  quorum.WaiterID
	round   uint64

	// The rank.
	step, committed, failures int64
	stands                    int64 // the step that it may begin without a quorum; -1: none
	result                    *recovery.Result
	phase                     string // "", asks, trains, waits, votes
	failed                    map[int64]bool
	healed                    bool
	loses                     bool      // fault: its next step fails
	since                     time.Time // when it began to wait for the others
}

func newTogether(groups int) *together {
	h := &together{now: epoch, waiters: map[quorum.WaiterID]*member{}, arrived: map[string]int{}}
	h.lighthouse = quorum.NewMachine(quorum.Policy{
		MinReplicas: 1, JoinTimeout: 10 * time.Second, HeartbeatTimeout: 5 * time.Second, SuspectGrace: 200 * time.Millisecond,
	}, epoch, 0)
	for i := range groups {
		h.members = append(h.members, &member{id: string(rune('a' + i)), stands: -1, committed: -1, failed: map[int64]bool{}})
	}
	return h
}

func (h *together) start(m *member) {
	m.alive = true
	m.machine = NewMachine(Group{ReplicaID: m.id, Address: "http://" + m.id, WorldSize: 1})
	h.greet(m)
}

func (h *together) greet(m *member) {
	standsIn, step := m.machine.Standing()
	m.up = append(m.up, quorum.Greeted{ReplicaID: m.id, Known: quorum.Claim{QuorumID: m.known, Step: m.knownStep}, StandsIn: standsIn, Step: step})
	m.greeted = true
}

// feed gives the lighthouse an event, and does what follows.
func (h *together) feed(e quorum.Event) {
	for _, action := range h.lighthouse.Step(e, h.now) {
		switch a := action.(type) {
		case quorum.Deliver:
			h.formed = append(h.formed, a.Quorum)
			h.logf("quorum %d at step %d of %d, stands: %t", a.Quorum.ID, a.Quorum.Members[0].Step, len(a.Quorum.Members), a.Quorum.Stands)
			for _, w := range a.Waiters {
				h.deliver(w, a.Quorum)
			}
		case quorum.Redeliver:
			h.deliver(a.Waiter, a.Quorum)
		case quorum.Failed:
			h.logf("%s failed: %s", a.ReplicaID, a.Reason)
			for _, m := range h.members {
				m.notices = append(m.notices, MemberFailed{QuorumID: a.QuorumID, ReplicaID: a.ReplicaID, Reason: a.Reason})
			}
		case quorum.Over:
			m := h.of(a.ReplicaID)
			m.notices = append(m.notices, MemberFailed{QuorumID: a.QuorumID, ReplicaID: a.ReplicaID, Reason: a.Reason})
		case quorum.Call:
			for _, id := range a.ReplicaIDs {
				h.of(id).notices = append(h.of(id).notices, Called{a.QuorumID})
			}
		case quorum.Round:
			h.logf("the round after %d is at step %d", a.QuorumID, a.Step)
			for _, id := range a.ReplicaIDs {
				h.of(id).notices = append(h.of(id).notices, RoundKnown{a.QuorumID, a.Step})
			}
		case quorum.Drain:
			h.of(a.ReplicaID).notices = append(h.of(a.ReplicaID).notices, Drained{})
		}
	}
}

func (h *together) deliver(w quorum.WaiterID, q *quorum.Quorum) {
	if m := h.waiters[w]; m != nil && m.asking == w {
		m.answers = append(m.answers, QuorumKnown{Round: m.round, Quorum: q})
		m.asking = 0
	}
}

func (h *together) of(id string) *member { return h.members[id[0]-'a'] }

// group gives a group's machine an event, and does what follows.
func (h *together) group(m *member, e Event) {
	for _, action := range m.machine.Step(e, h.now) {
		switch a := action.(type) {
		case AskLighthouse:
			h.waiter++
			h.waiters[h.waiter] = m
			m.asking, m.round = h.waiter, a.Round
			m.up = append(m.up, quorum.Asked{Waiter: h.waiter, Member: a.Member, KnownQuorumID: a.KnownQuorumID, Number: uint64(h.waiter)})
		case CancelLighthouse:
			if m.asking != 0 {
				m.up = append(m.up, quorum.Withdrawn{Waiter: m.asking})
				m.asking = 0
			}
		case AnswerQuorum:
			m.result, m.phase = a.Result, "trains"
			if a.Result.Heal {
				m.step, m.healed = a.Result.MaxStep, true
			}
		case AnswerVote:
			h.decided(m, a)
		case Stop:
			m.up = append(m.up, quorum.Stopped{ReplicaID: m.id, QuorumID: a.QuorumID, Step: a.Step})
		case Part:
			m.up = append(m.up, quorum.Parting{ReplicaID: m.id, QuorumID: a.QuorumID, Reason: a.Reason})
		case NeedQuorum:
			m.up = append(m.up, quorum.Changes{ReplicaID: m.id, Reason: a.Reason})
		case Fail:
			m.phase = ""
		}
	}
}

func (h *together) decided(m *member, a AnswerVote) {
	m.phase = ""
	if !a.ShouldCommit {
		h.logf("%s loses step %d", m.id, m.step)
		h.lost++
		m.failures++
		if m.healed {
			m.committed = -1
		}
		m.healed = false
		return
	}
	h.commits = append(h.commits, commitment{int64(len(h.commits)), m.step, m.result.QuorumID, m.id})
	h.logf("%s commits step %d of %d", m.id, m.step, m.result.QuorumID)
	m.committed, m.failures, m.healed = m.result.QuorumID, 0, false
	m.step++
	if m.stands = -1; a.Stands {
		m.stands = m.step
	}
}

// act lets a rank do its next action, and reports whether it had one.
func (h *together) act(m *member) bool {
	switch m.phase {
	case "":
		if m.stands == m.step && !m.failed[m.result.QuorumID] {
			m.result.MaxStep, m.phase = m.step, "trains"
			m.stands = -1
			return true
		}
		m.phase = "asks"
		h.waiter++
		h.group(m, QuorumAsked{Waiter: WaiterID(h.waiter), Deadline: h.now.Add(time.Hour), Request: Request{
			Step: m.step, CommittedQuorumID: m.committed, CommitFailures: m.failures,
		}})
	case "trains": // it sends its part of the average
		if m.loses {
			m.loses = false
			h.vote(m, false)
			return true
		}
		h.arrived[fmt.Sprint(m.result.QuorumID, m.step)]++
		m.phase, m.since = "waits", h.now
	case "waits":
		switch {
		case h.arrived[fmt.Sprint(m.result.QuorumID, m.step)] == len(m.result.ReplicaIDs):
			h.vote(m, true)
		case m.failed[m.result.QuorumID] || h.now.Sub(m.since) > timeout:
			h.vote(m, false)
		default:
			return false
		}
	default:
		return false
	}
	return true
}

func (h *together) vote(m *member, yes bool) {
	h.waiter++
	h.group(m, Voted{Waiter: WaiterID(h.waiter), Step: m.step, ShouldCommit: yes})
}

// paths are the things that can happen in a history, in the order of the schedule: for each member a message on one of three paths, and
// an action of its rank.
const paths = 4

// does lets one of them happen, and reports whether it could.
func (h *together) does(path int) bool {
	m := h.members[path/paths]
	if !m.alive {
		return false
	}
	switch path % paths {
	case 0:
		if len(m.up) == 0 {
			return false
		}
		e := m.up[0]
		m.up = m.up[1:]
		h.feed(e)
	case 1:
		if len(m.answers) == 0 {
			return false
		}
		e := m.answers[0].(QuorumKnown)
		m.answers = m.answers[1:]
		m.known, m.knownStep = e.Quorum.ID, e.Quorum.Past().Step
		h.group(m, e)
	case 2:
		if len(m.notices) == 0 {
			return false
		}
		e := m.notices[0]
		m.notices = m.notices[1:]
		if f, is := e.(MemberFailed); is {
			m.failed[f.QuorumID] = true
		}
		h.group(m, e)
	default:
		return h.act(m)
	}
	return true
}

// faults are the deviations other than delays. Each is done to one member.
var faults = []struct {
	name string
	do   func(h *together, m *member)
}{
	{"joins", func(h *together, m *member) {
		if !m.alive && m.machine == nil {
			h.start(m)
		}
	}},
	{"is killed", func(h *together, m *member) {
		if m.alive {
			m.alive = false
			h.faults++
			h.breaks(m)
		}
	}},
	{"loses its step", func(h *together, m *member) { h.faults, m.loses = h.faults+1, true }},
	{"reconnects", func(h *together, m *member) {
		if !m.alive {
			return
		}
		h.breaks(m)
		m.up, m.answers, m.notices = nil, nil, nil // lost on the way
		h.greet(m)
		h.again(m)
	}},
	{"has another setting", func(h *together, m *member) {
		if m.alive {
			m.up = append(m.up, quorum.Changes{ReplicaID: m.id, Reason: "another setting"})
		}
	}},
}

// breaks ends the stream of a member, and with it its requests.
func (h *together) breaks(m *member) {
	for w := quorum.WaiterID(1); w <= h.waiter; w++ {
		if h.waiters[w] == m {
			delete(h.waiters, w)
			h.feed(quorum.Withdrawn{Waiter: w})
		}
	}
	h.feed(quorum.Disconnected{ReplicaID: m.id})
}

// again sends a request once more: the shell retries it.
func (h *together) again(m *member) {
	g := &m.machine.gathering
	if g.round == 0 {
		return
	}
	member, _ := merge(quorum.Member{ReplicaID: m.id, Address: "http://" + m.id, WorldSize: 1}, g.asked)
	h.waiter++
	h.waiters[h.waiter] = m
	m.asking, m.round = h.waiter, g.round
	m.up = append(m.up, quorum.Asked{Waiter: h.waiter, Member: member, KnownQuorumID: m.known, Number: uint64(h.waiter)})
}

// deviation is one change of the schedule, at the action with this number: a delay of what is next, or a fault of a member.
type deviation struct {
	at     int
	fault  int // index in faults; -1: a delay
	member int
}

// run plays a history: so many actions, with deviations. Then it goes on without any.
func (h *together) run(actions int, deviations []deviation) {
	for i := range actions {
		skip := 0
		for _, d := range deviations {
			switch {
			case d.at != i:
			case d.fault < 0:
				skip++
			default:
				m := h.members[d.member]
				h.logf("%s %s", m.id, faults[d.fault].name)
				faults[d.fault].do(h, m)
			}
		}
		h.next(skip)
	}
}

// next lets the next thing that is possible happen, after as many others as are skipped. If there is none, time passes.
func (h *together) next(skip int) {
	all := len(h.members) * paths
	for range 2 {
		for k := range all {
			path := (h.turn + k) % all
			if !h.possible(path) {
				continue
			}
			if skip > 0 {
				skip--
				continue
			}
			h.turn = path + 1
			h.does(path)
			return
		}
		skip = 0
	}
	h.now = h.now.Add(100 * time.Millisecond)
	for _, m := range h.members {
		if m.alive && m.greeted && len(m.up) == 0 {
			_, step := m.machine.Standing()
			h.feed(quorum.Beat{ReplicaID: m.id, Step: step})
		}
	}
	h.feed(quorum.Woken{})
	h.feed(quorum.Tick{})
}

// possible reports whether a path has a message, or the rank an action.
func (h *together) possible(path int) bool {
	m := h.members[path/paths]
	if !m.alive {
		return false
	}
	switch path % paths {
	case 0:
		return len(m.up) > 0
	case 1:
		return len(m.answers) > 0
	case 2:
		return len(m.notices) > 0
	}
	switch m.phase {
	case "asks":
		return false
	case "waits":
		return m.failed[m.result.QuorumID] || h.now.Sub(m.since) > timeout || h.arrived[fmt.Sprint(m.result.QuorumID, m.step)] == len(m.result.ReplicaIDs)
	}
	return true
}

func (h *together) logf(format string, args ...any) {
	h.log = append(h.log, fmt.Sprintf(format, args...))
}

// broken returns which rule the history has broken; empty: none.
func (h *together) broken(before []commitment) string {
	// All groups that commit a step in one quorum took part in all of its collectives, so a step has two histories only if one of the
	// quorums ended without all of its members.
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
	for _, m := range h.members {
		made := 0
		for _, c := range h.commits[len(before):] {
			if c.member == m.id {
				made++
			}
		}
		if m.alive && made < 3 {
			return fmt.Sprintf("%s has committed %d steps at the end, when nothing fails any more", m.id, made)
		}
	}
	// At the end all live groups are together.
	var last *member
	for _, m := range h.members {
		if !m.alive {
			continue
		}
		if last != nil && (m.committed != last.committed || max(m.step-last.step, last.step-m.step) > 1) {
			return fmt.Sprintf("%s is at step %d of quorum %d, %s at step %d of quorum %d", last.id, last.step, last.committed, m.id, m.step, m.committed)
		}
		last = m
	}
	return ""
}

// timeout is that of a collective.
const timeout = 5 * time.Second

const (
	horizon = 90  // actions in which a history may deviate
	rest    = 250 // actions after them
)

func play(groups, running int, deviations []deviation) (*together, string) {
	h := newTogether(groups)
	for _, m := range h.members[:running] {
		h.start(m)
	}
	h.run(horizon, deviations)
	before := slices.Clone(h.commits)
	h.run(rest, nil)
	return h, h.broken(before)
}

var pairsFlag = flag.Bool("pairs", false, "TestAllHistoriesOfFewMembers: all pairs of deviations, which takes an hour, and not one of some hundred")

func TestAllHistoriesOfFewMembers(t *testing.T) {
	histories := 0
	check := func(groups, running int, deviations ...deviation) {
		histories++
		if h, why := play(groups, running, deviations); why != "" {
			require.Fail(t, why, "%d of %d groups, %+v\n%s", running, groups, deviations, strings.Join(h.log, "\n"))
		}
	}
	stride := 4001 // a prime: the pairs of all kinds are played
	if *pairsFlag {
		stride = 1
	}
	pair := 0
	for groups := 1; groups <= 4; groups++ {
		for running := max(1, groups-1); running <= groups; running++ {
			check(groups, running)
			var all []deviation
			for at := range horizon {
				all = append(all, deviation{at, -1, 0})
				for f := range faults {
					for m := range groups {
						all = append(all, deviation{at, f, m})
					}
				}
			}
			for i, first := range all {
				check(groups, running, first)
				for _, second := range all[i+1:] {
					if pair++; pair%stride == 0 {
						check(groups, running, first, second)
					}
				}
			}
		}
	}
	t.Log(histories)
}
