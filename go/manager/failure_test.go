package manager_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/testmain"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/torchftpb"
)

const grace = 200 * time.Millisecond

// nextFailure returns the next failure that a rank is notified of.
func nextFailure(t *testing.T, g *fttest.Group, rank int) *torchftpb.Notice {
	t.Helper()
	deadline := time.After(time.Minute)
	for {
		select {
		case notice := <-g.Ranks[rank].Notices():
			if notice.GetKind() == torchftpb.Notice_MEMBER_FAILED {
				return notice
			}
		case <-deadline:
			require.Fail(t, "the rank was not notified")
			return nil
		}
	}
}

func TestAFailureIsReportedToAllAndEndsTheirWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		groups := []*fttest.Group{c.StartGroup("a", 2), c.StartGroup("b", 2), c.StartGroup("c", 2)}
		before := round(t, 0, groups...)
		// one rank has asked, the other one is still in a collective
		first := groups[0].Quorum(0, 1, time.Minute)
		synctest.Wait()

		failedAt := time.Now()
		groups[2].Host(-1).Kill()
		failure := nextFailure(t, groups[0], 1)
		assert.InDelta(t, grace, time.Since(failedAt), float64(atOnce))
		assert.Equal(t, before[0].GetQuorumId(), failure.GetQuorumId())
		assert.Equal(t, "c", failure.GetReplicaId())
		assert.Contains(t, failure.GetReason(), "its connection broke")
		assert.True(t, proto.Equal(failure, nextFailure(t, groups[0], 0)))
		assert.True(t, proto.Equal(failure, nextFailure(t, groups[1], 0)))

		after := append(answers{first, groups[0].Quorum(1, 1, time.Minute)},
			groups[1].QuorumOfAll(1, time.Minute)...).results(t)
		assert.Equal(t, []string{"a", "b"}, after[0].GetReplicaIds())
		assert.Less(t, time.Since(failedAt), grace+10*time.Millisecond,
			"no member waited for longer than the grace")
	})
}

// The host of rank 0 sends the group's heartbeats, and the lighthouse notices their absence. Of the other hosts
// the manager server notices the silence, within the same time.
func TestAnyHostOfAGroupThatVanishesIsNoticed(t *testing.T) {
	for rank := range 3 {
		for _, idle := range []time.Duration{0, 300 * time.Millisecond, time.Minute} {
			t.Run(fmt.Sprintf("of rank %d, %s after a step", rank, idle), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					c := fttest.NewCluster(t, 1)
					a, b := c.StartGroup("a", 3), c.StartGroup("b", 3)
					round(t, 0, a, b)
					time.Sleep(idle)
					a.Host(rank - 1).Vanish() // -1 is the manager server's
					vanished := time.Now()
					require.Equal(t, "a", nextFailure(t, b, 0).GetReplicaId())
					assert.LessOrEqual(t, time.Since(vanished), 5*time.Second)
				})
			})
		}
	}
}

// The connection of a rank breaks twice in a row: the second time, too, the rank gets the whole grace to come
// back.
func TestEachBreakOfARanksConnectionHasItsGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 2), c.StartGroup("b", 2)
		round(t, 0, a, b)
		a.Host(1).Cut() // the client reconnects within milliseconds
		time.Sleep(grace * 3 / 4)
		a.Host(1).Kill()
		killed := time.Now()
		require.Equal(t, "a", nextFailure(t, b, 0).GetReplicaId())
		require.InDelta(t, grace, time.Since(killed), float64(atOnce))
	})
}

func TestAllButOneFailAtOnceAndTheLastOneContinues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b, d := c.StartGroup("a", 1), c.StartGroup("b", 1), c.StartGroup("d", 1)
		round(t, 0, a, b, d)
		failedAt := time.Now()
		for _, failed := range []*fttest.Group{b, d} {
			failed.Host(-1).Kill()
			failed.Server.Shutdown()
		}
		nextFailure(t, a, 0)
		assert.Equal(t, []string{"a"}, round(t, 1, a)[0].GetReplicaIds())
		assert.Less(t, time.Since(failedAt), 2*grace)
	})
}

