package sim

import (
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
)

// spoiled is a lighthouse's machine with something wrong in front of it.
type spoiled struct {
	*quorum.Machine
	step func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action
}

func (s spoiled) Step(e quorum.Event, now time.Time) []quorum.Action {
	return s.step(s.Machine, e, now)
}

func spoil(step func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action) func(*quorum.Machine) lighthouseMachine {
	return func(m *quorum.Machine) lighthouseMachine { return spoiled{m, step} }
}

// deliveries changes what the lighthouse delivers.
func deliveries(change func(*quorum.Deliver)) func(*quorum.Machine) lighthouseMachine {
	return spoil(func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
		actions := m.Step(e, now)
		for i, a := range actions {
			if d, ok := a.(quorum.Deliver); ok {
				change(&d)
				actions[i] = d
			}
		}
		return actions
	})
}

// requests changes what the lighthouse is asked.
func requests(change func(*quorum.Asked)) func(*quorum.Machine) lighthouseMachine {
	return spoil(func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
		if a, ok := e.(quorum.Asked); ok {
			change(&a)
			e = a
		}
		return m.Step(e, now)
	})
}

// greetings changes what members say when they come.
func greetings(change func(*quorum.Greeted)) func(*quorum.Machine) lighthouseMachine {
	return spoil(func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
		if g, ok := e.(quorum.Greeted); ok {
			change(&g)
			e = g
		}
		return m.Step(e, now)
	})
}

// several lighthouses, and more cuts than else.
func several(s *Setup) {
	s.Lighthouses = 2
	s.Slots = 3 + int(s.Seed%3)
	s.Policy.MinReplicas = 1
	s.Faults = drawFaults(rand.New(rand.NewPCG(s.Seed, 3)), *s, 10)
}

// keepHeartbeats lets nobody die whose heartbeat ever came.
func keepHeartbeats(m *quorum.Machine) lighthouseMachine {
	var ids []string
	return spoiled{m, func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
		switch e := e.(type) {
		case quorum.Beat:
			if !slices.Contains(ids, e.ReplicaID) {
				ids = append(ids, e.ReplicaID)
			}
		case quorum.Tick:
			for _, id := range ids {
				m.Step(quorum.Beat{ReplicaID: id}, now)
			}
		}
		return m.Step(e, now)
	}}
}

type spoiledGroup struct {
	m    *round.Machine
	step func(m *round.Machine, e round.Event, now time.Time) []round.Action
}

func (s spoiledGroup) Step(e round.Event, now time.Time) []round.Action { return s.step(s.m, e, now) }

func spoilGroup(step func(m *round.Machine, e round.Event, now time.Time) []round.Action) func(round.Group, *round.Machine) groupMachine {
	return func(_ round.Group, m *round.Machine) groupMachine { return spoiledGroup{m, step} }
}

// steps lets the groups see other steps in a quorum than there are.
func steps(see func(members []quorum.Member) []int64) func(round.Group, *round.Machine) groupMachine {
	return spoilGroup(func(m *round.Machine, e round.Event, now time.Time) []round.Action {
		known, ok := e.(round.QuorumKnown)
		if !ok || known.Quorum == nil {
			return m.Step(e, now)
		}
		q := *known.Quorum
		q.Members = slices.Clone(q.Members)
		seen := see(q.Members)
		most := slices.Index(seen, slices.Max(seen))
		for i := range q.Members {
			q.Members[i].Step, q.Members[i].CommittedQuorumID = seen[i], 0
		}
		known.Quorum = &q
		actions := m.Step(known, now)
		for i, a := range actions {
			if a, ok := a.(round.AnswerQuorum); ok {
				a.Result.MaxStep = e.(round.QuorumKnown).Quorum.Members[most].Step
				actions[i] = a
			}
		}
		return actions
	})
}

