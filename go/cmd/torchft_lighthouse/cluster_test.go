package main

import (
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// local starts a cluster and a job on this host.
func local(t *testing.T) *cluster { return start(t, free(t), t.TempDir(), "127.0.0.1", nil) }

func TestAKilledLeaderCostsNoStep(t *testing.T) {
	c := local(t)
	c.settled()
	since := c.attempts()
	leader, _ := c.leader()
	leader.end(syscall.SIGKILL)
	t.Logf("the next steps took %s", c.steps(3))
	leader.start()
	c.settled()
	c.steps(3)
	c.noStepIsLost(since)
	c.check()
}

// The leader is stopped until another one leads. When it goes on, the groups' messages and those of the other lighthouses are there.
func TestAStoppedLeaderThatGoesOnAnswersNobody(t *testing.T) {
	c := local(t)
	c.settled()
	since := c.attempts()
	for range 2 {
		leader, _ := c.leader()
		leader.signal(syscall.SIGSTOP)
		t.Logf("the next steps took %s", c.steps(3))
		leader.signal(syscall.SIGCONT)
		c.settled()
		c.steps(3)
	}
	c.noStepIsLost(since)
	c.check()
}

func TestAJobGoesOnAfterAllLighthousesWereKilled(t *testing.T) {
	c := local(t)
	c.settled()
	since := c.attempts()
	for _, l := range c.all {
		l.end(syscall.SIGKILL)
	}
	for _, l := range c.all {
		l.start()
	}
	t.Logf("the next steps took %s", c.steps(3))
	c.settled()
	c.noStepIsLost(since)
	c.check()
}

func TestAJobWaitsForTheMajority(t *testing.T) {
	c := local(t)
	c.settled()
	since := c.attempts()
	_, followers := c.leader()
	for _, l := range followers {
		l.end(syscall.SIGKILL)
	}
	c.until("the groups wait", func() bool {
		before := c.attempts()
		time.Sleep(2 * time.Second)
		return c.attempts() == before
	})
	assert.Contains(t, c.log.String(), "no lighthouse of the cluster leads")
	followers[0].start()
	t.Logf("the next steps took %s", c.steps(3))
	followers[1].start()
	c.settled()
	c.steps(3)
	c.noStepIsLost(since)
	c.check()
}

// Each lighthouse is replaced by a new process, the leader last, as in an upgrade.
func TestARollingRestartCostsNoStep(t *testing.T) {
	c := local(t)
	c.settled()
	since := c.attempts()
	leader, order := c.leader()
	for _, l := range append(slices.Clone(order), leader) {
		l.end(syscall.SIGTERM)
		c.steps(3)
		l.start()
		c.settled()
		c.steps(3)
	}
	c.noStepIsLost(since)
	c.check()
}
