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
	"github.com/torchft/torchft/go/torchftpb"
)

// trainer is a group of one rank. Its weights are those of step, which were committed in a quorum.
type trainer struct {
	*fttest.Group
	step, committed, quorum, failures int64
}

// asks requests a quorum for all of these groups, and returns the pending answers.
func asks(groups ...*trainer) (pending answers) {
	for _, g := range groups {
		pending = append(pending, g.QuorumWith(&fttest.Request{
			Step: g.step, CommittedQuorumId: g.committed, CommitFailures: g.failures,
		}, time.Minute))
	}
	return pending
}

// follow waits for the answers to asks, and lets the groups heal. It returns the ids of those that healed.
func follow(t *testing.T, pending answers, groups ...*trainer) (healed []string) {
	t.Helper()
	for i, r := range pending.results(t) {
		g := groups[i]
		g.quorum = r.GetQuorumId()
		if r.Heal {
			healed = append(healed, r.GetReplicaIds()[r.ReplicaRank])
			g.step, g.committed = r.MaxStep, r.GetCommittedQuorumId()
		}
		require.Equal(t, r.MaxStep, g.step)
	}
	return healed
}

func ask(t *testing.T, groups ...*trainer) (healed []string) {
	t.Helper()
	return follow(t, asks(groups...), groups...)
}

// vote decides on the step of a group whose only rank votes for its commit, or against it.
func (g *trainer) vote(t *testing.T, commits bool) {
	t.Helper()
	got := <-g.Vote(0, g.step, commits, time.Minute)
	require.NoError(t, got.Err)
	require.Equal(t, commits, got.Value)
	if !commits {
		g.failures++
		return
	}
	g.step, g.committed, g.failures = g.step+1, g.quorum, 0
}

// All data of a's collectives have arrived when a is cut off from its lighthouse, or stops, for longer than
// the heartbeat timeout. The others abort the step. Then a commits it, in a quorum that the others have left.
// In the end all groups have the same weights.
func TestAnEvictedGroupMayCommitTheStepInFlight(t *testing.T) {
	for name, order := range map[string]struct {
		others int
		play   func(t *testing.T, a *trainer, others []*trainer, back func()) (healed []string)
		a      bool // the job continues with the step of a
	}{
		"it is the first to ask": {2, func(t *testing.T, a *trainer, others []*trainer,
			back func()) []string {
			back()
			return ask(t, append(others, a)...)
		}, true},
		"it asks while the others make the step again": {2,
			func(t *testing.T, a *trainer, others []*trainer, back func()) []string {
				require.Empty(t, ask(t, others...))
				back()
				return askFirst(t, a, others, func() { others[0].vote(t, true); others[1].vote(t, true) })
			}, false},
		"the others fail to make the step again": {2,
			func(t *testing.T, a *trainer, others []*trainer, back func()) []string {
				require.Empty(t, ask(t, others...))
				back()
				return askFirst(t, a, others, func() { others[0].vote(t, false); others[1].vote(t, false) })
			}, true},
		"only one of the others makes the step again": {2,
			func(t *testing.T, a *trainer, others []*trainer, back func()) []string {
				require.Empty(t, ask(t, others...))
				back()
				return askFirst(t, a, others, func() { others[0].vote(t, false); others[1].vote(t, true) })
			}, false},
		"the others are ahead": {2, func(t *testing.T, a *trainer, others []*trainer, back func()) []string {
			for range 3 {
				require.Empty(t, ask(t, others...))
				others[0].vote(t, true)
				others[1].vote(t, true)
			}
			back()
			return askFirst(t, a, others, func() {
				// their quorum stands: they had begun another step when a asked
				require.Empty(t, ask(t, others...))
				others[0].vote(t, true)
				others[1].vote(t, true)
			})
		}, false},
		"the only other group makes the step again": {1,
			func(t *testing.T, a *trainer, others []*trainer, back func()) []string {
				require.Empty(t, ask(t, others...))
				back()
				return askFirst(t, a, others, func() { others[0].vote(t, true) })
			}, false},
		"the only other group fails to make the step again": {1,
			func(t *testing.T, a *trainer, others []*trainer, back func()) []string {
				require.Empty(t, ask(t, others...))
				back()
				return askFirst(t, a, others, func() { others[0].vote(t, false) })
			}, true},
	} {
		for fault, change := range map[string]func(n *fttest.Network) (back func(commits func())){
			"cut off from the lighthouse": func(n *fttest.Network) func(commits func()) {
				n.Sever("a", "lighthouse")
				n.Sever("lighthouse", "a")
				return func(commits func()) {
					commits()
					n.Heal("a", "lighthouse")
					n.Heal("lighthouse", "a")
				}
			},
			"stopped": func(n *fttest.Network) func(commits func()) {
				n.Pause("a")
				return func(commits func()) {
					n.Resume("a")
					commits()
				}
			},
		} {
			t.Run(name+", "+fault, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					c := fttest.NewCluster(t, 1)
					a := &trainer{Group: c.StartGroup("a", 1), step: 1, committed: -1}
					a.Ranks[0] = a.Dial("a") // in the process of its manager server: both stop together
					var others []*trainer
					for _, id := range []string{"b", "d"}[:order.others] {
						others = append(others, &trainer{Group: c.StartGroup(id, 1), step: 1, committed: -1})
					}
					require.Empty(t, ask(t, append(others, a)...))
					of := a.quorum
					back := change(c.Net)
					for _, g := range others {
						assert.Equal(t, "a", nextFailure(t, g.Group, 0).GetReplicaId())
						g.vote(t, false)
					}
					healed := order.play(t, a, others, func() {
						back(func() { a.vote(t, true) })
						time.Sleep(20 * time.Second) // a has a new stream by then
					})

					assert.Equal(t, order.a, a.committed == of)
					if order.a {
						assert.NotContains(t, healed, "a")
					} else {
						assert.Contains(t, healed, "a")
					}
					for _, g := range others {
						assert.Equal(t, [2]int64{a.step, a.committed}, [2]int64{g.step, g.committed})
					}
					for _, g := range append(others, a) {
						assert.Equal(t, a.quorum, g.quorum)
						g.vote(t, true)
					}
					assert.Empty(t, ask(t, append(others, a)...), "all have equal weights")
				})
			})
		}
	}
}

