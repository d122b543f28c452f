package sim

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
)

// spoiled wraps a lighthouse's machine with a mistake.
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

// deliveries changes the lighthouse's Deliver actions.
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

// requests changes the requests to the lighthouse.
func requests(change func(*quorum.Asked)) func(*quorum.Machine) lighthouseMachine {
	return spoil(func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
		if a, ok := e.(quorum.Asked); ok {
			change(&a)
			e = a
		}
		return m.Step(e, now)
	})
}

// finishes is a job whose training is completed now and then.
func finishes(s *Setup) {
	s.Calls = 0
	many(10, Finish, Leave)(s)
	for i := range s.Faults {
		s.Faults[i].N = 1
	}
}

// claims schedules claims of quorums that groups cannot show: first by one group and, after it has had the time to come back, by
// the next one.
func claims(s *Setup) {
	s.Calls, s.Loss, s.Duplicate, s.Straggle, s.OnlyClaims = 0, 0, 0, 0, true
	s.Slots, s.Policy.MinReplicas = 4+int(s.Seed%2), 1
	s.Faults = nil
	for i := range 2 {
		s.Faults = append(s.Faults, Fault{
			Round: 20, After: time.Duration(3*i) * s.bound(), Kind: Claim, Slots: 1 << ((int(s.Seed) + i) % s.Slots), For: 2 * s.bound(),
		})
	}
}

// keepHeartbeats makes every member count as alive once it has sent a heartbeat.
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
	*round.Machine
	step func(m *round.Machine, e round.Event, now time.Time) []round.Action
}

func (s spoiledGroup) Step(e round.Event, now time.Time) []round.Action {
	return s.step(s.Machine, e, now)
}

func spoilGroup(step func(m *round.Machine, e round.Event, now time.Time) []round.Action) func(round.Group, *round.Machine) groupMachine {
	return func(_ round.Group, m *round.Machine) groupMachine { return spoiledGroup{m, step} }
}

// steps changes the steps of the members in the quorums that groups receive.
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

// ignoring is a lighthouse whose machine never receives some events.
func ignoring(to func(quorum.Event) bool) func(*quorum.Machine) lighthouseMachine {
	return spoil(func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
		if to(e) {
			return nil
		}
		return m.Step(e, now)
	})
}

// to reports whether an event has a given type.
func to[T any](e quorum.Event) bool {
	_, ok := e.(T)
	return ok
}

// groupIgnoring is a manager server whose machine never receives some events.
func groupIgnoring[T any]() func(round.Group, *round.Machine) groupMachine {
	return spoilGroup(func(m *round.Machine, e round.Event, now time.Time) []round.Action {
		if _, ok := e.(T); ok {
			return nil
		}
		return m.Step(e, now)
	})
}

// results changes the results of quorums that ranks receive.
func results(change func(*round.AnswerQuorum)) func(round.Group, *round.Machine) groupMachine {
	return spoilGroup(func(m *round.Machine, e round.Event, now time.Time) []round.Action {
		actions := m.Step(e, now)
		for i, a := range actions {
			if a, ok := a.(round.AnswerQuorum); ok {
				change(&a)
				actions[i] = a
			}
		}
		return actions
	})
}

// many draws faults: on average, one in `every` rounds.
func many(every int, kinds ...FaultKind) func(*Setup) {
	return func(s *Setup) {
		s.Faults = drawFaults(rand.New(rand.NewPCG(s.Seed, 5)), *s, every)
		for i := range s.Faults {
			if len(kinds) > 0 {
				f := &s.Faults[i]
				f.Kind = kinds[(int(s.Seed)+i)%len(kinds)]
				f.For = max(f.For, s.Timeout/2)
				if f.Kind == RankFails {
					f.N = int64(i % s.Ranks)
				}
				if f.Kind.ofLighthouse() {
					f.Slots = 0
				} else if f.Slots == 0 {
					f.Slots = 1
				}
			}
		}
	}
}
