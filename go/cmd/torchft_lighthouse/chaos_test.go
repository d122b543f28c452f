package main

import (
	"flag"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/torchft/torchft/go/internal/testmain"
)

var (
	soak = flag.Duration("soak", 0, "how long TestSoak runs; 0: it does not run")
	seed = flag.Uint64("seed", 1, "seed of TestSoak's choices")
)

// TestSoak kills and stops lighthouses and groups, and cuts lighthouses off, at random. The job has one history, and trains on when all
// is well again.
func TestSoak(t *testing.T) {
	if *soak == 0 {
		if !testmain.Full() {
			return
		}
		*soak = 40 * time.Second
	}
	onHosts(t, func(t *testing.T, c *cluster, hosts *hosts) {
		t.Logf("-soak=%s -seed=%d", *soak, *seed)
		random := rand.New(rand.NewPCG(*seed, 0)) //nolint:gosec // for a test
		for began := time.Now(); time.Since(began) < *soak; {
			for range 2 + random.IntN(6) {
				c.fault(random, hosts)
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
func (c *cluster) fault(random *rand.Rand, hosts *hosts) {
	i, j := random.IntN(3), random.IntN(3)
	switch what := random.IntN(12); {
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
	default:
		slot := random.IntN(4)
		c.t.Logf("group %d is restarted", slot)
		c.restartGroup(slot)
	}
}
