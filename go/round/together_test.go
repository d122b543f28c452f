package round

import (
	"fmt"
	"slices"
	"time"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/recovery"
)

// This file plays the lighthouse's machine together with the machines of up to four groups of one rank, in
// all histories with a bounded number of deviations from one schedule (delay-bounded scheduling: Emmi,
// Qadeer, Rakamarić, POPL 2011). A deviation delays what would happen next, or is an event such as a failure
// (histories_test.go). Messages of one path arrive in order; a group receives quorums and notices by two
// paths. The last group may be one of upstream: it has no stream, so it asks for each step, receives no
// notices, and reports neither the quorum of its last commit nor the one that it is in.

// together is one history.
type together struct {
	now        time.Time
	lighthouse *quorum.Machine
	kept       quorum.Keep // on the disk of the lighthouse
	members    []*member
	waiters    map[quorum.WaiterID]*member
	waiter     quorum.WaiterID
	arrived    map[collective]int // how many members have arrived at it
	commits    []commitment
	formed     []*quorum.Quorum
	turn       int
	played     int // actions
	lost       int // failed attempts
	faults     int
	restarts   int
	timeouts   int  // waits for a member that did not take part, until the timeout of the collective
	logs       bool // whether the log is written
	log        []string
}

type collective struct{ quorumID, step int64 }

type commitment struct {
	id, step, quorumID int64
	member             string
}

// member is a group: its machine, the model of its rank, and its stream.
type member struct {
	id       string
	upstream bool
	alive    bool
	greeted  bool
	machine  *Machine
	quorum   *quorum.Quorum // the one that it received last

	up      []quorum.Event // to the lighthouse
	answers []Event        // from it, by one path
	notices []Event        // by the other one
	asking  quorum.WaiterID
	round   uint64

	// The rank.
	step, committed, failures int64
	stands                    int64 // the step that it may begin without a quorum; -1: none
	result                    *recovery.Result
	phase                     string // "", asks, trains, waits, left
	failed                    map[int64]bool
	healed                    bool
	loses                     bool      // fault: its next step fails before it has reduced
	votesNo                   bool      // fault: it votes against its next step, after it has reduced
	ends                      bool      // it ends between two steps
	away                      time.Time // until then it has no stream
	drained                   bool      // an operator has asked it to leave
	lost                      int       // its failed attempts
	late                      [3]int    // for each path: nothing arrives before so many actions
	since                     time.Time // when it began to wait for the others
}

var togetherPolicy = quorum.Policy{
	MinReplicas: 1, JoinTimeout: 10 * time.Second, HeartbeatTimeout: 5 * time.Second,
	SuspectGrace: 200 * time.Millisecond,
}

func newTogether(groups int) *together {
	h := &together{now: epoch, waiters: map[quorum.WaiterID]*member{}, arrived: map[collective]int{}}
	h.lighthouse = quorum.NewMachine(togetherPolicy, epoch, 0)
	for i := range groups {
		h.members = append(h.members, &member{id: string(rune('a' + i)), stands: -1, committed: -1,
			failed: map[int64]bool{}})
	}
	return h
}

func (h *together) start(m *member) {
	m.alive = true
	m.machine = NewMachine(Group{ReplicaID: m.id, Address: "http://" + m.id, WorldSize: 1})
	if !m.upstream {
		h.greet(m)
	}
}

// greet begins another stream: what was on its way on the one before is lost, and the shell sends again what
// the lighthouse has to know.
func (h *together) greet(m *member) {
	m.up, m.answers, m.notices, m.late, m.away = nil, nil, nil, [3]int{}, time.Time{}
	standsIn, step := m.machine.Standing()
	greeting := quorum.Greeted{ReplicaID: m.id, StandsIn: standsIn, Step: step}
	if m.quorum != nil {
		greeting.Known = quorum.Claim{QuorumID: m.quorum.ID, Step: m.quorum.Past().Step}
	}
	m.up = append(m.up, greeting)
	m.greeted = true
	h.group(m, Reached{})
	h.again(m)
	if m.phase == "left" {
		h.leave(m)
	}
}

// leave reports that a drained group has ended its last step.
func (h *together) leave(m *member) {
	_, step := m.machine.Standing()
	m.phase, m.up = "left", append(m.up, quorum.Leaving{ReplicaID: m.id, Step: step})
}

