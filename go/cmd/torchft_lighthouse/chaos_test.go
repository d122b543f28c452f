//go:build linux

package main

import (
	"flag"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"
	"time"
)

var (
	failures = flag.Int("failures", 0,
		"how many failures of each kind TestFailureTimes measures; 0: it does not run")

	soak = flag.Duration("soak", 0, "how long TestSoak runs; 0: it does not run")
	seed = flag.Uint64("seed", 1, "seed of TestSoak's choices")
)

// TestSoak kills and stops lighthouses and groups, cuts lighthouses off, and moves their clocks, at random.
// The job has one history, and trains on when all is well again.
func TestSoak(t *testing.T) {
	if *soak == 0 {
		t.Skip("-soak says how long")
	}
	onHosts(t, func(t *testing.T, c *cluster, hosts *hosts) {
		t.Logf("-soak=%s -seed=%d", *soak, *seed)
		clocks := c.withClocks()
		random := rand.New(rand.NewPCG(*seed, 0)) //nolint:gosec // for a test
		for began := time.Now(); time.Since(began) < *soak; {
			for range 2 + random.IntN(6) {
				c.fault(random, hosts, clocks)
				time.Sleep(time.Duration(random.IntN(1500)) * time.Millisecond)
			}
			hosts.heal()
			for _, l := range c.all {
				l.start()
				l.signal(syscall.SIGCONT)
			}
			c.settled()
			c.steps(5)
			if t.Failed() {
				return
			}
		}
		c.check()
	})
}

// fault makes one fault at random.
func (c *cluster) fault(random *rand.Rand, hosts *hosts, clocks clocks) {
	i, j := random.IntN(3), random.IntN(3)
	switch what := random.IntN(14); {
	case what < 2:
		c.t.Logf("lighthouse %d is killed", i)
		c.all[i].end(syscall.SIGKILL)
	case what < 3:
		c.t.Logf("lighthouse %d is started", i)
		c.all[i].start()
	case what < 5:
		c.t.Logf("lighthouse %d is stopped", i)
		c.all[i].signal(syscall.SIGSTOP)
	case what < 6:
		c.t.Logf("lighthouse %d goes on", i)
		c.all[i].signal(syscall.SIGCONT)
	case what < 8 && i != j:
		c.t.Logf("lighthouse %d is not heard by %d", i, j)
		hosts.cut(i, j)
	case what < 9:
		c.t.Logf("the host of lighthouse %d vanishes", i)
		hosts.vanish(i)
	case what < 11:
		by := time.Duration(random.IntN(5)-2) * time.Hour
		c.t.Logf("the clock of lighthouse %d jumps by %s", i, by)
		clocks.jump(c.all[i], by)
	default:
		slot := random.IntN(4)
		c.t.Logf("group %d is restarted", slot)
		c.restartGroup(slot)
	}
}

// TestFailureTimes measures the time from a failure until all groups have the next quorum, also with a single
// lighthouse that is restarted at once.
func TestFailureTimes(t *testing.T) {
	if *failures == 0 {
		return
	}
	onHosts(t, func(t *testing.T, c *cluster, hosts *hosts) {
		measure := func(what string, c *cluster, fail func(), mend func()) {
			var all []time.Duration
			for range *failures {
				c.steps(5)
				after := time.Since(c.began)
				fail()
				var took time.Duration
				c.until("the next quorum", func() (has bool) {
					took, has = c.nextQuorum(after)
					return has
				})
				all = append(all, took)
				mend()
			}
			slices.Sort(all)
			t.Logf("%s: median %s, of %d from %s to %s", what, all[len(all)/2], len(all), all[0],
				all[len(all)-1])
		}
		for what, fail := range map[string]func(leader *process){
			"killed":   func(leader *process) { leader.end(syscall.SIGKILL) },
			"stopped":  func(leader *process) { leader.signal(syscall.SIGSTOP) },
			"vanished": func(leader *process) { hosts.vanish(c.index(leader)) },
		} {
			var leader *process
			c.settled()
			leader, _ = c.leader()
			measure("the leader is "+what, c, func() { fail(leader) }, func() {
				hosts.heal()
				leader.start()
				leader.signal(syscall.SIGCONT)
				c.settled()
				leader, _ = c.leader()
			})
		}
		single := start(t, []string{"http://10.29.5.10:29510"}, t.TempDir(), "10.29.5.10", nil)
		measure("a single lighthouse is killed and restarted", single, func() {
			single.all[0].end(syscall.SIGKILL)
			single.all[0].start()
		}, func() {})
	})
}
