package quorum

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/torchft/torchft/go/internal/testmain"
)

// largeJob is a job of many members that has had its first quorum.
type largeJob struct {
	ring
	ids []string
}

func newLargeJob(t testing.TB, n int, policy Policy) *largeJob {
	c := &largeJob{ring: ring{now: epoch, machine: NewMachine(policy, epoch, 0)}, ids: make([]string, n)}
	for i := range c.ids {
		c.ids[i] = fmt.Sprintf("%06d", (i*7919)%n) // in no order
	}
	for i, id := range c.ids {
		actions := c.ask(Member{ReplicaID: id, Address: "http://" + id, Step: 1})
		if i == n-1 {
			delivered(t, actions)
		}
	}
	return c
}

func (c *largeJob) step(event Event) []Action { return c.machine.Step(event, c.now) }

// lenient returns a policy whose timeouts are never reached.
func lenient(n int) Policy {
	return Policy{MinReplicas: n, JoinTimeout: time.Hour, HeartbeatTimeout: time.Hour,
		SuspectGrace: time.Hour, StalledAfter: time.Second}
}

// burst is an event of all members of a job, or of half of them, at the same time.
type burst struct {
	name   string
	policy func(n int) Policy
	before func(c *largeJob) // prepares the burst
	run    func(t testing.TB, c *largeJob)
}

// half makes every second member ask at a step, and lets time pass until the others are asked for their
// progress.
func half(step int64) func(c *largeJob) {
	return func(c *largeJob) {
		for i := 0; i < len(c.ids); i += 2 {
			c.ask(Member{ReplicaID: c.ids[i], Address: "http://" + c.ids[i], Step: step})
		}
		c.now = c.now.Add(2 * time.Second)
		c.step(Tick{})
	}
}

// others makes the members without a request report their progress.
func (c *largeJob) others(p Progress) {
	for i := 1; i < len(c.ids); i += 2 {
		c.step(Progressed{ReplicaID: c.ids[i], Progress: p})
	}
}

var bursts = []burst{
	{"round", lenient, func(*largeJob) {}, func(t testing.TB, c *largeJob) {
		for i, id := range c.ids {
			actions := c.ask(Member{ReplicaID: id, Address: "http://" + id, Step: 2})
			assert.Equal(t, i == len(c.ids)-1, len(actions) > 0)
		}
	}},
	{"a tick while half wait for the others", lenient, func(c *largeJob) {
		half(3)(c)
		c.others(Progress{Step: 2, Waits: true})
	}, func(t testing.TB, c *largeJob) { assert.Empty(t, c.step(Tick{})) }},
	{"a tick that ejects half", func(n int) Policy {
		p := lenient(n)
		p.EjectStalledAfter = time.Second
		return p
	}, func(c *largeJob) {
		half(3)(c)
		c.others(Progress{Step: 2, For: time.Hour})
	}, func(t testing.TB, c *largeJob) { assert.Greater(t, len(c.step(Tick{})), len(c.ids)/2) }},
	{"describe", lenient, half(3), func(t testing.TB, c *largeJob) {
		assert.Len(t, c.machine.Describe(c.now).Members, len(c.ids))
	}},
}

// each has the bursts of one event per member.
func each() (all []burst) {
	for name, event := range map[string]func(c *largeJob, i int) Event{
		"Asked": func(c *largeJob, i int) Event {
			return Asked{Waiter: WaiterID(1_000_000 + i),
				Member: Member{ReplicaID: c.ids[i], Address: "http://another", Step: 1}}
		},
		"Greeted": func(c *largeJob, i int) Event {
			return Greeted{ReplicaID: c.ids[i], Known: Claim{QuorumID: c.machine.past.latestID()}}
		},
		"Recalled": func(c *largeJob, i int) Event {
			return Recalled{Quorum: &Quorum{ID: 1, Members: []Member{{ReplicaID: c.ids[i]}}}, From: c.ids[i]}
		},
		"Withdrawn": func(c *largeJob, i int) Event {
			return Withdrawn{ReplicaID: c.ids[i], Waiter: WaiterID(i)}
		},
		"Beat":         func(c *largeJob, i int) Event { return Beat{ReplicaID: c.ids[i]} },
		"Disconnected": func(c *largeJob, i int) Event { return Disconnected{ReplicaID: c.ids[i]} },
		"Incomplete": func(c *largeJob, i int) Event {
			return Incomplete{ReplicaID: c.ids[i],
				Reason: "a rank has failed"}
		},
		"Suspected": func(c *largeJob, i int) Event {
			return Suspected{c.ids[i], c.ids[0],
				c.machine.past.latestID()}
		},
		"Checked": func(c *largeJob, i int) Event {
			return Checked{ReplicaID: c.ids[i], QuorumID: c.machine.past.latestID()}
		},
		"Progressed":   func(c *largeJob, i int) Event { return Progressed{ReplicaID: c.ids[i]} },
		"Drained":      func(c *largeJob, i int) Event { return Drained{c.ids[i], "maintenance"} },
		"Raised":       func(c *largeJob, i int) Event { return Raised{ReplicaID: c.ids[i]} },
		"Leaving":      func(c *largeJob, i int) Event { return Leaving{ReplicaID: c.ids[i]} },
		"ShuttingDown": func(c *largeJob, i int) Event { return ShuttingDown{ReplicaID: c.ids[i]} },
	} {
		all = append(all, burst{name, lenient, func(*largeJob) {}, func(_ testing.TB, c *largeJob) {
			for i := range c.ids {
				c.step(event(c, i))
			}
		}})
	}
	slices.SortFunc(all, func(a, b burst) int { return strings.Compare(a.name, b.name) })
	for name, event := range map[string]Event{"Slept": Slept{For: time.Second}, "Tick": Tick{},
		"Woken": Woken{}} {
		// one for all members
		all = append(all, burst{name, lenient, half(3), func(_ testing.TB, c *largeJob) { c.step(event) }})
	}
	return all
}

func (b burst) start(t testing.TB, n int) *largeJob {
	c := newLargeJob(t, n, b.policy(n))
	b.before(c)
	return c
}

// The cost of simultaneous events of all members grows about linearly with their number, and not with its
// square.
func TestNothingGrowsWithTheSquareOfTheMembers(t *testing.T) {
	statements := testmain.Statements(t, "TestOneBurst")
	for _, b := range slices.Concat(bursts, each()) {
		few, many := statements(t, b.name, 100), statements(t, b.name, 1000)
		// 10 is linear. An event may take one statement for each member, beside some hundred others: that is
		// 26.
		assert.LessOrEqual(t, many, 30*few, "%s: statements with 100 members: %d, with 1,000: %d", b.name,
			few, many)
	}
}

// TestOneBurst is what TestNothingGrowsWithTheSquareOfTheMembers measures.
func TestOneBurst(t *testing.T) {
	name, n := testmain.Case()
	for _, b := range slices.Concat(bursts, each()) {
		if b.name == name {
			b.run(t, b.start(t, n))
		}
	}
}

// BenchmarkBurst measures the time of the bursts that TestNothingGrowsWithTheSquareOfTheMembers measures.
func BenchmarkBurst(b *testing.B) {
	for _, burst := range slices.Concat(bursts, each()) {
		for _, n := range []int{100, 1000, 10000} {
			b.Run(fmt.Sprintf("%s/members=%d", burst.name, n), func(b *testing.B) {
				for b.Loop() {
					b.StopTimer()
					c := burst.start(b, n)
					b.StartTimer()
					burst.run(b, c)
				}
			})
		}
	}
}
