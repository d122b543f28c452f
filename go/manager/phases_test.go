package manager_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/torchftpb"
)

// The heartbeats of a group carry its phase, from its requests and from what its script says.
func TestTheLighthouseShowsThePhaseOfAGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := c.StartGroup("a", 1)
		phase := func() (string, int64) {
			time.Sleep(4 * time.Second) // more than two intervals of heartbeats
			m := c.Lighthouse.Status().Members[0]
			return m.Phase, m.PhaseMS
		}
		said := func(p torchftpb.Phase) {
			a.Ranks[0].Report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Progress{
				Progress: &torchftpb.RankProgress{Begins: true, Phase: p}}})
		}
		for step := range int64(3) {
			round(t, step, a)
			is, _ := phase()
			assert.Equal(t, map[bool]string{true: "first_steps", false: "training"}[step < 2], is)
			require.True(t, (<-a.Vote(0, step, true, time.Minute)).Value)
		}
		is, _ := phase()
		assert.Equal(t, "between_steps", is)
		said(torchftpb.Phase_EVALUATION)
		is, ms := phase()
		assert.Equal(t, "evaluation", is)
		assert.InDelta(t, 4000, ms, 100)
		said(1000) // of a later version
		is, _ = phase()
		assert.Equal(t, "between_steps", is)
	})
}

func TestTheHistoryHasTheStacksOfAStalledGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := c.StartGroup("a", 1)
		round(t, 0, a)
		for range 40 { // of a large group; each is written to the log of its rank, too
			a.Ranks[0].Report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Stacks{
				Stacks: &torchftpb.RankStacks{GroupRank: 3, Collective: "nccl:all_reduce, started",
					Stacks: "Thread 0x1\n" + strings.Repeat("x", 1<<20)}}})
			synctest.Wait()
		}
		var stacks []map[string]any
		for _, e := range history(t, c) {
			if e["kind"] == "stacks" {
				stacks = append(stacks, e)
			}
		}
		assert.Len(t, stacks, 32)
		assert.Equal(t, "a", stacks[0]["who"])
		assert.Equal(t, "rank 3: nccl:all_reduce, started", stacks[0]["reason"])
		assert.Contains(t, stacks[0]["stacks"], "Thread 0x1\nxxx")
		assert.Less(t, len(stacks[0]["stacks"].(string)), 17<<10)
		assert.Equal(t, 32, c.Log.Count("has reported its stacks"))
	})
}

func TestTheHistoryHasAGradientThatIsCorrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := c.StartGroup("a", 1)
		round(t, 0, a)
		for range 3 { // each group says the same
			a.Ranks[0].Report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Corrupted{
				Corrupted: &torchftpb.Corrupted{ReplicaIds: []string{"b", strings.Repeat("x", 1<<20)},
					Reason: "step 7: rank 0 on some host" + strings.Repeat("x", 1<<20)}}})
			synctest.Wait()
		}
		events := history(t, c)
		last := events[len(events)-1]
		assert.Equal(t, "corrupted", last["kind"])
		assert.Contains(t, last["reason"], "step 7: rank 0 on some host")
		left := last["left"].([]any)
		assert.Equal(t, "b", left[0])
		assert.Less(t, len(left[1].(string)), 2<<10)
		assert.Equal(t, 1, c.Log.Count("A GRADIENT IS CORRUPTED"))
	})
}