// askFirst lets a ask, then the others end their step and ask.
func askFirst(t *testing.T, a *trainer, others []*trainer, end func()) []string {
	t.Helper()
	pending := asks(a)
	synctest.Wait()
	end()
	return append(ask(t, others...), follow(t, pending, a)...)
}

// Otherwise a group that hangs would hold its devices for ever, and nobody would start it again.
func TestAnEvictedGroupThatMakesNoProgressIsEnded(t *testing.T) {
	for name, c := range map[string]struct {
		phase torchftpb.Phase
		moves bool
		ends  time.Duration // after the eviction; 0: never
	}{
		"in a step":                      {ends: 30 * time.Second},
		"in an evaluation":               {phase: torchftpb.Phase_EVALUATION, ends: 5*time.Minute - 10*time.Second},
		"it goes on":                     {moves: true},
		"it goes on after an evaluation": {phase: torchftpb.Phase_EVALUATION, moves: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cluster := fttest.NewCluster(t, 1,
					func(cfg *lighthouse.Config) { cfg.EjectStalledAfter = 10 * time.Second })
				exited := make(chan time.Time, 1)
				a := cluster.StartGroup("a", 1)
				b := cluster.StartGroup("b", 1,
					func(cfg *manager.ServerConfig) { cfg.Exit = func(int) { exited <- time.Now() } })
				for step := range int64(3) { // the first steps may take long
					round(t, step, a, b)
					for _, g := range []*fttest.Group{a, b} {
						require.True(t, (<-g.Vote(0, step, true, time.Minute)).Value)
					}
				}
				round(t, 3, a, b)
				if c.phase != 0 {
					b.Ranks[0].Report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Progress{
						Progress: &torchftpb.RankProgress{Begins: true, Phase: c.phase}}})
				}
				require.True(t, (<-a.Vote(0, 3, true, time.Minute)).Value)
				pending := a.Quorum(0, 4, time.Minute)
				require.NoError(t, (<-pending).Err) // b is evicted
				evicted := time.Now()
				if c.moves {
					time.Sleep(20 * time.Second)
					require.True(t, (<-b.Vote(0, 3, true, time.Minute)).Value)
				}
				time.Sleep(10 * time.Minute)
				if c.ends == 0 {
					assert.Empty(t, exited)
				} else {
					assert.InDelta(t, c.ends, (<-exited).Sub(evicted), float64(30*time.Second))
				}
			})
		})
	}
}
