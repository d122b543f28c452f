package manager_test

import (
	"context"
	"fmt"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/testmain"
	"github.com/torchft/torchft/go/membership/lighthouses"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/rankclient"
)

func TestMain(m *testing.M) {
	if os.Getenv(ranksEnv) != "" {
		simulateRanks()
		return
	}
	testmain.Run(m)
}

// atOnce is far below every timeout of these tests.
const atOnce = time.Millisecond

type answers []<-chan fttest.Answer[*fttest.Result]

// results waits for all answers, and fails the test if one is an error.
func (a answers) results(t *testing.T) []*fttest.Result {
	t.Helper()
	var all []*fttest.Result
	for _, answer := range a {
		got := <-answer
		require.NoError(t, got.Err)
		all = append(all, got.Value)
	}
	return all
}

// round requests a quorum for every rank of every group, and waits for the answers.
func round(t *testing.T, step int64, groups ...*fttest.Group) []*fttest.Result {
	t.Helper()
	var all answers
	for _, g := range groups {
		all = append(all, g.QuorumOfAll(step, time.Minute)...)
	}
	return all.results(t)
}

func TestTwoGroupsOfTwoRanks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a, b := c.StartGroup("a", 2), c.StartGroup("b", 2)
		first := round(t, 1, a, b)
		for i, r := range first {
			assert.Equal(t, []string{"a", "b"}, r.GetReplicaIds())
			assert.EqualValues(t, i/2, r.ReplicaRank)
			assert.EqualValues(t, 2, r.ReplicaWorldSize)
			assert.EqualValues(t, 1, r.MaxStep)
			assert.False(t, r.Heal)
			assert.Equal(t, []string{"a:1", "b:1"}[i%2], r.StoreAddress,
				"each group rank has its own primary")
		}
		for _, r := range round(t, 2, a, b) {
			assert.Equal(t, first[0].GetQuorumId(), r.GetQuorumId(), "the members did not change")
		}
		for _, g := range []*fttest.Group{a, b} {
			votes := []<-chan fttest.Answer[bool]{g.Vote(0, 2, true, time.Minute),
				g.Vote(1, 2, g == a, time.Minute)}
			for _, vote := range votes {
				got := <-vote
				require.NoError(t, got.Err)
				assert.Equal(t, g == a, got.Value, "if one rank votes no, the group does not commit")
			}
		}
	})
}

func TestSourceAndTargetsAreSentOverTheWire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		got := append(answers(a.QuorumOfAll(7, time.Minute)), b.QuorumOfAll(0, time.Minute)...).results(t)
		assert.Equal(t, []int64{1}, got[0].GetRecoverDstReplicaRanks())
		require.True(t, got[1].Heal)
		require.NotNil(t, got[1].RecoverSrcReplicaRank)
		assert.Equal(t, a.Server.Address(), got[1].GetRecoverSrcManagerAddress())
		assert.Nil(t, got[1].MaxReplicaRank)

		source, err := rankclient.Dial(t.Context(), got[1].GetRecoverSrcManagerAddress(), time.Second,
			rpc.Dialing{Network: c.Net.Host("b")})
		require.NoError(t, err)
		defer func() { require.NoError(t, source.Close()) }()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		metadata, err := source.CheckpointMetadata(ctx, 0)
		require.NoError(t, err)
		assert.Equal(t, "http://a:1/0", metadata)
		_, err = source.CheckpointMetadata(ctx, 1)
		assert.Equal(t, codes.InvalidArgument, status.Code(err))
		assert.ErrorContains(t, err, "rank 1")
	})
}

func TestAdditionalSourcesAreSentOverTheWire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 3)
		a, b, d := c.StartGroup("a", 2), c.StartGroup("b", 2), c.StartGroup("c", 2)
		ask := func(g *fttest.Group, step, committed int64) (asked answers) {
			for rank := range int64(2) {
				asked = append(asked, g.QuorumWith(&fttest.Request{GroupRank: rank, Step: step,
					CommittedQuorumId: committed}, time.Minute))
			}
			return asked
		}
		got := append(append(ask(a, 7, 5), ask(b, 0, -1)...), ask(d, 7, 5)...).results(t)
		for rank, source := range []*fttest.Group{d, a} { // the ranks of b heal from different groups
			require.True(t, got[2+rank].Heal)
			assert.Equal(t, []string{source.Server.Address()}, got[2+rank].GetAdditionalSourceAddresses())
		}
		for i, want := range [][]int64{nil, {1}, nil, nil, {1}, nil} {
			assert.Equal(t, want, got[i].GetHelpDstReplicaRanks())
		}
	})
}

