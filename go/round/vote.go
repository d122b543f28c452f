package round

import "fmt"

// ballot is the votes on one attempt of a step, from the first rank that votes until all are answered.
//
// The step alone does not name an attempt: after a failed commit the same step is tried again. Between two
// attempts all ranks get a new quorum, and that ends the ballot (quorumKnown), so a vote that is left over
// from the first try never counts in the second.
type ballot struct {
	step  int64
	votes []*Voted // by rank
	count int
}

func (b *ballot) has(rank int) bool { return b.votes[rank] != nil }

func (m *Machine) voted(e Voted) []Action {
	if f := m.refuse(e.GroupRank); f != nil {
		return []Action{Fail{e.Waiter, *f}}
	}
	m.ranks[e.GroupRank].absent = nil

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
	b.votes[e.GroupRank] = &e
	b.count++

	if b.count < len(b.votes) {
		if f := m.hopeless(b.has); f != nil {
			actions = append(actions, m.endBallot(*f)...)
		}
		return actions
	}

	commit := true
	for _, v := range b.votes {
		commit = commit && v.ShouldCommit
	}
	for r, v := range b.votes {
		actions = append(actions, AnswerVote{v.Waiter, commit})
		b.votes[r] = nil
	}
	b.count = 0
	return actions
}

func (m *Machine) voteGaveUp(e GaveUp) []Action {
	b := &m.ballot
	for r, v := range b.votes {
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
	for r, v := range b.votes {
		if v != nil {
			actions = append(actions, Fail{v.Waiter, f})
			b.votes[r] = nil
		}
	}
	b.count = 0
	return actions
}