// Mistakes that others made, or that would be easy to make. The checker must find each of them.
var mistakes = []struct {
	mistake
	found []string // one of these rules
}{
	{mistake{name: "the lighthouse forgets to tell one who waits", lighthouse: deliveries(func(d *quorum.Deliver) {
		if n := len(d.Waiters); n > 1 {
			d.Waiters = d.Waiters[:n-1]
		}
	})}, []string{ruleBroadcast}},

	{mistake{name: "who gave up stays registered", anySize: true, lighthouse: spoil(func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
		if _, ok := e.(quorum.GaveUp); ok {
			return nil
		}
		return m.Step(e, now)
	})}, []string{ruleMembers, ruleBroadcast, ruleMajority}},

	{mistake{name: "quorum_id begins at 0 again", start: func(time.Time) time.Time { return time.UnixMilli(0) },
		lighthouse: requests(func(a *quorum.Asked) { a.KnownQuorumID = 0 })}, []string{ruleIDs, ruleOneSet}},

	{mistake{name: "steps are compared as text", group: steps(func(members []quorum.Member) []int64 {
		order := make([]string, len(members))
		for i, m := range members {
			order[i] = strconv.FormatInt(m.Step, 10)
		}
		slices.Sort(order)
		seen := make([]int64, len(members))
		for i, m := range members {
			seen[i] = int64(slices.Index(order, strconv.FormatInt(m.Step, 10)))
		}
		return seen
	})}, []string{ruleHeal}},

	{mistake{name: "one step behind counts as up to date", group: steps(func(members []quorum.Member) []int64 {
		seen := make([]int64, len(members))
		most := int64(0)
		for _, m := range members {
			most = max(most, m.Step)
		}
		for i, m := range members {
			if seen[i] = m.Step; m.Step == most-1 {
				seen[i] = most
			}
		}
		return seen
	})}, []string{ruleHeal, ruleEqual}},

	{mistake{name: "heartbeats of who does not ask are not counted", anySize: true, lighthouse: spoil(func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
		if _, ok := e.(quorum.Beat); ok {
			return nil
		}
		return m.Step(e, now)
	})}, []string{ruleMajority, ruleForms}},

	{mistake{name: "heartbeats are kept for ever", lighthouse: keepHeartbeats}, []string{ruleMemory, ruleForms}},

	{mistake{name: "the same, and nobody counts the memory", anySize: true, lighthouse: keepHeartbeats}, []string{ruleForms}},

	{mistake{name: "newcomers are never let in", lighthouse: requests(func(a *quorum.Asked) { a.Member.ShrinkOnly = true })},
		[]string{ruleNewcomer, ruleForms}},

	{mistake{name: "quorum_id stays when the members change", lighthouse: func(m *quorum.Machine) lighthouseMachine {
		first := int64(0)
		return spoiled{m, func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
			actions := m.Step(e, now)
			for _, a := range actions {
				if d, ok := a.(quorum.Deliver); ok {
					if first == 0 {
						first = d.Quorum.ID
					}
					d.Quorum.ID = first
				}
			}
			return actions
		}}
	}}, []string{ruleOneSet, ruleIDs, ruleProgress}},

	{mistake{name: "quorum_id stays after failed commits", lighthouse: requests(func(a *quorum.Asked) { a.Member.CommitFailures = 0 })},
		[]string{ruleProgress}},

	{mistake{name: "the lighthouse does not wait for join_timeout_ms", policy: func(p quorum.Policy) quorum.Policy {
		p.JoinTimeout = 1
		return p
	}}, []string{ruleMajority}},

	{mistake{name: "min_replicas is not looked at", policy: func(p quorum.Policy) quorum.Policy {
		p.MinReplicas = 1
		return p
	}}, []string{ruleMajority}},

	{mistake{name: "the timer of the lighthouse does nothing", anySize: true, lighthouse: spoil(func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
		if _, ok := e.(quorum.Tick); ok {
			return nil
		}
		return m.Step(e, now)
	})}, []string{ruleForms}},

	{mistake{name: "an error of the lighthouse is told to one rank only", group: spoilGroup(func(m *round.Machine, e round.Event, now time.Time) []round.Action {
		actions := m.Step(e, now)
		if known, ok := e.(round.QuorumKnown); ok && known.Failure != nil && len(actions) > 1 {
			return actions[:1]
		}
		return actions
	})}, []string{ruleWaiters}},

	{mistake{name: "a dead rank is not noticed", group: spoilGroup(func(m *round.Machine, e round.Event, now time.Time) []round.Action {
		if _, ok := e.(round.RankGone); ok {
			return nil
		}
		return m.Step(e, now)
	})}, []string{ruleWaiters}},

	{mistake{name: "a rank's no is lost in the vote", group: spoilGroup(func(m *round.Machine, e round.Event, now time.Time) []round.Action {
		if v, ok := e.(round.Voted); ok {
			v.ShouldCommit = true
			e = v
		}
		return m.Step(e, now)
	})}, []string{ruleVote}},

	{mistake{name: "a request that was held up on the way is believed", anySize: true,
		lighthouse: requests(func(a *quorum.Asked) { a.Number = 0 }),
		setup:      func(s *Setup) { s.Lighthouses, s.Calls = 1, ^Slots(0) }}, []string{ruleStale}},

	{mistake{name: "a lighthouse does not know that there are others", setup: several, lighthouse: greetings(func(g *quorum.Greeted) {
		g.Seat = quorum.Seat{Of: 1}
	})}, []string{rulePlace, ruleOneSet}},

	{mistake{name: "a host that does not answer counts as one that says that its process is gone", setup: several, silentIsGone: true},
		[]string{rulePlace}},

	{mistake{name: "who comes from another lighthouse does not say so", setup: several, anySize: true, lighthouse: greetings(func(g *quorum.Greeted) {
		g.Term = 0
	})}, []string{rulePlace, ruleIDs, ruleOneSet}},

	{mistake{name: "members never go back to an earlier lighthouse", setup: several, lighthouse: spoil(
		func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
			switch asked := e.(type) {
			case quorum.Reaches:
				return nil
			case quorum.Asked:
				asked.Reaches = 0
				e = asked
			}
			return m.Step(e, now)
		})}, []string{ruleForms}},

	{mistake{name: "a healed group keeps its own weights", keepState: true}, []string{ruleEqual}},

	{mistake{name: "a replay reduces what was reduced before, not what was kept", replaySums: true}, []string{ruleOwn}},

	{mistake{name: "a replay of a step that others have committed", replayBehind: true}, []string{ruleHeal, ruleEqual, ruleDivisor}},
}

