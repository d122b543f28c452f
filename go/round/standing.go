package round

import (
	"fmt"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/recovery"
)

// standing has the quorum that stands: the group trains on in it, step after step, and its ranks ask for
// none. The answer of a vote allows them to begin the next step (AnswerVote.Stands).
//
// When the lighthouse calls the next quorum (Called), the answer is the first step that no rank was allowed
// to begin (Stop). From then on no other step is allowed, until the lighthouse names the step of the round
// (RoundKnown): all groups train until that step, and ask there.
//
// Invariants:
//
//  1. allowed never decreases in a quorum, and a step above it has been begun by no rank.
//  2. Once the quorum is called, allowed stays below the step that was answered, or below the step of the
//     round.
//  3. The quorum stands no longer when a step is not committed, a rank has failed or asks for anything else
//     than the next step, or a member has failed.
type standing struct {
	quorum    *quorum.Quorum // nil: none stands
	allowed   int64          // the last step that ranks may begin
	committed int64          // the quorum in which the weights of that step were committed
	called    bool
	round     int64 // the first step that needs another quorum; 0: not known

	begun int64 // the last step that ranks were allowed to begin in any quorum that stood; 0: none stood

	// of this group, for ranks that ask although the quorum stands; nil: not computed for this step
	view *recovery.View
}

func (s *standing) is(quorumID int64) bool { return s.quorum != nil && s.quorum.ID == quorumID }

// ends lets the quorum stand no longer.
func (s *standing) ends() { *s = standing{begun: s.begun} }

// allows records that the group has committed a step, and reports whether its ranks may begin the next one.
func (s *standing) allows(step int64) bool {
	if s.quorum == nil || s.called && step+1 >= s.round {
		return false
	}
	s.next()
	return true
}

func (s *standing) next() {
	s.allowed++
	s.begun, s.committed, s.view = s.allowed, s.quorum.ID, nil
}

// Standing returns the quorum that stands, and the last step that ranks may begin in it; 0: none stands.
func (m *Machine) Standing() (quorumID, step int64) {
	if m.standing.quorum == nil {
		return 0, 0
	}
	return m.standing.quorum.ID, m.standing.allowed
}

// stand records a quorum that was sent to the ranks.
func (m *Machine) stand(q *quorum.Quorum) []Action {
	m.standing.ends()
	called := m.toStop == q.ID
	m.toStop, m.needs = 0, ""
	if !q.Stands || q.ID == m.broken {
		return nil
	}
	var actions []Action
	if m.draining { // the report of it may have been lost
		actions = append(actions, RequestDrain{})
	}
	first := q.Members[0] // all members are in its state
	m.standing = standing{quorum: q, allowed: first.Step, begun: first.Step,
		committed: first.CommittedQuorumID}
	if called {
		return append(actions, m.called(Called{q.ID})...)
	}
	return actions
}

// part ends the quorum that stands, if there is one, because this group leaves it.
func (m *Machine) part(reason string) []Action {
	if m.standing.quorum == nil {
		return nil
	}
	s := m.standing
	m.standing.ends()
	return []Action{Part{s.quorum.ID, s.allowed, reason}}
}

// quorumBroke handles the failure of a member of a quorum, which may be one that this group receives later.
func (m *Machine) quorumBroke(quorumID int64) {
	m.broken = max(m.broken, quorumID)
	if m.standing.is(quorumID) {
		m.standing.ends()
	}
}

// called handles the call of the next quorum. While a request to the lighthouse is pending, the answer may be
// on its way: the call and the answer arrive by two paths, in any order, and the call may be for the quorum
// of that answer. It needs no reply otherwise, since the request is one.
func (m *Machine) called(e Called) []Action {
	s := &m.standing
	switch {
	case m.closed != nil:
		return nil
	case m.gathering.round != 0:
		m.toStop = max(m.toStop, e.QuorumID)
		return nil
	case !s.is(e.QuorumID):
		return nil // this group is about to ask for another quorum
	}
	s.called = true
	return []Action{Stop{e.QuorumID, max(s.allowed+1, s.round)}}
}

// roundKnown handles the step of the round. Ranks that ask for an earlier step train on.
func (m *Machine) roundKnown(e RoundKnown) []Action {
	s, g := &m.standing, &m.gathering
	if !s.is(e.QuorumID) || !s.called {
		return nil
	}
	s.round = max(s.round, e.Step)
	if g.count == 0 || s.allowed+1 >= s.round {
		return nil
	}
	s.next()
	var actions []Action
	if g.round != 0 {
		actions = append(actions, CancelLighthouse{g.round})
		g.round = 0
	}
	for r, a := range g.asked {
		if a != nil {
			g.asked[r] = nil
			g.count--
			actions = append(actions, m.trainOn(*a))
		}
	}
	return actions
}

// stands handles a rank's request if the quorum stands for its step; false if the group has to ask.
func (m *Machine) stands(e QuorumAsked, news bool) (actions []Action, stands bool) {
	s := &m.standing
	if s.quorum == nil {
		return nil, false
	}
	after := e.CommitFailures == 0 && e.Step == s.allowed+1 && e.CommittedQuorumID == s.quorum.ID && s.called
	switch {
	case s.begins(e):
	case after && e.Step < s.round:
		s.next() // the vote on the step before was answered when the round was not known
	case after:
		return nil, false
	default:
		return m.part(fmt.Sprintf("rank %d asks for another quorum at step %d", e.GroupRank, e.Step)), false
	}
	if news {
		m.needs = fmt.Sprintf("rank %d has something new to announce", e.GroupRank)
		actions = append(actions, NeedQuorum{m.needs})
	}
	return append(actions, m.trainOn(e)), true
}

// drainAsked tells the lighthouse that the group leaves, which calls the next quorum for that.
func (m *Machine) drainAsked() []Action {
	if m.closed != nil || m.draining {
		return nil
	}
	m.draining = true
	return []Action{RequestDrain{}}
}

// begins reports whether a rank asks for the step that the group may be in. Another rank may have voted on
// that already.
func (s *standing) begins(e QuorumAsked) bool {
	return s.quorum != nil && e.CommitFailures == 0 && e.Step == s.allowed &&
		e.CommittedQuorumID == s.committed
}

// reached repeats what the lighthouse has to know while the quorum stands.
func (m *Machine) reached() (actions []Action) {
	if m.closed != nil || m.standing.quorum == nil {
		return nil
	}
	if m.draining {
		actions = append(actions, RequestDrain{})
	}
	if m.needs != "" {
		actions = append(actions, NeedQuorum{m.needs})
	}
	return actions
}

// trainOn answers a rank that may begin the step.
func (m *Machine) trainOn(e QuorumAsked) Action {
	s := &m.standing
	if s.view == nil {
		view, err := recovery.NewView(m.group.ReplicaID,
			s.quorum.At(quorum.State{Step: s.allowed, CommittedQuorumID: s.committed}))
		if err != nil {
			return Fail{e.Waiter, Failure{KindInternal, err.Error()}}
		}
		s.view = view
	}
	result, err := s.view.Compute(e.GroupRank, e.InitSync)
	if err != nil {
		return Fail{e.Waiter, Failure{KindInternal, err.Error()}}
	}
	m.ranks[e.GroupRank].begin(inStep, s.allowed, m.now)
	return AnswerQuorum{e.Waiter, &result}
}
