package round

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
	"github.com/torchft/torchft/go/quorum"
)

// many is a group of n ranks that have begun a step.
type many struct {
	machine *Machine
	n       int
	waiter  WaiterID
	actions []Action
}

func newMany(n int) *many {
	return &many{machine: NewMachine(Group{ReplicaID: "g", Address: "http://g", StoreAddress: "s",
		WorldSize: int64(n)}), n: n}
}

// each feeds the machine one event of each rank from the given one on, not in the order of the ranks.
func (c *many) each(from int, event func(rank int64) Event) {
	for i := range c.n {
		if rank := (i * 7919) % c.n; rank >= from {
			c.waiter++
			c.actions = append(c.actions, c.machine.Step(event(int64(rank)), epoch)...)
		}
	}
}

func (c *many) ask(step int64) func(int64) Event {
	return func(rank int64) Event {
		return QuorumAsked{Request: Request{GroupRank: rank, Step: step, ReconfigureHandle: fmt.Sprint("h", rank)},
			Waiter: c.waiter, Deadline: epoch.Add(time.Minute)}
	}
}

func (c *many) vote(rank int64) Event {
	return Voted{Waiter: c.waiter, GroupRank: rank, Step: 1, ShouldCommit: true}
}

func (c *many) withdraw(int64) Event { return Withdrawn{Waiter: c.waiter, Timeout: true} }

func disconnected(rank int64) Event { return RankDisconnected{rank} }

// sameOfAll has events in which all ranks of a group do the same.
var sameOfAll = map[string]func(t *testing.T, c *many){
	"a quorum and a vote": func(t *testing.T, c *many) {
		c.each(0, c.ask(1))
		asked := slices.IndexFunc(c.actions, func(a Action) bool { _, ok := a.(AskLighthouse); return ok })
		require.GreaterOrEqual(t, asked, 0)
		q := &quorum.Quorum{ID: 1, Members: []quorum.Member{c.actions[asked].(AskLighthouse).Member}}
		answers := c.machine.Step(QuorumKnown{Round: c.actions[asked].(AskLighthouse).Round, Quorum: q},
			epoch)
		require.Len(t, answers, c.n)
		c.each(0, c.vote)
		require.Equal(t, AnswerVote{c.actions[len(c.actions)-1].(AnswerVote).Waiter, true, false},
			c.actions[len(c.actions)-1])
	},
	"a quorum that all withdraw from": func(t *testing.T,
		c *many) {
		c.each(1, c.ask(1))
		c.waiter = 0
		c.each(1, c.withdraw)
	},
	"a vote that all withdraw from": func(t *testing.T,
		c *many) {
		c.each(1, c.vote)
		c.waiter = 0
		c.each(1, c.withdraw)
	},
	"all connections break": func(t *testing.T,
		c *many) {
		c.each(1, c.ask(1))
		c.each(0, disconnected)
	},
	"all ask and one is absent": func(t *testing.T,
		c *many) {
		c.machine.Step(RankDisconnected{0}, epoch)
		c.each(1, c.ask(1))
	},
	"all vote and one is absent": func(t *testing.T, c *many) {
		c.machine.Step(RankDisconnected{0}, epoch)
		c.each(1, c.vote)
	},
}

// If all ranks do the same, the cost grows linearly with the size of the group, not with its square.
func TestCostOfEventsOfAllRanksIsLinear(t *testing.T) {
	statements := testmain.Statements(t, "TestOneEventOfAllRanks")
	for name := range sameOfAll {
		few, many := statements(t, name, 100), statements(t, name, 1000)
		assert.LessOrEqual(t, many, 15*few, "%s: statements with 100 ranks: %d, with 1,000: %d", name, few,
			many)
	}
}

// TestOneEventOfAllRanks is what TestCostOfEventsOfAllRanksIsLinear measures.
func TestOneEventOfAllRanks(t *testing.T) {
	name, n := testmain.Case()
	if event := sameOfAll[name]; event != nil {
		event(t, newMany(n))
	}
}

// BenchmarkAllRanks measures a step in the machine of one of ten groups: all ranks ask, receive the quorum,
// and vote.
func BenchmarkAllRanks(b *testing.B) {
	for _, n := range []int{8, 512, 2048, 8000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			c := newMany(n)
			for step := int64(1); b.Loop(); step++ {
				c.actions = c.actions[:0]
				c.each(0, c.ask(step))
				ask := c.actions[len(c.actions)-1].(AskLighthouse)
				q := &quorum.Quorum{ID: 1}
				for _, name := range []string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"} {
					m := ask.Member
					m.ReplicaID = name
					q.Members = append(q.Members, m)
				}
				c.machine.Step(QuorumKnown{Round: ask.Round, Quorum: q}, epoch)
				c.each(0, func(rank int64) Event {
					return Voted{Waiter: c.waiter, GroupRank: rank, Step: step, ShouldCommit: true}
				})
			}
		})
	}
}
