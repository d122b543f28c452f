package round

import (
	"fmt"
	"slices"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/recovery"
)

// gathering holds the quorum requests of the ranks, from the first one until all are answered.
type gathering struct {
	asked []*QuorumAsked // by rank
	count int
	first int    // no rank below it has asked
	round uint64 // of the request to the lighthouse, 0 while ranks are missing
	agree bool   // the ranks agree on the step, and on the quorum in which it was committed
}

func (g *gathering) has(rank int) bool { return g.asked[rank] != nil }

func (m *Machine) quorumAsked(e QuorumAsked) []Action {
	if e.GroupWorldSize != 0 && e.GroupWorldSize != m.group.WorldSize && m.closed == nil {
		return m.wrongWorldSize(e)
	}
	if f := m.refuse(e.GroupRank); f != nil {
		return []Action{Fail{e.Waiter, *f}}
	}
	r := &m.ranks[e.GroupRank]
	r.metadata, r.announced = e.CheckpointMetadata, true
	m.expect(e.GroupRank)
	r.begin(inQuorum, e.Step, m.now)
	news := r.last.announces() != e.announces()
	// Otherwise a rank does not ask while the quorum stands, unless it begins the step again.
	asks := news || r.last.CommittedQuorumID != e.CommittedQuorumID || r.last.Drain != e.Drain
	r.last = e.Request

	g := &m.gathering
	var actions []Action
	if e.Drain {
		actions = append(actions, m.drainAsked()...)
	}
	late := asks && m.standing.begins(e) && !m.ballot.has(int(e.GroupRank))
	if m.ballot.count > 0 && !late {
		actions = append(actions, m.abandoned(e.GroupRank)...)
	}
	answers, stands := m.stands(e, news)
	actions = append(actions, answers...)
	if stands {
		return actions
	}
	if older := g.asked[e.GroupRank]; older != nil {
		superseded := Failure{KindAborted, fmt.Sprintf("a newer request of rank %d replaced this one",
			e.GroupRank)}
		if g.round != 0 && !sameRequest(*older, e) {
			// The pending request to the lighthouse was merged from the older one, which is out of date: the
			// round fails, and the ranks ask again.
			g.asked[e.GroupRank] = nil
			g.count--
			actions = append(actions, Fail{older.Waiter, superseded})
			actions = append(actions, m.endGathering(Failure{KindAborted, fmt.Sprintf(
				"rank %d asked for another quorum while this one was on its way", e.GroupRank)})...)
		} else {
			g.asked[e.GroupRank] = &e
			actions = append(actions, Fail{older.Waiter, superseded})
			if g.round != 0 {
				return actions
			}
			g.count--
		}
	}
	if g.count == 0 || int(e.GroupRank) < g.first {
		g.first = int(e.GroupRank)
	}
	g.asked[e.GroupRank] = &e
	g.count++

	if g.count < len(g.asked) {
		if f := m.hopeless(g.has); f != nil {
			actions = append(actions, m.endGathering(*f)...)
		}
		return actions
	}
	return append(actions, m.askLighthouse())
}

// wrongWorldSize refuses a rank that was started with another world size than this server. The group cannot
// become complete, so the requests of the other ranks fail too.
func (m *Machine) wrongWorldSize(e QuorumAsked) []Action {
	wrong := Failure{KindInvalid, fmt.Sprintf(
		"rank %d believes that replica group %s has a world size of %d, but its manager server was started "+
			"with %d",
		e.GroupRank, m.group.ReplicaID, e.GroupWorldSize, m.group.WorldSize)}
	if e.GroupRank >= 0 && e.GroupRank < m.group.WorldSize {
		m.miss(e.GroupRank, &wrong)
	}
	actions := append([]Action{Fail{e.Waiter, wrong}}, m.endGathering(wrong)...)
	return append(actions, m.endBallot(wrong)...)
}

// askLighthouse asks once for the whole group, with the earliest deadline of its ranks.
func (m *Machine) askLighthouse() Action {
	g := &m.gathering
	m.round++
	g.round = m.round
	ask := AskLighthouse{Round: g.round, KnownQuorumID: m.knownQuorumID, Deadline: g.asked[0].Deadline}
	for _, a := range g.asked {
		if a.Deadline.Before(ask.Deadline) {
			ask.Deadline = a.Deadline
		}
	}
	ask.Member, g.agree = merge(quorum.Member{
		ReplicaID:    m.group.ReplicaID,
		Address:      m.group.Address,
		StoreAddress: m.group.StoreAddress,
		WorldSize:    uint64(m.group.WorldSize),
	}, g.asked)
	return ask
}