// Also the first of a quorum, half of it, or most of it: the others continue within a second.
func TestWhicheverGroupsAreKilledTheOthersContinue(t *testing.T) {
	names := []string{"a", "b", "d", "e", "f"}
	for n := 2; n <= len(names); n++ {
		for mask := 1; mask < 1<<n-1; mask += 1 + n*n/16*4 { // with many groups, only some sets
			t.Run(fmt.Sprintf("%0*b of %d", n, mask, n), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					c := fttest.NewCluster(t, 1)
					var groups, alive []*fttest.Group
					for _, name := range names[:n] {
						groups = append(groups, c.StartGroup(name, 1))
					}
					round(t, 1, groups...)
					// at different times between two heartbeats
					time.Sleep(time.Duration(mask) * 700 * time.Millisecond)
					for i, g := range groups {
						if mask>>i&1 == 0 {
							alive = append(alive, g)
							continue
						}
						g.Host(-1).Kill()
						g.Server.Shutdown()
					}
					start := time.Now()
					require.Len(t, round(t, 2, alive...)[0].GetReplicaIds(), len(alive))
					require.Less(t, time.Since(start), time.Second)
				})
			})
		}
	}
}

func TestASilentHostIsReportedWhenItsHeartbeatIsTooOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		round(t, 0, a, b)
		silent := time.Now()
		b.Host(-1).Freeze()
		failure := nextFailure(t, a, 0)
		assert.Equal(t, "b", failure.GetReplicaId())
		assert.Contains(t, failure.GetReason(), "no sign of life")
		assert.InDelta(t, 5*time.Second, time.Since(silent), float64(200*time.Millisecond))
	})
}

// Once a second for 100 s (ten minutes in the full tests), all groups are cut off from the lighthouse for 100
// ms, half of the grace, while a step begins.
func TestAFlappingNetworkIsNoFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		before := round(t, 0, a, b)
		steps := int64(100)
		if testmain.Full() {
			steps = 600
		}
		for step := range steps {
			c.Net.Interrupt("a", "lighthouse", 100*time.Millisecond)
			c.Net.Interrupt("b", "lighthouse", 100*time.Millisecond)
			began := time.Now()
			assert.Equal(t, before[0].GetQuorumId(), round(t, 1+step, a, b)[0].GetQuorumId())
			time.Sleep(time.Until(began.Add(time.Second)))
			synctest.Wait()
		}
		for _, g := range []*fttest.Group{a, b} {
			select {
			case notice := <-g.Ranks[0].Notices():
				assert.NotEqual(t, torchftpb.Notice_MEMBER_FAILED, notice.GetKind(), "a false failure: %+v", notice)
			default:
			}
		}
		assert.Zero(t, c.Log.Count("a member failed"))
	})
}

// The connection breaks while the answer is on its way. The others have received their answers, and wait in a
// collective: when the group asks again, it must get its answer before the others ask again.
func TestAQuorumThatWasLostOnTheWayIsRedelivered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		before := round(t, 0, a, b)
		unanswered := a.Quorum(0, 1, time.Minute)
		synctest.Wait()
		c.Net.Hold("a", "lighthouse")
		b1 := <-b.Quorum(0, 1, time.Minute)
		require.NoError(t, b1.Err)
		synctest.Wait()
		c.Net.Interrupt("a", "lighthouse", time.Millisecond)
		a1 := <-unanswered
		require.NoError(t, a1.Err)
		assert.Less(t, a1.Took, time.Second)
		assert.Equal(t, b1.Value.GetQuorumId(), a1.Value.GetQuorumId())
		assert.Equal(t, before[0].GetQuorumId(), a1.Value.GetQuorumId())
		after := round(t, 2, a, b)
		assert.Equal(t, before[0].GetQuorumId(), after[0].GetQuorumId(), "all continue in the same quorum")
	})
}

func TestARankThatEndsIsTheFailureOfItsGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 2), c.StartGroup("b", 2)
		round(t, 0, a, b)
		failedAt := time.Now()
		b.Host(1).Kill() // the manager server of b, in another process, stays alive
		assert.Contains(t, nextFailure(t, a, 0).GetReason(), "rank 1 of replica group b has failed")
		assert.InDelta(t, grace, time.Since(failedAt), float64(atOnce))
		after := answers(a.QuorumOfAll(1, time.Minute)).results(t)
		assert.Equal(t, []string{"a"}, after[0].GetReplicaIds())
		assert.Less(t, time.Since(failedAt), grace+10*time.Millisecond)
		// The rank is restarted, and all ranks of the group ask.
		b.Ranks[1] = b.Dial("b/1")
		first := b.Quorum(1, 0, time.Minute)
		synctest.Wait()
		second := b.Quorum(0, 0, time.Minute)
		synctest.Wait()
		both := append(answers{first, second}, a.QuorumOfAll(1, time.Minute)...).results(t)
		assert.Equal(t, []string{"a", "b"}, both[0].GetReplicaIds())
	})
}

// The group loses its stream to the lighthouse just before it reports that a rank has failed, and has another
// one within the grace. So the lighthouse keeps the group, whose manager server answers, and the others would
// wait for the failed rank.
func TestARankThatEndsDuringAnInterruptionIsTheFailureOfItsGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 2), c.StartGroup("b", 2)
		round(t, 0, a, b)
		b.Host(1).Kill()
		time.Sleep(grace - 10*time.Millisecond)
		c.Net.Interrupt("b", "lighthouse", 50*time.Millisecond)
		after := answers(a.QuorumOfAll(1, 10*time.Second)).results(t)
		assert.Equal(t, []string{"a"}, after[0].GetReplicaIds())
		assert.Zero(t, c.Log.Count("its connection broke and it has not come back"))
	})
}

// The stream of a host that lost power stays open. If two of its peers report failed collectives, the
// lighthouse checks the member, and does not wait until its heartbeat is too old.
func TestPeersThatLostACollectiveNeedNotWaitForTheHeartbeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b, d := c.StartGroup("a", 1), c.StartGroup("b", 1), c.StartGroup("d", 1)
		before := round(t, 0, a, b, d)
		d.Host(-1).Freeze()
		at := time.Now()
		fttest.Suspect(a.Ranks[0], before[0].GetQuorumId(), "")
		time.Sleep(2 * time.Second)
		assert.Zero(t, c.Log.Count("a member failed"), "one report is not enough")
		fttest.Suspect(b.Ranks[0], before[0].GetQuorumId(), "d")
		failure := nextFailure(t, a, 0)
		assert.Equal(t, "d", failure.GetReplicaId())
		assert.Contains(t, failure.GetReason(), "its peers lost the connection with it")
		assert.InDelta(t, 3*time.Second, time.Since(at), float64(100*time.Millisecond))
	})
}

func TestAFalseReportEvictsNoMember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		before := round(t, 0, a, b)
		// with two groups, one report suffices for a check
		fttest.Suspect(a.Ranks[0], before[0].GetQuorumId(), "b")
		time.Sleep(2 * time.Second)
		assert.Equal(t, 1, c.Log.Count("peers suspect a member"))
		after := round(t, 1, a, b)
		assert.Equal(t, before[0].GetQuorumId(), after[0].GetQuorumId())
	})
}

// a has the quorum of a step, and waits for b in a collective of it; b's answer was lost with the lighthouse.
// It asks with another request than before, so the quorum is not redelivered.
func TestALighthouseThatFailsBetweenItsAnswersDoesNotHoldUpItsMembersForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		round(t, 0, a, b)
		before := round(t, 1, a, b)[0]
		c.Net.Host("lighthouse").Kill()
		c.Lighthouse.Shutdown()
		c.StartLighthouse(1)

		began := time.Now()
		again := b.QuorumWith(&fttest.Request{Step: 1, ShrinkOnly: true}, time.Minute)
		for reported := false; !reported; {
			switch notice := <-a.Ranks[0].Notices(); notice.GetKind() {
			case torchftpb.Notice_PROGRESS_ASKED:
				fttest.ReportProgress(a.Ranks[0], 0, true, "waits in allreduce")
			case torchftpb.Notice_MEMBER_FAILED:
				assert.Equal(t, before.GetQuorumId(), notice.GetQuorumId())
				assert.Equal(t, "b", notice.GetReplicaId())
				assert.Contains(t, notice.GetReason(),
					"it asks for the quorum of step 1, in which its peers wait for it")
				reported = true
			default:
			}
		}
		after := answers{a.Quorum(0, 1, time.Minute), again}.results(t)
		assert.Less(t, time.Since(began), 7*time.Second)
		assert.Equal(t, []string{"a", "b"}, after[1].GetReplicaIds())
		assert.Greater(t, after[1].GetQuorumId(), before.GetQuorumId())
	})
}

