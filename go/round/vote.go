package round

import (
	"fmt"
	"slices"
)

// ballot holds the votes on one attempt of a step, from the first vote until all are answered.
//
// The step does not identify the attempt: after a failed commit the same step is tried again. Between two
// attempts all ranks ask for a new quorum, and the first request ends the ballot (abandoned). So a vote on
// the first attempt never counts in the second one.
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
	voter := &m.ranks[e.GroupRank]
	voter.begin(inVote, e.Step, m.now)
	voter.votes = min(voter.votes+1, firstSteps)

	b := &m.ballot
	var actions []Action
	if b.count > 0 && e.Step != b.step {
		if e.Step < b.step {
			return []Action{Fail{e.Waiter, Failure{KindAborted, fmt.Sprintf(
				"rank %d votes on step %d, but a later vote, on step %d, has begun", e.GroupRank, e.Step,
				b.step)}}}
		}
		actions = m.endBallot(Failure{KindAborted, fmt.Sprintf(
			"rank %d began a later vote, on step %d, before all had voted on step %d", e.GroupRank, e.Step,
			b.step)})
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
		if r := m.abandonedBefore(e.GroupRank); r >= 0 {
			return append(actions, m.abandoned(int64(r))...)
		}
		return actions
	}

	commit := true
	for _, v := range b.votes {
		commit = commit && v.ShouldCommit
	}
	stands := false
	if commit && m.standing.allowed == b.step {
		stands = m.standing.allows(b.step)
	} else {
		reason := fmt.Sprintf("it has not committed step %d", b.step)
		if commit {
			reason = fmt.Sprintf("its ranks voted on step %d, which they were not allowed to begin", b.step)
		}
		actions = append(actions, m.part(reason)...)
	}
	actions = slices.Grow(actions, len(b.votes))
	for r, v := range b.votes {
		actions = append(actions, AnswerVote{v.Waiter, commit, stands})
		b.votes[r] = nil
		if stands {
			m.ranks[r].begin(inStep, m.standing.allowed, m.now)
		} else {
			m.ranks[r].begin(afterVote, b.step, m.now)
		}
	}
	b.count = 0
	return actions
}

// abandoned ends the ballot when a rank asks for the next quorum: that rank has abandoned the attempt, and
// will not vote. If the ballot stayed open, this rank would wait in the quorum for a rank that waits for its
// vote: a deadlock until a deadline.
//
// Without failures no ballot is open then: all ranks have voted before the first one receives the decision
// and continues. But ranks begin a step of a quorum that stands by themselves. If a member fails at that
// moment, one may have begun it, and another one, which knows of the failure, asks: the step is not
// committed, and no rank did anything wrong.
func (m *Machine) abandoned(rank int64) []Action {
	if begun := m.standing.begun; begun == 0 || m.ballot.step != begun {
		return m.endBallot(Failure{KindAborted, fmt.Sprintf("rank %d asked for the next quorum, and will "+
			"not vote on step %d", rank, m.ballot.step)})
	}
	return m.closeBallot(fmt.Sprintf("it has not committed step %d", m.ballot.step), func(v *Voted) Action {
		m.ranks[v.GroupRank].begin(afterVote, v.Step, m.now)
		return AnswerVote{v.Waiter, false, false}
	})
}

// abandonedBefore finds a rank that asked for the next quorum before this vote, -1 if there is none.
//
// If the voter itself has a pending quorum request, it cancelled that request before it voted. The Withdrawn
// of that request, which comes from another goroutine, has not been fed yet. It will end the gathering, so
// the vote may stay open.
func (m *Machine) abandonedBefore(voter int64) int {
	g := &m.gathering
	if g.count == 0 || g.asked[voter] != nil {
		return -1
	}
	return slices.IndexFunc(g.asked, func(a *QuorumAsked) bool {
		return a != nil && !m.ballot.has(int(a.GroupRank))
	})
}

func (m *Machine) voteWithdrawn(e Withdrawn) []Action {
	b := &m.ballot
	if b.count == 0 {
		return nil
	}
	for r, v := range b.votes {
		if v == nil || v.Waiter != e.Waiter {
			continue
		}
		missing := m.where(func(r int) bool { return !b.has(r) })
		parts := m.part(fmt.Sprintf("rank %d no longer waits for the vote on step %d", r, v.Step))
		own, others := withdrawn(e, r, fmt.Sprintf("the votes of ranks %s on step %d", missing, v.Step))
		b.votes[r] = nil
		b.count--
		return append(append(parts, Fail{e.Waiter, own}), m.endBallot(others)...)
	}
	return nil
}

// endBallot fails all pending votes.
func (m *Machine) endBallot(f Failure) []Action {
	return m.closeBallot(f.Reason, func(v *Voted) Action { return Fail{v.Waiter, f} })
}

// closeBallot answers all pending votes of a step that is not committed. The group parts with the quorum, for
// the reason.
func (m *Machine) closeBallot(reason string, answer func(*Voted) Action) []Action {
	b := &m.ballot
	var actions []Action
	if b.count > 0 {
		actions = m.part(reason)
	}
	for r := b.first; b.count > 0; r++ {
		if v := b.votes[r]; v != nil {
			b.count--
			actions = append(actions, answer(v))
			b.votes[r] = nil
		}
	}
	return actions
}
