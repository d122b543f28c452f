package manager_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/manager"
)

// agreeing returns three lighthouses that form a cluster, and groups that know all of them.
func agreeing(t *testing.T, names ...string) (*fttest.Agreeing, []*fttest.Group) {
	l := fttest.NewAgreeing(t, 1)
	var groups []*fttest.Group
	for _, name := range names {
		groups = append(groups, l.StartGroup(name, 1,
			func(cfg *manager.ServerConfig) { cfg.LighthouseAddr = fttest.AgreeingAddrs }))
	}
	return l, groups
}

// A leader that fails costs no step, and no new connection between the groups: the quorum keeps its id.
func TestALeaderThatFailsCostsNoStep(t *testing.T) {
	for name, one := range map[string]struct {
		fail   func(l *fttest.Agreeing, leader string)
		within time.Duration
	}{
		"killed": {func(l *fttest.Agreeing, leader string) { l.Kill(leader) }, 1500 * time.Millisecond},
		"vanished": {func(l *fttest.Agreeing, leader string) { l.Net.Host(leader).Vanish() },
			3 * time.Second},
		"stopped": {func(l *fttest.Agreeing, leader string) { l.Net.Pause(leader) }, 3 * time.Second},
		"cut off from the other lighthouses": {func(l *fttest.Agreeing, leader string) {
			for _, host := range fttest.AgreeingHosts {
				if host != leader {
					l.Net.Block(leader, host)
				}
			}
		}, 3 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, groups := agreeing(t, "a", "b", "d")
				before := round(t, 1, groups...)[0]
				assert.Equal(t, before.GetQuorumId(), round(t, 2, groups...)[0].GetQuorumId())

				leader, start := l.Leader(), time.Now()
				one.fail(l, leader)
				after := round(t, 3, groups...)[0]
				t.Logf("the next quorum came after %s", time.Since(start))
				assert.Less(t, time.Since(start), one.within)
				assert.Equal(t, before.GetQuorumId(), after.GetQuorumId())
				assert.Equal(t, []string{"a", "b", "d"}, after.GetReplicaIds())
				assert.Equal(t, before.GetQuorumId(), round(t, 4, groups...)[0].GetQuorumId())
			})
		})
	}
}

// The next leader knows the last quorum from the log: a member that has ended meanwhile is waited for, as by
// a leader that knew it.
func TestANewLeaderContinuesFromTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, groups := agreeing(t, "a", "b")
		before := round(t, 7, groups...)[0]
		l.Kill(l.Leader())
		groups[1].Host(-1).Kill()
		groups[1].Server.Shutdown()
		start := time.Now()
		got := <-groups[0].Quorum(0, 8, time.Minute)
		require.NoError(t, got.Err)
		assert.Equal(t, []string{"a"}, got.Value.GetReplicaIds())
		assert.Greater(t, got.Value.GetQuorumId(), before.GetQuorumId())
		assert.Greater(t, time.Since(start), 4*time.Second, "b has the heartbeat timeout to come")
	})
}

// The reports of broken collectives, which the failed leader has not received, reach the next one: a member
// that fails together with the leader is missed as soon as one that fails alone.
func TestANewLeaderHearsWhichMembersFailedWithTheFormerOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, groups := agreeing(t, "a", "b", "d")
		before := round(t, 7, groups...)
		l.Kill(l.Leader())
		groups[2].Host(-1).Kill()
		start := time.Now()
		for i, g := range groups[:2] {
			fttest.Suspect(g.Ranks[0], before[i].GetQuorumId(), "")
		}
		time.Sleep(100 * time.Millisecond) // as a rank, which aborts its collectives first
		for _, got := range round(t, 8, groups[:2]...) {
			assert.Equal(t, []string{"a", "b"}, got.GetReplicaIds())
		}
		assert.Less(t, time.Since(start), 2500*time.Millisecond)
	})
}

// A report does not outlive the round that follows it, in which the suspect may train: the next leader would
// have to check a member that has not come to it yet.
func TestANewLeaderDoesNotHearOfBrokenStepsOfEarlierRounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, groups := agreeing(t, "a", "b")
		before := round(t, 7, groups...)
		fttest.Suspect(groups[0].Ranks[0], before[0].GetQuorumId(), "b")
		time.Sleep(2 * time.Second)
		assert.Equal(t, 1, l.Log.Count("peers suspect a member"))
		assert.Equal(t, before[0].GetQuorumId(), round(t, 8, groups...)[0].GetQuorumId())
		l.Kill(l.Leader())
		time.Sleep(5 * time.Second)
		assert.Equal(t, 1, l.Log.Count("peers suspect a member"))
	})
}

