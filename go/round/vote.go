package round

import (
	"fmt"
	"slices"
)

// ballot is the votes on one attempt of a step, from the first rank that votes until all are answered.
//
// The step alone does not name an attempt: after a failed commit the same step is tried again. Between two
// attempts all ranks ask for a new quorum, and the first that does ends the ballot (wentOn), so a vote that is
// left over from the first try never counts in the second.
type ballot struct {
	step  int64
	votes []*Voted // by rank
	count int
	first int // no rank below it has voted
}

func (b *ballot) has(rank int) bool { return b.votes[rank] != nil }

func (m *Machine) voted(e Voted) []Action {
	if f := m.refuse(e.GroupRank); f != nil {
		return []Action{Fail{e.Waiter, *f}}
	}
	m.expect(e.GroupRank)
	m.ranks[e.GroupRank].begin(inVote, e.Step, m.now)

	b := &m.ballot
	var actions []Action
	if b.count > 0 && e.Step != b.step {
		if e.Step < b.step {
			return []Action{Fail{e.Waiter, Failure{KindAborted, fmt.Sprintf(
				"rank %d votes on step %d, but a later vote, on step %d, has begun", e.GroupRank, e.Step, b.step)}}}
		}
		actions = m.endBallot(Failure{KindAborted, fmt.Sprintf(
			"rank %d began a later vote, on step %d, before all had voted on step %d", e.GroupRank, e.Step, b.step)})
	}
	b.step = e.Step

	if older := b.votes[e.GroupRank]; older != nil {
		actions = append(actions, Fail{older.Waiter, Failure{KindAborted, fmt.Sprintf(
			"a newer vote of rank %d replaced this one", e.GroupRank)}})
		b.count--
	}
	if b.count == 0 || int(e.GroupRank) < b.first {
		b.first = int(e.GroupRank)
	}
	b.votes[e.GroupRank] = &e
	b.count++

	if b.count < len(b.votes) {
		if f := m.hopeless(b.has); f != nil {
			return append(actions, m.endBallot(*f)...)
		}
		if r := m.wentOnBefore(e.GroupRank); r >= 0 {
			return append(actions, m.endBallot(wentOn(int64(r), b.step))...)
		}
		return actions
	}

	commit, fenced := true, false
	for _, v := range b.votes {
		commit = commit && v.ShouldCommit
		fenced = fenced || v.Fenced
	}
	if why := m.mayNotCommit(fenced); commit && why != "" {
		commit = false
		actions = append(actions, Discarded{b.step, why})
	}
	for r, v := range b.votes {
		m.looks++
		actions = append(actions, AnswerVote{v.Waiter, commit})
		b.votes[r] = nil
		m.ranks[r].begin(afterVote, b.step, m.now)
	}
	b.count = 0
	return actions
}

// lost is why a step does not count though all ranks of the group did their part: the others may have done the same step
// without this group, which then has to heal. It is empty if it counts.
func (m *Machine) mayNotCommit(fenced bool) string {
	switch {
	case m.evicted != nil && m.evicted.QuorumID == m.answered:
		return fmt.Sprintf("this group counts as failed in quorum %d: %s", m.answered, m.evicted.Reason)
	case fenced:
		return "this group was silent for so long that it may count as failed"
	}
	return ""
}

// wentOn is why a ballot ends that a rank will not vote in: a rank votes before it asks for the next quorum, so
// one that asks has given up on its vote, or never casts it. It waits for the quorum with the rank that waits
// for its vote, and without this both would wait for each other until a deadline.
//
// Nothing is open if all is well: the ballot is complete before the first rank hears of the decision.
func wentOn(rank, step int64) Failure {
	return Failure{KindAborted, fmt.Sprintf(
		"rank %d asked for the next quorum, and will not vote on step %d", rank, step)}
}

// wentOnBefore finds a rank that asked for the next quorum before its sibling voted, -1 if there is none.
//
// A voter whose own request for that quorum is still here has given it up, and the news of that is on its way
// (it may overtake on another goroutine). It will end the wait of all for that quorum.
func (m *Machine) wentOnBefore(voter int64) int {
	g := &m.gathering
	if g.count == 0 || g.asked[voter] != nil {
		return -1
	}
	return slices.IndexFunc(g.asked, func(a *QuorumAsked) bool {
		m.looks++
		return a != nil && !m.ballot.has(int(a.GroupRank))
	})
}

func (m *Machine) voteGaveUp(e GaveUp) []Action {
	b := &m.ballot
	if b.count == 0 {
		return nil
	}
	for r, v := range b.votes {
		m.looks++
		if v == nil || v.Waiter != e.Waiter {
			continue
		}
		missing := m.where(func(r int) bool { return !b.has(r) })
		own, others := gaveUp(e, r, fmt.Sprintf("the votes of ranks %s on step %d", missing, v.Step))
		b.votes[r] = nil
		b.count--
		return append([]Action{Fail{e.Waiter, own}}, m.endBallot(others)...)
	}
	return nil
}

// endBallot answers all who wait for the decision with the same failure.
func (m *Machine) endBallot(f Failure) []Action {
	b := &m.ballot
	var actions []Action
	for r := b.first; b.count > 0; r++ {
		m.looks++
		if v := b.votes[r]; v != nil {
			b.count--
			actions = append(actions, Fail{v.Waiter, f})
			b.votes[r] = nil
		}
	}
	return actions
}
