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

// greetings changes the greetings of members.
func greetings(change func(*quorum.Greeted)) func(*quorum.Machine) lighthouseMachine {
	return spoil(func(m *quorum.Machine, e quorum.Event, now time.Time) []quorum.Action {
		if g, ok := e.(quorum.Greeted); ok {
			change(&g)
			e = g
		}
		return m.Step(e, now)
	})
}

// several sets up several lighthouses, and more cuts than usual.
func several(s *Setup) {
	s.Lighthouses, s.Streamless = 2, 0
	s.Slots = 3 + int(s.Seed%3)
	s.Policy.MinReplicas = 1
	s.Faults = drawFaults(rand.New(rand.NewPCG(s.Seed, 3)), *s, 10)
}

// streamless is like several, with one or two groups that have no streams.
func streamless(s *Setup) {
	several(s)
	s.Streamless = 0b110
}

// restless is a job at two lighthouses whose members change all the time: its groups move between the lighthouses, and end before
// others have received a quorum.
func restless(s *Setup) {
	s.Rounds = 200
	several(s)
	s.Disk = s.Seed%2 == 0
	r := rand.New(rand.NewPCG(s.Seed, 8))
	kinds := []FaultKind{CutLighthouse, CutLighthouse, CutUp, CutDown, KillLighthouse, Crash, Crash, Noise}
	s.Faults = nil
	for round := 5; round < s.Rounds; round += 1 + r.IntN(10) {
		for range 1 + r.IntN(4) {
			f := Fault{Round: round, Kind: kinds[r.IntN(len(kinds))], After: time.Duration(r.Int64N(int64(time.Second))),
				For: time.Duration(r.Int64N(int64(2 * time.Second))), Slots: Slots(1 + r.IntN(1<<s.Slots-1)), Of: uint8(1 + r.IntN(2))}
			if f.Kind.ofLighthouse() {
				f.Slots = 0
			}
			if f.Kind == Crash {
				f.Slots &= -f.Slots
			}
			if r.IntN(4) == 0 {
				f.For += quorum.BondTime
			}
			s.Faults = append(s.Faults, f)
		}
	}
}

// quiet sets up a job of some groups at two lighthouses in which only the scheduled faults occur.
func quiet(s *Setup, slots int) {
	s.Lighthouses, s.Slots, s.Ranks, s.Rounds = 2, slots, 1, 400
	s.Streamless, s.Calls, s.Policy.MinReplicas = 0, 0, 1
	s.Loss, s.Duplicate, s.Straggle = 0, 0, 0
	s.Policy.StalledAfter, s.Policy.EjectStalledAfter = 0, 0
	s.QuorumTimeout = 20 * time.Second // so that no request is withdrawn while it waits for the others
}

// withheld is a job of three groups. g00 and g02 train at the second lighthouse, and g01 waits at the first. Then g00 returns to the
// first one, and ends before it has shown the quorum of g00 and g02.
func withheld(s *Setup) {
	quiet(s, 3)
	r := rand.New(rand.NewPCG(s.Seed, 9))
	s.Faults = []Fault{
		{Round: 10, Kind: CutLighthouse, Slots: 0b010, For: time.Minute, Of: 0b10},
		{Round: 10, Kind: CutLighthouse, Slots: 0b001, For: quorum.BondTime + 2*time.Second, Of: 0b01},
		{Round: 10, Kind: CutLighthouse, Slots: 0b100, For: time.Minute, Of: 0b01},
		{Round: 60, Kind: CutLighthouse, Slots: 0b001, For: time.Minute, Of: 0b10},
		{Round: 60, Kind: Withhold, Slots: 0b001, For: time.Minute},
		{Round: 60, Kind: Crash, Slots: 0b001, For: time.Minute, After: quorum.BondTime - 500*time.Millisecond + time.Duration(r.Int64N(int64(2*time.Second)))},
	}
}

// silent is like withheld, except that g00 does not end: it is stopped while the first lighthouse asks it for the quorum of g00 and
// g02, and continues later. Meanwhile the others do not wait for g00.
func silent(s *Setup) {
	withheld(s)
	last := &s.Faults[len(s.Faults)-1]
	last.Kind, last.For = Pause, s.Policy.HeartbeatTimeout+500*time.Millisecond
}

// lagging is a job of three groups, of which g02 is an upstream one. g01 is cut off for a moment, so that the first lighthouse
// continues with g00 and g02, and then ends. When it has restarted, g01 and g02 ask it, and g00 goes to the second one.
func lagging(s *Setup) {
	quiet(s, 3)
	s.Rounds, s.Upstream, s.Disk = 60, 0b100, true
	s.Keepalive = s.Policy.HeartbeatTimeout / 4 // so that the answers arrive before the fault is noticed
	r := rand.New(rand.NewPCG(s.Seed, 9))
	without := time.Duration(r.Int64N(int64(s.Policy.HeartbeatTimeout + s.Policy.SuspectGrace)))
	s.Faults = []Fault{
		{Round: 10, Kind: CutLighthouse, Slots: 0b010, For: without, Of: 0b11},
		{Round: 10, Kind: CutLighthouse, Slots: 0b001, For: 10 * time.Second, After: without, Of: 0b01},
		{Round: 10, Kind: KillLighthouse, For: 10 * time.Millisecond, After: without, Of: 0b01},
	}
}

// renewed is a job of four groups. g03 has been at the second lighthouse, and comes back to the first one with the second one's
// term, which ends all streams. At that moment g00 and g01 cannot reach the first one: they go to the second, and g00 ends there.
func renewed(s *Setup) {
	quiet(s, 4)
	s.Keepalive = 800 * time.Millisecond // messages of the first lighthouse still arrive for this time
	s.Policy.HeartbeatTimeout = 400 * time.Millisecond
	r := rand.New(rand.NewPCG(s.Seed, 9))
	away := quorum.BondTime + 2*time.Second
	back := away + 200*time.Millisecond + time.Duration(r.Int64N(int64(time.Second)))
	ends := 2*time.Second + time.Duration(r.Int64N(int64(1500*time.Millisecond)))
	s.Faults = []Fault{
		{Round: 10, Kind: CutLighthouse, Slots: 0b0100, For: time.Minute, Of: 0b10},
		{Round: 10, Kind: CutLighthouse, Slots: 0b1000, For: away, Of: 0b01},
		{Round: 10, Kind: CutUp, Slots: 0b0001, For: ends - 50*time.Millisecond, After: back, Of: 0b01},
		{Round: 10, Kind: CutUp, Slots: 0b0010, For: time.Minute, After: back, Of: 0b01},
		{Round: 10, Kind: CutLighthouse, Slots: 0b1000, For: time.Minute, After: back + time.Second, Of: 0b10},
		{Round: 10, Kind: Crash, Slots: 0b0001, For: time.Minute, After: back + ends},
	}
}

// finishes is a job at one lighthouse whose training is completed now and then.
func finishes(s *Setup) {
	s.Lighthouses, s.Calls = 1, 0
	many(10, Finish, Leave)(s)
	for i := range s.Faults {
		s.Faults[i].N = 1
	}
}

// claims schedules claims of quorums that groups cannot show: first by one group and, after it has had the time to come back, by
// the next one.
func claims(s *Setup) {
	several(s)
	s.Loss, s.Duplicate, s.Straggle, s.OnlyClaims = 0, 0, 0, true
	s.Slots = max(s.Slots, 4)
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
