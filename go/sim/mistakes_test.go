package sim

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
)

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
		if _, ok := e.(quorum.Withdrawn); ok {
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
	})}, []string{ruleMajority, ruleForms, ruleCause, ruleNewcomer}},

	{mistake{name: "heartbeats are kept for ever", lighthouse: keepHeartbeats}, []string{ruleMemory, ruleForms}},

	{mistake{name: "the same, and nobody counts the memory", anySize: true, lighthouse: keepHeartbeats}, []string{ruleForms, ruleBroadcast}},

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

	{mistake{name: "a killed rank is not noticed", group: spoilGroup(func(m *round.Machine, e round.Event, now time.Time) []round.Action {
		if _, ok := e.(round.RankDisconnected); ok {
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
	})}, []string{ruleBranch, ruleOneSet}},

	{mistake{name: "a member whose host does not answer votes, as if it had ended while it was bound", setup: several, silentIsEnded: true,
		lighthouse: endedVotes}, []string{ruleBranch}},

	{mistake{name: "a member that has ended votes, wherever it was", setup: several, lighthouse: endedVotes}, []string{ruleBranch}},

	{mistake{name: "who comes from another lighthouse does not say so", setup: several, anySize: true, lighthouse: greetings(func(g *quorum.Greeted) {
		g.Term, g.KnownQuorumID = 0, 0
	})}, []string{ruleBranch, ruleIDs, ruleOneSet, ruleMajority}},

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

	{mistake{name: "the lighthouse does not know that it stood still", lighthouse: deaf(to[quorum.Slept]),
		setup: many(10, PauseLighthouse, ClockLighthouse)}, []string{ruleCause, ruleMemory, ruleMajority}},

	{mistake{name: "a group is not told that it counts as failed", group: deafGroup[round.Evicted](), setup: many(6)}, []string{ruleEvicted}},

	{mistake{name: "a group that was silent for long commits", group: spoilGroup(func(m *round.Machine, e round.Event, now time.Time) []round.Action {
		if v, ok := e.(round.Voted); ok {
			v.Fenced = false
			e = v
		}
		return m.Step(e, now)
	}), setup: many(6, Pause)}, []string{ruleEvicted}},

	{mistake{name: "a group that lost a rank counts as healthy", anySize: true, lighthouse: deaf(to[quorum.Incomplete]),
		setup: func(s *Setup) { s.Ranks = 2; many(6, DropRank, RankDies)(s) }}, []string{ruleForms, ruleMajority, ruleMemory, ruleCause}},

	{mistake{name: "a broken connection is no suspicion", anySize: true, lighthouse: deaf(to[quorum.Disconnected])}, []string{ruleForms, ruleMajority}},

	{mistake{name: "a group that leaves is waited for", anySize: true, lighthouse: deaf(to[quorum.Leaving]), setup: many(6, Drain)},
		[]string{ruleForms, ruleMajority, ruleCause}},

	{mistake{name: "a group that left is released at once", lighthouse: spoil(func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
		actions := m.Step(e, now)
		if l, ok := e.(quorum.Leaving); ok {
			actions = append(actions, quorum.Release(l))
		}
		return actions
	}), setup: many(6, Drain)}, []string{ruleRelease}},

	{mistake{name: "a member that answered a check counts as one that did not", lighthouse: spoil(
		func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
			if c, ok := e.(quorum.Checked); ok {
				c.Reached = false
				e = c
			}
			return m.Step(e, now)
		}), setup: many(6, Accuse, Flaky, CutPeers)}, []string{ruleCause}},

	{mistake{name: "a member that waits for the others counts as stalled", lighthouse: spoil(
		func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
			if p, ok := e.(quorum.Progressed); ok {
				p.Progress.Waits = false
				e = p
			}
			return m.Step(e, now)
		}), setup: many(6, Hang, Slow, CutPeers)}, []string{ruleCause}},

	{mistake{name: "a lighthouse that starts does not listen to what members know", lighthouse: deaf(to[quorum.Recalled]),
		setup: func(s *Setup) { s.Calls = 0; many(10, KillLighthouse)(s) }}, []string{ruleMemory, ruleForms, ruleOneSet, ruleIDs, ruleMajority}},

	{mistake{name: "a rank that gave up is not answered", group: deafGroup[round.GaveUp](), setup: many(10)}, []string{ruleWaiters}},

	{mistake{name: "a server that ends leaves its ranks waiting", group: deafGroup[round.Closed](), setup: many(10, Leave)}, []string{ruleWaiters}},

	{mistake{name: "a group that is behind is not told to heal", group: results(func(a *round.AnswerQuorum) { a.Result.Heal = false })},
		[]string{ruleHeal, ruleEqual}},

	{mistake{name: "a group heals from one that is behind, too", group: results(func(a *round.AnswerQuorum) {
		if n := int64(len(a.Result.ReplicaIDs)); a.Result.Heal && n > 2 {
			s := &a.Result.Sources[0]
			s.ReplicaRank = (s.ReplicaRank + 1) % n
		}
	})}, []string{ruleHeal}},

	{mistake{name: "a group counts itself twice in the divisor", group: results(func(a *round.AnswerQuorum) {
		if a.Result.ReplicaRank == 0 {
			a.Result.MaxWorldSize++
		}
	})}, []string{ruleDivisor, ruleEqual}},

	{mistake{name: "weights are all said to be of one quorum", lighthouse: requests(func(a *quorum.Asked) {
		if a.Member.CommittedQuorumID > 0 {
			a.Member.CommittedQuorumID = 1
		}
	}), setup: func(s *Setup) {
		s.Lighthouses, s.Policy.MinReplicas = 1, 1
		many(8, Partition, CutLighthouse, LoseVote)(s)
	}}, []string{ruleEqual}},

	{mistake{name: "the members of a quorum are in no order", lighthouse: deliveries(func(d *quorum.Deliver) {
		q := *d.Quorum
		q.Members = slices.Clone(q.Members)
		slices.Reverse(q.Members)
		d.Quorum = &q
	})}, []string{ruleMembers, ruleOneSet}},

	{mistake{name: "one who waits is answered twice", lighthouse: deliveries(func(d *quorum.Deliver) {
		d.Waiters = append(slices.Clone(d.Waiters), d.Waiters[0])
	})}, []string{ruleBroadcast}},

	{mistake{name: "a replay of a step that others have committed", replayBehind: true}, []string{ruleHeal, ruleEqual, ruleDivisor}},
}