// Without a majority the job waits, says why, and goes on when the majority is back.
func TestWithoutAMajorityTheJobWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, groups := agreeing(t, "a", "b")
		before := round(t, 1, groups...)[0]
		leader, back := l.Leader(), ""
		for _, host := range fttest.AgreeingHosts {
			if host != leader {
				l.Kill(host)
				back = host
			}
		}
		time.Sleep(time.Second) // the leader may serve until its lease ends
		var asked answers
		for _, g := range groups {
			asked = append(asked, g.QuorumOfAll(2, time.Minute)...)
		}
		select {
		case a := <-asked[0]:
			t.Fatalf("an answer without a majority: %v", a)
		case <-time.After(10 * time.Second):
		}
		assert.Contains(t, l.Log.String(), "no lighthouse of the cluster leads")
		l.Start(back)
		for _, got := range asked.results(t) {
			assert.Equal(t, before.GetQuorumId(), got.GetQuorumId())
		}
	})
}

// All lighthouses are replaced by new processes, one after the other, while the groups train.
func TestARollingRestartCostsNoStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, groups := agreeing(t, "a", "b", "d")
		before := round(t, 1, groups...)[0]
		step := int64(2)
		for _, host := range fttest.AgreeingHosts {
			l.Kill(host)
			for range 5 {
				assert.Equal(t, before.GetQuorumId(), round(t, step, groups...)[0].GetQuorumId())
				step++
			}
			l.Start(host)
			time.Sleep(2 * time.Second)
		}
	})
}

// answeredInPart lets groups ask for a step, and the lighthouse on a host answer only the first one. The
// channels receive the answers of the others.
func answeredInPart(
	t *testing.T, net *fttest.Network, host string, step int64, groups []*fttest.Group, names ...string,
) (first *fttest.Result, others answers) {
	for _, g := range groups[1:] {
		others = append(others, g.QuorumOfAll(step, 20*time.Second)...)
	}
	synctest.Wait()
	for _, name := range names[1:] {
		net.Hold(host, name)
	}
	got := <-groups[0].Quorum(0, step, time.Minute)
	require.NoError(t, got.Err)
	for _, other := range others {
		require.Empty(t, other)
	}
	return got.Value, others
}

// The groups whose answer of a round was lost receive that round from the next leader, or from the restarted
// lighthouse. The first group waits for them in its collective, and asks nothing.
func redelivered(t *testing.T, first *fttest.Result, others answers, step int64, groups []*fttest.Group) {
	for _, got := range others.results(t) {
		assert.Equal(t, first.GetQuorumId(), got.GetQuorumId())
		assert.Equal(t, first.GetReplicaIds(), got.GetReplicaIds())
		assert.Equal(t, step, got.MaxStep)
		assert.False(t, got.Heal)
	}
	for _, g := range groups {
		vote := <-g.Vote(0, step, true, time.Minute)
		require.NoError(t, vote.Err)
		assert.True(t, vote.Value)
	}
	for range 2 {
		step++
		assert.Equal(t, first.GetQuorumId(), round(t, step, groups...)[0].GetQuorumId())
	}
}

func TestALeaderThatEndsWhileItAnswersCostsNoStep(t *testing.T) {
	for name, late := range map[string]bool{"the group with the answer greets at once": false,
		"it greets after the others have asked": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, groups := agreeing(t, "a", "b", "d")
				round(t, 1, groups...)
				leader := l.Leader()
				first, others := answeredInPart(t, l.Net, leader, 2, groups, "a", "b", "d")
				if late {
					for _, host := range fttest.AgreeingHosts {
						l.Net.Block("a", host)
					}
				}
				l.Kill(leader)
				if late {
					l.Leader()
					time.Sleep(2 * time.Second)
					for _, other := range others {
						require.Empty(t, other, "a may still show the round")
					}
					for _, host := range fttest.AgreeingHosts {
						l.Net.Unblock("a", host)
					}
				}
				start := time.Now()
				redelivered(t, first, others, 2, groups)
				assert.Less(t, time.Since(start), 3*time.Second)
			})
		})
	}
}

func TestALighthouseThatIsKilledWhileItAnswersCostsNoStep(t *testing.T) {
	for name, state := range map[string]bool{"without a disk": false, "with its state": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				keep := func(*lighthouse.Config) {}
				if state {
					dir := t.TempDir()
					keep = func(cfg *lighthouse.Config) { cfg.StateDir = dir }
				}
				c := fttest.NewCluster(t, 1, keep)
				var groups []*fttest.Group
				for _, name := range []string{"a", "b", "d"} {
					groups = append(groups, c.StartGroup(name, 1))
				}
				round(t, 1, groups...)
				first, others := answeredInPart(t, c.Net, "lighthouse", 2, groups, "a", "b", "d")
				c.Net.Host("lighthouse").Kill()
				c.Lighthouse.Shutdown()
				c.StartLighthouse(1, keep)
				start := time.Now()
				redelivered(t, first, others, 2, groups)
				assert.Less(t, time.Since(start), 3*time.Second)
			})
		})
	}
}