// Both groups committed the previous step, each in its own quorum. So their weights differ, and only the
// committed quorum ids show that.
func TestAnEqualStepOfAnOlderQuorumHeals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		ask := func(g *fttest.Group, committed int64) <-chan fttest.Answer[*fttest.Result] {
			return g.QuorumWith(&fttest.Request{Step: 7, CommittedQuorumId: committed}, time.Minute)
		}
		got := answers{ask(a, 1000), ask(b, 1001)}.results(t)
		require.True(t, got[0].Heal)
		assert.Equal(t, b.Server.Address(), got[0].GetRecoverSrcManagerAddress())
		assert.EqualValues(t, 1001, got[0].GetCommittedQuorumId())
		assert.False(t, got[1].Heal)
		assert.Equal(t, []int64{0}, got[1].GetRecoverDstReplicaRanks())

		for _, r := range (answers{ask(a, 1000), ask(b, 0)}).results(t) {
			assert.False(t, r.Heal, "an upstream group does not report its quorum: steps decide")
			assert.Zero(t, r.GetCommittedQuorumId())
		}
	})
}

func TestARankThatEndsFailsItsSiblingsAtOnce(t *testing.T) {
	for _, waits := range []string{"for a quorum", "for a vote"} {
		t.Run(waits, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := fttest.NewCluster(t, 1)
				g := c.StartGroup("a", 3)
				round(t, 1, g)
				var errs []<-chan error
				for rank := range 2 {
					errs = append(errs, waiting(g, rank, waits))
				}
				synctest.Wait()
				start := time.Now()
				g.Host(1).Kill()
				for rank, err := range errs {
					if err := <-err; rank == 0 {
						assert.Equal(t, codes.Aborted, status.Code(err), "%v", err)
						assert.ErrorContains(t, err, "rank 1")
					}
				}
				late := <-waiting(g, 2, waits)
				assert.ErrorContains(t, late, "rank 1", "requests fail at once after a rank has failed")
				assert.Less(t, time.Since(start), atOnce)
			})
		})
	}
}

// waiting starts a quorum or a vote of one rank, and returns a channel for its error.
func waiting(g *fttest.Group, rank int, what string) <-chan error {
	err := make(chan error, 1)
	go func() {
		if what == "for a vote" {
			err <- (<-g.Vote(rank, 1, true, time.Minute)).Err
		} else {
			err <- (<-g.Quorum(rank, 2, time.Minute)).Err
		}
	}()
	return err
}

func TestARankThatFellSilentIsNoticed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("a", 2)
		round(t, 1, g)
		g.Host(1).Vanish() // no connection breaks: its machine lost power
		got := <-g.Vote(0, 1, true, time.Hour)
		assert.Equal(t, codes.Aborted, status.Code(got.Err), "%v", got.Err)
		assert.ErrorContains(t, got.Err, "rank 1")
		assert.Less(t, got.Took, 5*time.Second)
	})
}

func TestARankReconnects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("a", 2)
		before := round(t, 1, g)
		waits := g.Vote(0, 1, true, time.Minute)
		synctest.Wait()
		g.Host(1).Cut()
		// The rank counts as failed; or it has reconnected before the end of its connection was noticed, and
		// the others wait for it.
		assert.Regexp(t, "rank 1 .*|the deadline passed while waiting for the votes of ranks 1 on step 1",
			(<-waits).Err)
		// the rank reconnects at once, without a request, and nothing is reported to the lighthouse
		time.Sleep(time.Second)
		assert.Zero(t, c.Log.Count("a member failed"))
		after := answers{g.Quorum(0, 2, time.Minute), g.Quorum(1, 2, time.Minute)}.results(t)
		assert.Equal(t, before[0].GetQuorumId(), after[0].GetQuorumId())
	})
}

func TestDeadlinesEndEveryWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2) // never enough groups
		g := c.StartGroup("a", 2)
		long, short := g.Quorum(0, 1, time.Minute), g.Quorum(1, 1, time.Second)
		for _, answer := range (answers{long, short}) {
			got := <-answer
			require.Error(t, got.Err)
			assert.InDelta(t, 900*time.Millisecond, got.Took, 100e6,
				"the first deadline ends the round of all: %v", got.Err)
			assert.True(t, rpc.IsTimeout(got.Err), "%v", got.Err)
		}
		synctest.Wait()
		assert.Zero(t, c.Lighthouse.Status().Waiters, "the lighthouse has received the withdrawal")

		vote := <-g.Vote(0, 1, true, 3*time.Second)
		assert.True(t, rpc.IsTimeout(vote.Err), "%v", vote.Err)
		assert.ErrorContains(t, vote.Err, "waiting for the votes of ranks 1 on step 1",
			"the error names the rank that the call waited for")
		assert.InDelta(t, 2900*time.Millisecond, vote.Took, 100e6)
	})
}