// hangs lets rank 1 of b hang. All others are in a collective, and report that when they are asked. It
// returns why b is stalled, and the quorum from which it is evicted. The lighthouse learns the present step
// by so much later.
func hangs(t *testing.T, a, b *fttest.Group, later time.Duration) (reason string, quorumID int64) {
	t.Helper()
	began := time.Now()
	done := make(chan struct{})
	defer close(done)
	for _, r := range []struct {
		g    *fttest.Group
		rank int64
	}{{a, 0}, {a, 1}, {b, 0}} {
		go func() {
			for {
				select {
				case notice := <-r.g.Ranks[r.rank].Notices():
					if notice.GetKind() == torchftpb.Notice_PROGRESS_ASKED {
						fttest.ReportProgress(r.g.Ranks[r.rank], r.rank, true, "waits in allreduce")
					}
				case <-done:
					return
				}
			}
		}()
	}
	var named, out *torchftpb.Notice
	for out == nil {
		switch notice := <-b.Ranks[1].Notices(); notice.GetKind() {
		case torchftpb.Notice_STALLED:
			named = notice
			assert.InDelta(t, 5500*time.Millisecond+later, time.Since(began), float64(800*time.Millisecond))
		case torchftpb.Notice_MEMBER_FAILED:
			out = notice
		default:
		}
	}
	assert.Equal(t, "b", named.GetReplicaId())
	assert.InDelta(t, 10*time.Second+later, time.Since(began), float64(1200*time.Millisecond))
	return named.GetReason(), out.GetQuorumId()
}

// No group asks: the heartbeats show that there is no progress.
func TestAMemberThatStallsWhileItsQuorumStandsIsEvicted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1,
			func(cfg *lighthouse.Config) { cfg.EjectStalledAfter = 10 * time.Second })
		a, b := c.StartGroup("a", 2), c.StartGroup("b", 2)
		asks := func(step, committed, failures int64, groups ...*fttest.Group) (pending answers) {
			for _, g := range groups {
				for rank := range int64(2) {
					pending = append(pending, g.QuorumWith(&fttest.Request{
						GroupRank: rank, Step: step, CommittedQuorumId: committed, CommitFailures: failures,
					}, time.Minute))
				}
			}
			return pending
		}
		before := asks(1, -1, 0, a, b).results(t)[0].GetQuorumId()
		for step := int64(1); step < 4; step++ {
			for _, g := range []*fttest.Group{a, b} {
				first, second := g.Vote(0, step, true, time.Minute), g.Vote(1, step, true, time.Minute)
				require.True(t, (<-first).Value && (<-second).Value)
			}
		}
		named, out := hangs(t, a, b, 5*time.Second/3) // an interval of heartbeats
		assert.Contains(t, named, "rank 1, step 4: does not answer")
		assert.Equal(t, before, out)
		after := asks(4, before, 1, a).results(t)
		assert.Equal(t, []string{"a"}, after[0].GetReplicaIds())
	})
}

func TestAStalledMemberIsNamedAndEvicted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1,
			func(cfg *lighthouse.Config) { cfg.EjectStalledAfter = 10 * time.Second })
		a, b := c.StartGroup("a", 2), c.StartGroup("b", 2)
		before := round(t, 0, a, b)
		named, out := hangs(t, a, b, 0)
		assert.Contains(t, named, "rank 1, step 0: does not answer")
		assert.Equal(t, before[0].GetQuorumId(), out)
		after := answers(a.QuorumOfAll(1, time.Minute)).results(t)
		assert.Equal(t, []string{"a"}, after[0].GetReplicaIds())

		// The rank continues, and the group heals.
		back := answers{b.Quorum(0, 0, time.Minute), b.Quorum(1, 0, time.Minute)}
		synctest.Wait()
		back = append(back, a.QuorumOfAll(1, time.Minute)...)
		assert.True(t, back.results(t)[0].Heal)
	})
}
