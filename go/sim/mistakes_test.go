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

// Planted mistakes: some were made in other implementations, others would be easy to make. The checker must find each of them.
var mistakes = []struct {
	mistake
	found []string // one of these rules
}{
	{mistake{name: "one waiter gets no answer", lighthouse: deliveries(func(d *quorum.Deliver) {
		if n := len(d.Waiters); n > 1 {
			d.Waiters = d.Waiters[:n-1]
		}
	})}, []string{ruleBroadcast}},

	{mistake{name: "withdrawn requests stay", anySize: true, lighthouse: spoil(func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
		if _, ok := e.(quorum.Withdrawn); ok {
			return nil
		}
		return m.Step(e, now)
	})}, []string{ruleMembers, ruleBroadcast, ruleMajority}},

	{mistake{name: "quorum_id begins at 0 again", start: func(time.Time) time.Time { return time.UnixMilli(0) },
		lighthouse: requests(func(a *quorum.Asked) { a.KnownQuorumID = 0 })}, []string{ruleIDs, ruleOneSet}},

	{mistake{name: "steps compared as text", group: steps(func(members []quorum.Member) []int64 {
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

	{mistake{name: "heartbeats count only with a request", anySize: true, lighthouse: spoil(func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
		if _, ok := e.(quorum.Beat); ok {
			return nil
		}
		return m.Step(e, now)
	})}, []string{ruleMajority, ruleForms, ruleCause, ruleNewcomer}},

	{mistake{name: "heartbeats kept for ever", lighthouse: keepHeartbeats}, []string{ruleMemory, ruleForms}},

	{mistake{name: "heartbeats kept for ever, memory unchecked", anySize: true, lighthouse: keepHeartbeats}, []string{ruleForms, ruleBroadcast}},

	{mistake{name: "newcomers never accepted", lighthouse: requests(func(a *quorum.Asked) { a.Member.ShrinkOnly = true })},
		[]string{ruleNewcomer, ruleForms}},

	{mistake{name: "quorum_id stays when members change", lighthouse: func(m *quorum.Machine) lighthouseMachine {
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

	{mistake{name: "no join_timeout_ms", policy: func(p quorum.Policy) quorum.Policy {
		p.JoinTimeout = 1
		return p
	}}, []string{ruleMajority}},

	{mistake{name: "no min_replicas", policy: func(p quorum.Policy) quorum.Policy {
		p.MinReplicas = 1
		return p
	}}, []string{ruleMajority}},

	{mistake{name: "no timer", anySize: true, lighthouse: spoil(func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
		if _, ok := e.(quorum.Tick); ok {
			return nil
		}
		return m.Step(e, now)
	})}, []string{ruleForms}},

	{mistake{name: "an error sent to one rank only", group: spoilGroup(func(m *round.Machine, e round.Event, now time.Time) []round.Action {
		actions := m.Step(e, now)
		if known, ok := e.(round.QuorumKnown); ok && known.Failure != nil && len(actions) > 1 {
			return actions[:1]
		}
		return actions
	})}, []string{ruleWaiters}},

	{mistake{name: "a killed rank unnoticed", group: spoilGroup(func(m *round.Machine, e round.Event, now time.Time) []round.Action {
		if _, ok := e.(round.RankDisconnected); ok {
			return nil
		}
		return m.Step(e, now)
	})}, []string{ruleWaiters}},

	{mistake{name: "a rank's no lost in the vote", group: spoilGroup(func(m *round.Machine, e round.Event, now time.Time) []round.Action {
		if v, ok := e.(round.Voted); ok {
			v.ShouldCommit = true
			e = v
		}
		return m.Step(e, now)
	})}, []string{ruleVote}},

	{mistake{name: "overtaken requests accepted", anySize: true,
		lighthouse: requests(func(a *quorum.Asked) { a.Number = 0 }),
		setup:      func(s *Setup) { s.Calls = ^Slots(0) }}, []string{ruleStale}},

	{mistake{name: "a healed group keeps its weights", keepState: true}, []string{ruleEqual}},

	{mistake{name: "a replay reduces sums", replaySums: true}, []string{ruleOwn}},

	{mistake{name: "Slept ignored", lighthouse: ignoring(to[quorum.Slept]),
		setup: many(10, PauseLighthouse, ClockLighthouse)}, []string{ruleCause, ruleMemory, ruleMajority}},

	{mistake{name: "evicted groups not notified", group: groupIgnoring[round.MemberFailed](), setup: many(6)}, []string{ruleEvicted}},

	{mistake{name: "evicted groups not notified by peers", group: spoilGroup(func(m *round.Machine, e round.Event, now time.Time) []round.Action {
		return slices.DeleteFunc(m.Step(e, now), func(a round.Action) bool { _, notifies := a.(round.NotifyFailed); return notifies })
	}), setup: many(6, CutLighthouse, CutUp, Stall)}, []string{ruleEvicted}},

	{mistake{name: "silent groups commit", group: spoilGroup(func(m *round.Machine, e round.Event, now time.Time) []round.Action {
		if v, ok := e.(round.Voted); ok {
			v.Fenced = false
			e = v
		}
		return m.Step(e, now)
	}), setup: many(6, Pause)}, []string{ruleEvicted}},

	{mistake{name: "failed ranks not reported", anySize: true, lighthouse: ignoring(to[quorum.Incomplete]),
		setup: func(s *Setup) { s.Ranks = 2; many(6, DropRank, RankFails)(s) }}, []string{ruleForms, ruleMajority, ruleMemory, ruleCause}},

	{mistake{name: "broken connections ignored", anySize: true, lighthouse: ignoring(to[quorum.Disconnected])}, []string{ruleForms, ruleMajority}},

	{mistake{name: "leaving groups ignored", anySize: true, lighthouse: ignoring(to[quorum.Leaving]), setup: many(6, Drain)},
		[]string{ruleForms, ruleMajority, ruleCause}},

	{mistake{name: "groups that left released at once", lighthouse: spoil(func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
		actions := m.Step(e, now)
		if l, ok := e.(quorum.Leaving); ok {
			actions = append(actions, quorum.Release(l))
		}
		return actions
	}), setup: many(6, Drain)}, []string{ruleRelease}},

	{mistake{name: "answers to checks ignored", lighthouse: spoil(
		func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
			if c, ok := e.(quorum.Checked); ok {
				c.Reached = false
				e = c
			}
			return m.Step(e, now)
		}), setup: many(6, Accuse, Flaky, CutPeers)}, []string{ruleCause}},

	{mistake{name: "waiting members reported as computing", lighthouse: spoil(
		func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
			if p, ok := e.(quorum.Progressed); ok {
				p.Progress.Waits = false
				e = p
			}
			return m.Step(e, now)
		}), setup: many(6, Stall, Slow, CutPeers)}, []string{ruleCause}},

	{mistake{name: "recalled quorums ignored", lighthouse: ignoring(to[quorum.Recalled]),
		setup: func(s *Setup) { s.Calls = 0; many(10, KillLighthouse)(s) }}, []string{ruleMemory, ruleForms, ruleOneSet, ruleIDs, ruleMajority}},

	{mistake{name: "timed-out ranks not answered", group: groupIgnoring[round.Withdrawn](), setup: many(10)}, []string{ruleWaiters}},

	{mistake{name: "a closing server answers no call", group: groupIgnoring[round.Closed](), setup: many(10, Leave)}, []string{ruleWaiters}},

	{mistake{name: "groups behind do not heal", group: results(func(a *round.AnswerQuorum) { a.Result.Heal = false })},
		[]string{ruleHeal, ruleEqual}},

	{mistake{name: "heals from a group behind", group: results(func(a *round.AnswerQuorum) {
		if n := int64(len(a.Result.ReplicaIDs)); a.Result.Heal && n > 2 {
			s := &a.Result.Sources[0]
			s.ReplicaRank = (s.ReplicaRank + 1) % n
		}
	})}, []string{ruleHeal}},

	{mistake{name: "a group twice in the divisor", group: results(func(a *round.AnswerQuorum) {
		if a.Result.ReplicaRank == 0 {
			a.Result.MaxWorldSize++
		}
	})}, []string{ruleDivisor, ruleEqual}},

	{mistake{name: "all weights of one quorum", lighthouse: requests(func(a *quorum.Asked) {
		if a.Member.CommittedQuorumID > 0 {
			a.Member.CommittedQuorumID = 1
		}
	}), setup: func(s *Setup) {
		s.Policy.MinReplicas = 1
		many(8, Partition, CutLighthouse, LoseVote)(s)
	}}, []string{ruleEqual}},

	{mistake{name: "members unordered", lighthouse: deliveries(func(d *quorum.Deliver) {
		q := *d.Quorum
		q.Members = slices.Clone(q.Members)
		slices.Reverse(q.Members)
		d.Quorum = &q
	})}, []string{ruleMembers, ruleOneSet}},

	{mistake{name: "a waiter answered twice", lighthouse: deliveries(func(d *quorum.Deliver) {
		d.Waiters = append(slices.Clone(d.Waiters), d.Waiters[0])
	})}, []string{ruleBroadcast}},

	{mistake{name: "a replay of a committed step", replayBehind: true}, []string{ruleHeal, ruleEqual, ruleDivisor}},
}

// hunt searches for a seed whose history breaks a rule, and shrinks the history.
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

// findMistake fails the test unless one of the given rules finds the mistake, in a history that can be shrunk.
func findMistake(t *testing.T, m mistake, rules []string) {
	t.Helper()
	s, first := hunt(t, 2000, 400, shrinkTries(), func(s *Setup) { s.mistake = m })
	require.NotNil(t, first, "nothing was found")
	require.Contains(t, rules, first.Rule, first.Error())
	history := History(s, 60)
	t.Logf("found as: %v\n%s", first, history)
	require.Contains(t, history, "BROKEN: "+first.Rule)
	if testmain.Full() && !testmain.Race() && !m.long { // otherwise there is no time to shrink it completely
		require.LessOrEqual(t, len(s.Faults), 4, "a short history has few faults")
		require.LessOrEqual(t, strings.Count(history, "\n"), 70, "a short history has few lines")
	}
	require.Equal(t, history, History(s, 60), "the same setup gives the same history")
}