// hunt looks for a seed whose history breaks a rule, and shrinks it.
func hunt(t *testing.T, seeds, rounds, tries int, change func(*Setup)) (Setup, *Violation) {
	t.Helper()
	for seed := range uint64(seeds) {
		s := Draw(seed, 2+int(seed%3), rounds) // few groups make short histories
		change(&s)
		if s.mistake.setup != nil {
			s.mistake.setup(&s)
		}
		if b := Run(s, nil).Broken; b != nil {
			return Shrink(s, b.Rule, tries), b
		}
	}
	return Setup{}, nil
}

func TestKnownMistakesAreFound(t *testing.T) {
	t.Parallel()
	for _, m := range mistakes {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			s, first := hunt(t, 200, 400, budget(400, 6), func(s *Setup) { s.mistake = m.mistake })
			require.NotNil(t, first, "nothing was found")
			require.Contains(t, m.found, first.Rule, first.Error())
			history := History(s, 60)
			t.Logf("found as: %v\n%s", first, history)
			require.Contains(t, history, "BROKEN: "+first.Rule)
			if !raceEnabled {
				require.LessOrEqual(t, len(s.Faults), 3, "a short history has few faults")
				require.LessOrEqual(t, strings.Count(history, "\n"), 65, "and few lines")
			}
			require.Equal(t, history, History(s, 60), "it replays")
		})
	}
}