func (m *Machine) quorumKnown(e QuorumKnown) []Action {
	g := &m.gathering
	if g.round == 0 || e.Round != g.round {
		return nil // the round has ended: its waiters have been answered
	}
	g.round = 0 // the request has ended, so endGathering must not cancel it
	if e.Failure != nil {
		return m.endGathering(*e.Failure)
	}
	if e.Quorum == nil {
		return m.endGathering(Failure{KindInternal, "the lighthouse answered without a quorum"})
	}
	m.knownQuorumID = max(m.knownQuorumID, e.Quorum.ID)

	view, err := recovery.NewView(m.group.ReplicaID, e.Quorum)
	if err != nil {
		return m.endGathering(Failure{KindInternal, err.Error()})
	}
	results := make([]recovery.Result, len(g.asked)) // one allocation for all ranks
	for r, a := range g.asked {
		result, err := view.Compute(a.GroupRank, a.InitSync)
		if err != nil {
			return m.endGathering(Failure{KindInternal, err.Error()})
		}
		if !g.agree && !result.Heal {
			return m.endGathering(Failure{KindAborted, fmt.Sprintf(
				"the ranks of replica group %s disagree on %s, and no other group is ahead to heal from",
				m.group.ReplicaID, m.disagreement())})
		}
		result.Draining = m.draining && !e.Quorum.Stands // else the others begin steps after it
		results[r] = result
	}

	// All ranks have asked for this quorum, so none will vote on the attempt before it. A vote can be pending
	// here only if the rank that cast it had asked before it voted.
	actions := m.endBallot(Failure{KindAborted,
		"the ranks asked for the next quorum before all of them had voted"})
	actions = slices.Grow(actions, len(g.asked))
	for r, a := range g.asked {
		g.asked[r] = nil
		m.ranks[r].begin(inStep, results[r].MaxStep, m.now)
		m.ranks[r].heals = results[r].Heal
		actions = append(actions, AnswerQuorum{a.Waiter, &results[r]})
	}
	g.count = 0
	return append(actions, m.stand(e.Quorum)...)
}

// disagreement describes the first difference between ranks.
func (m *Machine) disagreement() string {
	first := m.gathering.asked[0]
	for _, a := range m.gathering.asked {
		if a.Step != first.Step {
			return fmt.Sprintf("the step (rank 0 is at %d, rank %d at %d)", first.Step, a.GroupRank, a.Step)
		}
		if a.CommittedQuorumID != first.CommittedQuorumID {
			return fmt.Sprintf("the quorum of the last commit (rank 0 reports %d, rank %d reports %d)",
				first.CommittedQuorumID, a.GroupRank, a.CommittedQuorumID)
		}
	}
	return ""
}

func (m *Machine) quorumWithdrawn(e Withdrawn) []Action {
	g := &m.gathering
	if g.count == 0 {
		return nil
	}
	for r, a := range g.asked {
		if a == nil || a.Waiter != e.Waiter {
			continue
		}
		what := "the quorum of the other replica groups"
		if g.round == 0 {
			what = "ranks " + m.where(func(r int) bool { return !g.has(r) })
		}
		own, others := withdrawn(e, r, what)
		if g.round != 0 {
			// The request to the lighthouse has the earliest deadline of the ranks, so it has timed out for
			// all of them.
			others.Kind = own.Kind
		}
		g.asked[r] = nil
		g.count--
		return append([]Action{Fail{e.Waiter, own}}, m.endGathering(others)...)
	}
	return nil
}

// withdrawn returns two failures: one for the rank whose call has ended, and one for the other ranks. These
// fail too, since the rank may never ask again.
func withdrawn(e Withdrawn, rank int, what string) (own, others Failure) {
	if e.Timeout {
		return Failure{KindTimeout, "the deadline passed while waiting for " + what},
			Failure{KindAborted, fmt.Sprintf("rank %d no longer waits: its deadline passed while waiting "+
				"for %s", rank, what)}
	}
	return Failure{KindAborted, "cancelled while waiting for " + what},
		Failure{KindAborted, fmt.Sprintf("rank %d no longer waits: its call was cancelled while waiting "+
			"for %s", rank, what)}
}

// endGathering fails all pending quorum requests, and cancels the one to the lighthouse.
func (m *Machine) endGathering(f Failure) []Action {
	g := &m.gathering
	var actions []Action
	if g.round != 0 {
		actions = append(actions, CancelLighthouse{g.round})
	}
	for r := g.first; g.count > 0; r++ {
		if a := g.asked[r]; a != nil {
			g.count--
			actions = append(actions, Fail{a.Waiter, f})
			g.asked[r] = nil
		}
	}
	g.round = 0
	return actions
}