// notify sends a notice to a member that has a stream.
func (h *together) notify(id string, e Event) {
	if m := h.of(id); m.alive && !m.upstream && m.away.IsZero() {
		m.notices = append(m.notices, e)
	}
}

// feed gives the lighthouse an event, and does what follows.
func (h *together) feed(e quorum.Event) {
	for _, action := range h.lighthouse.Step(e, h.now) {
		switch a := action.(type) {
		case quorum.Deliver:
			h.formed = append(h.formed, a.Quorum)
			h.logf("quorum %d at step %d of %d, stands: %t", a.Quorum.ID, a.Quorum.Members[0].Step,
				len(a.Quorum.Members), a.Quorum.Stands)
			for _, w := range a.Waiters {
				h.deliver(w, a.Quorum)
			}
		case quorum.Redeliver:
			h.deliver(a.Waiter, a.Quorum)
		case quorum.Failed:
			h.logf("%s failed: %s", a.ReplicaID, a.Reason)
			for _, m := range h.members {
				h.notify(m.id, MemberFailed{QuorumID: a.QuorumID, ReplicaID: a.ReplicaID, Reason: a.Reason})
			}
		case quorum.Over:
			h.notify(a.ReplicaID, MemberFailed{QuorumID: a.QuorumID, ReplicaID: a.ReplicaID,
				Reason: a.Reason})
		case quorum.Call:
			for _, id := range a.ReplicaIDs {
				h.notify(id, Called{a.QuorumID})
			}
		case quorum.Round:
			h.logf("the round after %d is at step %d", a.QuorumID, a.Step)
			for _, id := range a.ReplicaIDs {
				h.notify(id, RoundKnown{a.QuorumID, a.Step})
			}
		case quorum.Welcome:
			if a.Draining != "" {
				h.notify(a.ReplicaID, Drained{})
			}
		case quorum.Drain:
			h.notify(a.ReplicaID, Drained{})
		case quorum.Release:
			if m := h.of(a.ReplicaID); m.phase == "left" {
				m.alive = false
				h.breaks(m)
			}
		case quorum.Keep:
			h.kept = a
		case quorum.Recall:
			if m := h.of(a.ReplicaID); m.alive && m.quorum != nil {
				shown := *m.quorum
				shown.Members = slices.Clone(shown.Members)
				m.up = append(m.up, quorum.Recalled{Quorum: &shown, From: m.id,
					Kept: quorum.Kept{Highest: m.quorum.ID}})
			}
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
			h.send(m, a.Round, a.Member)
		case CancelLighthouse:
			if m.asking != 0 {
				m.up = append(m.up, quorum.Withdrawn{ReplicaID: m.id, Waiter: m.asking})
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
			m.up = append(m.up, quorum.Parting{ReplicaID: m.id, QuorumID: a.QuorumID, Step: a.Step,
				Reason: a.Reason})
		case NeedQuorum:
			m.up = append(m.up, quorum.Changes{ReplicaID: m.id, Reason: a.Reason})
		case RequestDrain:
			m.up = append(m.up, quorum.Drained{ReplicaID: m.id, Reason: "its rank"})
		case Fail:
			m.phase = ""
		}
	}
}

// send sends a group's request.
func (h *together) send(m *member, round uint64, request quorum.Member) {
	h.waiter++
	h.waiters[h.waiter] = m
	m.asking, m.round = h.waiter, round
	ask := quorum.Asked{Waiter: h.waiter, Member: request}
	if m.upstream {
		ask.Member.CommittedQuorumID = 0
	} else {
		ask.KnownQuorumID, ask.Number, ask.Recallable = m.machine.knownQuorumID, uint64(h.waiter), true
	}
	m.up = append(m.up, ask)
}

func (h *together) decided(m *member, a AnswerVote) {
	m.phase = ""
	if !a.ShouldCommit {
		h.logf("%s loses step %d", m.id, m.step)
		h.lost++
		m.lost++
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
	if m.result.Draining {
		h.leave(m)
	}
	if m.stands = -1; a.Stands {
		m.stands = m.step
	}
}

// act lets a rank do its next action, and reports whether it had one.
func (h *together) act(m *member) bool {
	switch m.phase {
	case "":
		if m.ends {
			m.alive = false
			return true
		}
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
		h.arrived[collective{m.result.QuorumID, m.step}]++
		m.phase, m.since = "waits", h.now
	case "waits":
		switch {
		case h.arrived[collective{m.result.QuorumID, m.step}] == len(m.result.ReplicaIDs):
			h.vote(m, !m.votesNo)
			m.votesNo = false
		case m.failed[m.result.QuorumID] || h.now.Sub(m.since) > timeout || h.aborted(m):
			if !m.failed[m.result.QuorumID] && m.quorum.Stands {
				h.timeouts++
			}
			h.vote(m, false)
		default:
			return false
		}
	default:
		return false
	}
	return true
}

// aborted reports whether the connections of a quorum in which each step is asked for have ended: a member of
// it is in a later one.
func (h *together) aborted(m *member) bool {
	return !m.quorum.Stands && slices.ContainsFunc(h.members, func(o *member) bool {
		return o.result != nil && o.result.QuorumID > m.result.QuorumID &&
			slices.Contains(m.result.ReplicaIDs, o.id)
	})
}

func (h *together) vote(m *member, yes bool) {
	h.waiter++
	h.group(m, Voted{Waiter: WaiterID(h.waiter), Step: m.step, ShouldCommit: yes})
}

// paths are the things that can happen in a history, in the order of the schedule: for each member a message
// on one of three paths, and an action of its rank.
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
		m.quorum = e.Quorum
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

// breaks ends the stream of a member, and with it its requests.
func (h *together) breaks(m *member) {
	for w := quorum.WaiterID(1); w <= h.waiter; w++ {
		if h.waiters[w] == m {
			delete(h.waiters, w)
			h.feed(quorum.Withdrawn{ReplicaID: m.id, Waiter: w})
		}
	}
	if !m.upstream {
		h.feed(quorum.Disconnected{ReplicaID: m.id})
	}
}

// again sends a request once more: the shell retries it.
func (h *together) again(m *member) {
	g := &m.machine.gathering
	if g.round == 0 {
		return
	}
	request, _ := merge(quorum.Member{ReplicaID: m.id, Address: "http://" + m.id, WorldSize: 1}, g.asked)
	h.send(m, g.round, request)
}

// run plays a history: so many actions, with deviations. Then it goes on without any.
func (h *together) run(actions int, deviations []deviation) {
	for i := range actions {
		skip := 0
		for _, d := range deviations {
			switch {
			case d.at != i:
			case d.event < 0:
				skip++
			default:
				m := h.members[d.member]
				h.logf("%s %s", m.id, events[d.event].name)
				events[d.event].do(h, m)
			}
		}
		h.next(skip)
	}
}

// next lets the next thing that is possible happen, after as many others as are skipped. If there is none,
// and from time to time, time passes.
func (h *together) next(skip int) {
	if h.played++; h.played%50 == 0 {
		h.passes()
		return
	}
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
	h.passes()
}

// passes lets time pass.
func (h *together) passes() {
	h.now = h.now.Add(100 * time.Millisecond)
	for _, m := range h.members {
		if m.alive && !m.away.IsZero() && !h.now.Before(m.away) {
			h.greet(m)
		}
		if m.alive && m.away.IsZero() && (m.greeted || m.upstream) && len(m.up) == 0 {
			_, step := m.machine.Standing()
			h.feed(quorum.Beat{ReplicaID: m.id, Step: step, Call: m.upstream})
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
	if way := path % paths; way < len(m.late) && h.played < m.late[way] {
		return false
	}
	switch path % paths {
	case 0:
		return len(m.up) > 0 && m.away.IsZero()
	case 1:
		return len(m.answers) > 0
	case 2:
		return len(m.notices) > 0
	}
	switch m.phase {
	case "asks", "left":
		return false
	case "waits":
		return m.failed[m.result.QuorumID] || h.now.Sub(m.since) > timeout || h.aborted(m) ||
			h.arrived[collective{m.result.QuorumID, m.step}] == len(m.result.ReplicaIDs)
	}
	return true
}

func (h *together) logf(format string, args ...any) {
	if h.logs {
		h.log = append(h.log, fmt.Sprintf(format, args...))
	}
}
