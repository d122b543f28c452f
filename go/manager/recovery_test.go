package manager_test

import (
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/torchftpb"
)

func TestTheLighthouseShowsTheProgressAndTheCostOfAHeal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 2), c.StartGroup("b", 2)
		answers{a.Quorum(0, 5, time.Minute), a.Quorum(1, 5, time.Minute), b.Quorum(0, 0, time.Minute),
			b.Quorum(1, 0, time.Minute)}.results(t)
		healing := func() (is bool, received, total int64) {
			synctest.Wait()
			m := c.Lighthouse.Status().Members[1]
			return m.Healing, m.HealReceived, m.HealTotal
		}
		is, _, _ := healing()
		assert.True(t, is, "the group is behind in its quorum")
		fttest.ReportHealing(b.Ranks[0], &torchftpb.HealProgress{Received: 10, Total: 100})
		fttest.ReportHealing(b.Ranks[1], &torchftpb.HealProgress{GroupRank: 1, Received: 1, Total: 200})
		synctest.Wait()
		fttest.ReportHealing(b.Ranks[1], &torchftpb.HealProgress{GroupRank: 1, Received: 50, Total: 200})
		synctest.Wait()
		for _, nonsense := range []*torchftpb.HealProgress{{GroupRank: 2, Total: 1},
			{GroupRank: -1, Total: 1}, {Received: 2, Total: 1}, {Received: -1}} {
			fttest.ReportHealing(b.Ranks[0], nonsense)
		}
		is, received, total := healing()
		assert.True(t, is)
		assert.EqualValues(t, 60, received, "the sum of both ranks")
		assert.EqualValues(t, 300, total)

		phases := []*torchftpb.PhaseTime{{Phase: "transfer", Seconds: 2},
			{Phase: "load", Seconds: math.NaN()}}
		fttest.ReportRecovered(b.Ranks[1], &torchftpb.Recovered{GroupRank: 1, Healed: true, Step: 5,
			Bytes: 200})
		synctest.Wait()
		fttest.ReportRecovered(b.Ranks[0], &torchftpb.Recovered{Healed: true, Step: 5, Bytes: 100,
			Phases: phases})
		_, received, _ = healing()
		assert.Zero(t, received)
		// All survivors of a failure report it. It is shown once.
		for _, g := range []*fttest.Group{a, b} {
			fttest.ReportRecovered(g.Ranks[0],
				&torchftpb.Recovered{QuorumId: 7, Step: 9, StepsLost: 1,
					Phases: []*torchftpb.PhaseTime{{Phase: "abort", Seconds: 0.5}}})
			synctest.Wait()
		}
		events := history(t, c)
		require.Len(t, events, 3, "%v", events)
		assert.Subset(t, events[1], map[string]any{"kind": "healed", "who": "b", "step": 5.0, "bytes": 100.0})
		assert.Equal(t, []any{map[string]any{"phase": "transfer", "seconds": 2.0}}, events[1]["phases"],
			"JSON has no NaN")
		assert.Subset(t, events[2], map[string]any{"kind": "recovered", "who": "a", "step": 9.0,
			"steps_lost": 1.0, "quorum_id": 7.0})
		for _, line := range []string{
			`level=INFO msg="torchft: a member healed" member=b step=5 bytes=100 seconds=2`,
			`level=INFO msg="torchft: the other groups continue after a failure" quorum_id=7 step=9 steps_lost=1 seconds=0.5`,
		} {
			assert.Equal(t, 1, c.Log.Count(line), "%s\n%s", line, c.Log.String())
		}
	})
}

// A heal may end without a report: its source has failed, and no other group is ahead.
func TestAHealThatWasAbandonedIsNotShownAnyMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 2), c.StartGroup("b", 2)
		answers{a.Quorum(0, 5, time.Minute), a.Quorum(1, 5, time.Minute), b.Quorum(0, 0, time.Minute),
			b.Quorum(1, 0, time.Minute)}.results(t)
		fttest.ReportHealing(b.Ranks[0], &torchftpb.HealProgress{Received: 10, Total: 100})
		fttest.ReportHealing(b.Ranks[1], &torchftpb.HealProgress{GroupRank: 1, Received: 10, Total: 100})
		synctest.Wait()
		a.Server.Shutdown()
		answers(b.QuorumOfAll(0, time.Minute)).results(t)
		synctest.Wait()
		members := c.Lighthouse.Status().Members
		assert.False(t, members[len(members)-1].Healing)

		// The progress of the next heal begins at zero.
		fttest.ReportHealing(b.Ranks[0], &torchftpb.HealProgress{Received: 5, Total: 100})
		synctest.Wait()
		members = c.Lighthouse.Status().Members
		assert.True(t, members[len(members)-1].Healing)
		assert.EqualValues(t, 5, members[len(members)-1].HealReceived, "the progress of this heal only")
	})
}

func TestAGroupThatFailsWhileItHealsIsNotShownAsHealing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		answers{a.Quorum(0, 5, time.Minute), b.Quorum(0, 0, time.Minute)}.results(t)
		fttest.ReportHealing(b.Ranks[0], &torchftpb.HealProgress{Received: 10, Total: 100})
		synctest.Wait()
		b.Server.Shutdown()
		time.Sleep(time.Second)
		failed := c.Lighthouse.Status().Members[1]
		assert.False(t, failed.Healthy || failed.Healing)
		assert.Zero(t, failed.HealTotal)
	})
}