func TestATimeoutHasTheReasonWhyThereIsNoQuorum(t *testing.T) {
	for _, deadline := range []time.Duration{50 * time.Millisecond, time.Second, time.Minute} {
		t.Run(deadline.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := fttest.NewCluster(t, 2)
				g := c.StartGroup("a", 2)
				for _, answer := range g.QuorumOfAll(1, deadline) {
					got := <-answer
					assert.EqualError(t, got.Err,
						"quorum call to manager at "+g.Server.Address()+" timed out: quorum call to "+
							"lighthouse at "+
							fttest.LighthouseAddr+" timed out: no quorum in time: 1 member asked, "+
							"min_replicas "+
							"is 2 (DeadlineExceeded)")
					assert.True(t, rpc.IsTimeout(got.Err))
					assert.LessOrEqual(t, got.Took, deadline)
					assert.GreaterOrEqual(t, got.Took, deadline-min(150*time.Millisecond, deadline/10))
				}
			})
		})
	}
}

// The error names the lighthouse even if it accepts connections and does not answer.
func TestASilentLighthouseIsNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("a", 1)
		c.Net.Host("lighthouse").Freeze()
		got := <-g.Quorum(0, 1, time.Second)
		assert.True(t, rpc.IsTimeout(got.Err))
		assert.ErrorContains(t, got.Err, "quorum call to lighthouse at "+fttest.LighthouseAddr+" timed "+
			"out: context deadline exceeded (DeadlineExceeded)")
		assert.Less(t, got.Took, time.Second)
	})
}

func TestShutdownAnswersEveryWaiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		g := c.StartGroup("a", 2)
		asked := g.Quorum(0, 1, time.Minute)
		synctest.Wait()
		// by the rank that asks: the vote of another rank would end at once
		voted := g.Vote(0, 0, true, time.Minute)
		synctest.Wait()
		start := time.Now()
		g.Server.Shutdown()
		assert.Equal(t, codes.Unavailable, status.Code((<-asked).Err))
		assert.Equal(t, codes.Unavailable, status.Code((<-voted).Err))
		g.Server.Shutdown() // a second call does nothing
		assert.Less(t, time.Since(start), atOnce)
		assert.Equal(t, codes.Unavailable, status.Code((<-g.Vote(0, 1, true, time.Second)).Err))
	})
}

func TestANewMemberIsInTheQuorumWithinTwoRounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		first := round(t, 1, a, b)
		n := c.StartGroup("n", 1)
		joined := n.Quorum(0, 0, time.Minute)
		synctest.Wait()
		for step := int64(2); ; step++ {
			require.LessOrEqual(t, step, int64(3))
			if r := round(t, step, a, b); r[0].ReplicaWorldSize == 3 {
				assert.Greater(t, r[0].GetQuorumId(), first[0].GetQuorumId())
				break
			}
		}
		got := <-joined
		require.NoError(t, got.Err)
		assert.True(t, got.Value.Heal)
	})
}

func TestSurvivorsContinueWithoutAFailedGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		first := round(t, 1, a, b)
		b.Server.Shutdown()
		got := <-a.Quorum(0, 2, time.Minute)
		require.NoError(t, got.Err)
		assert.Equal(t, []string{"a"}, got.Value.GetReplicaIds())
		assert.Greater(t, got.Value.GetQuorumId(), first[0].GetQuorumId())
		assert.LessOrEqual(t, got.Took, 5200*time.Millisecond, "a heartbeat timeout and a tick")
	})
}

func TestRanksWaitWhileTheLighthouseRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a, b := c.StartGroup("a", 2), c.StartGroup("b", 2)
		first := round(t, 1, a, b)
		waiting := answers(a.QuorumOfAll(2, time.Minute))
		synctest.Wait()

		c.Lighthouse.Shutdown()
		time.Sleep(20 * time.Second)
		c.StartLighthouse(2)
		waiting = append(waiting, b.QuorumOfAll(2, time.Minute)...)
		second := waiting.results(t)
		assert.Equal(t, first[0].GetQuorumId(), second[0].GetQuorumId(),
			"all members of the quorum are back: they need not reconnect")

		// The lighthouse is restarted again, as after a crash.
		c.Net.Host("lighthouse").Kill()
		c.Lighthouse.Shutdown()
		c.StartLighthouse(2)
		third := round(t, 3, a, b)
		assert.Equal(t, first[0].GetQuorumId(), third[0].GetQuorumId())
		for _, name := range []string{"a", "b"} {
			lines := c.Log.Count(`heartbeats do not reach the lighthouse" replica_id=` + name)
			assert.Positive(t, lines)
			assert.LessOrEqual(t, lines, 2, "one line per outage, not a flood:\n%s", c.Log)
		}
		time.Sleep(time.Second) // a group may get its quorum before it notices that the outage is over
		assert.Positive(t, c.Log.Count(`level=WARN msg="torchft: heartbeats reach the lighthouse again"`),
			"the end is as visible as the begin")
		assert.Zero(t, c.Log.Count("asking the lighthouse again"), "it is the same outage:\n%s", c.Log)
		for _, noise := range []string{"rpc error", "transport: "} {
			assert.Zero(t, c.Log.Count(noise), "%s", c.Log)
		}
	})
}

func TestALighthouseThatStaysAwayIsNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("a", 2)
		round(t, 1, g)
		c.Lighthouse.Shutdown()
		for _, answer := range g.QuorumOfAll(2, 10*time.Second) {
			got := <-answer
			assert.True(t, rpc.IsTimeout(got.Err))
			assert.ErrorContains(t, got.Err,
				"the lighthouse at http://lighthouse:29510 could not be reached, tried for ")
			assert.ErrorContains(t, got.Err, "connection refused")
			assert.Less(t, got.Took, 10*time.Second)
			assert.Greater(t, got.Took, 8*time.Second)
		}
	})
}

func TestAGhostIsNoCandidate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := c.StartGroup("a", 1)
		ghost, err := lighthouses.Dial(t.Context(), fttest.LighthouseAddr, time.Second,
			rpc.Dialing{Network: c.Net.Host("ghost")})
		require.NoError(t, err)
		defer func() { require.NoError(t, ghost.Close()) }()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = ghost.Quorum(ctx, quorum.Member{ReplicaID: "ghost"}, 0)
		require.True(t, rpc.IsTimeout(err), "a, which is alive, had not asked: %v", err)
		require.NoError(t, ghost.Heartbeat(t.Context(), "ghost")) // alive, but not waiting
		got := <-a.Quorum(0, 1, time.Minute)
		require.NoError(t, got.Err)
		assert.Equal(t, []string{"a"}, got.Value.GetReplicaIds())
	})
}

func TestAttemptsOfAVoteDoNotMix(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("a", 2)
		round(t, 5, g)
		leftOver := g.Vote(0, 5, true, time.Minute)
		synctest.Wait()
		round(t, 5, g) // the same step again: rank 1 had failed before it voted
		assert.Equal(t, codes.Aborted, status.Code((<-leftOver).Err))
		yes, no := g.Vote(0, 5, true, time.Minute), g.Vote(1, 5, false, time.Minute)
		for _, vote := range []<-chan fttest.Answer[bool]{yes, no} {
			got := <-vote
			require.NoError(t, got.Err)
			assert.False(t, got.Value)
		}
	})
}

func TestRanksDoNotWaitForEachOther(t *testing.T) {
	for _, first := range []string{"for a vote", "for a quorum"} {
		t.Run(first, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := fttest.NewCluster(t, 1)
				g := c.StartGroup("a", 2)
				round(t, 1, g)
				var vote, asked <-chan error
				if first == "for a vote" {
					vote = waiting(g, 0, "for a vote")
					synctest.Wait()
					asked = waiting(g, 1, "for a quorum")
				} else {
					asked = waiting(g, 1, "for a quorum")
					synctest.Wait()
					vote = waiting(g, 0, "for a vote")
				}
				start := time.Now()
				err := <-vote
				assert.Equal(t, codes.Aborted, status.Code(err), "%v", err)
				assert.ErrorContains(t, err, "rank 1 asked for the next quorum, and will not vote on step 1")
				require.NoError(t, <-waiting(g, 0, "for a quorum"))
				require.NoError(t, <-asked)
				assert.Less(t, time.Since(start), atOnce)
			})
		})
	}
}

func TestAWrongWorldSizeFailsTheGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("a", 2)
		sibling := g.Quorum(0, 1, time.Minute)
		synctest.Wait()
		wrong := <-g.QuorumWith(&fttest.Request{GroupRank: 1, Step: 1, GroupWorldSize: 4}, time.Minute)
		for _, err := range []error{wrong.Err, (<-sibling).Err} {
			assert.Equal(t, codes.InvalidArgument, status.Code(err))
			assert.ErrorContains(t, err, "4")
			assert.ErrorContains(t, err, "2")
		}
	})
}

func TestReconfigureHandlesReachTheirRank(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a, b := c.StartGroup("a", 2), c.StartGroup("b", 2)
		var all answers
		for i, g := range []*fttest.Group{a, b} {
			for rank := range int64(2) {
				handle := fmt.Sprintf("%d/%d", i, rank)
				all = append(all, g.QuorumWith(&fttest.Request{GroupRank: rank, ReconfigureHandle: handle,
					GroupWorldSize: 2}, time.Minute))
			}
		}
		for i, r := range all.results(t) {
			assert.Equal(t, []string{fmt.Sprintf("0/%d", i%2), fmt.Sprintf("1/%d", i%2)}, r.GetReconfigureHandles())
		}
	})
}