// endedVotes takes every end for that of a member that was bound.
var endedVotes = spoil(func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
	actions := m.Step(e, now)
	if ended, is := e.(quorum.Ended); is {
		actions = append(actions, m.Step(quorum.GivenUp{ReplicaIDs: []string{ended.ReplicaID}}, now)...)
	}
	return actions
})

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
			findMistake(t, m.mistake, m.found)
		})
	}
}

// findMistake fails the test unless one of some rules finds a mistake, in a history that is short once it is shrunk.
func findMistake(t *testing.T, m mistake, rules []string) {
	t.Helper()
	s, first := hunt(t, 2000, 400, shrinkTries(), func(s *Setup) { s.mistake = m })
	require.NotNil(t, first, "nothing was found")
	require.Contains(t, rules, first.Rule, first.Error())
	history := History(s, 60)
	t.Logf("found as: %v\n%s", first, history)
	require.Contains(t, history, "BROKEN: "+first.Rule)
	if testmain.Full() && !raceEnabled && !m.long { // else there was no time to make it as short as it gets
		require.LessOrEqual(t, len(s.Faults), 4, "a short history has few faults")
		require.LessOrEqual(t, strings.Count(history, "\n"), 70, "and few lines")
	}
	require.Equal(t, history, History(s, 60), "it replays")
}
