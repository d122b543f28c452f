package replica_test

import (
	"context"
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/replica"
)

func slicesIndex(hosts []*host, h *host) int { return slices.Index(hosts, h) }

// wipe gives a host an empty directory.
func (h *host) wipe() { h.dir, h.memory = h.world.t.TempDir(), newMemory() }

func TestALighthouseIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b", "c")
		leader, term := w.started()
		require.NoError(t, leader.node.Propose(term, "job", []byte("1")))
		gone := w.hosts[(slices.Index(w.hosts, leader)+1)%3]
		gone.kill()
		d := w.add("d")
		d.list = slices.DeleteFunc(slices.Clone(d.list), func(a string) bool { return a == gone.address })
		d.start()
		time.Sleep(3 * time.Second)
		require.NoError(t, leader.node.Add(t.Context(), d.address))
		require.NoError(t, leader.node.Remove(t.Context(), gone.address))
		require.NoError(t, leader.node.Add(t.Context(), d.address), "it is added already")
		require.NoError(t, leader.node.Propose(term, "job", []byte("2")))
		w.agree("job", "2")
		settle(t, "d is a voter", func() bool { return knowsThreeVoters(d) })
		// The removed one comes back with its log: it takes no part, and disturbs nobody.
		gone.start()
		time.Sleep(20 * time.Second)
		require.Contains(t, gone.node.Status().Trouble,
			"this one was removed from the cluster (`torchft cluster add "+gone.address)
		require.NoError(t, leader.node.Verify(t.Context(), term))
		require.Equal(t, term, leader.node.Status().Term)
	})
}

// knowsThreeVoters reports whether a lighthouse knows three voters, and reaches them.
func knowsThreeVoters(h *host) bool {
	s := h.node.Status()
	return len(s.Members) == 3 && s.Trouble == "" &&
		!slices.ContainsFunc(s.Members, func(m replica.Member) bool { return !m.Voter || !m.Reached })
}

// A lighthouse that has lost its directory must not vote for the one that it was. The leader replaces it, if
// there is one, which needs the two others.
func TestALighthouseThatLostItsDirectoryIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b", "c")
		leader, term := w.started()
		require.NoError(t, leader.node.Propose(term, "job", []byte("1")))
		lost, third := w.hosts[(slices.Index(w.hosts, leader)+1)%3],
			w.hosts[(slices.Index(w.hosts, leader)+2)%3]
		lost.kill()
		third.kill()
		time.Sleep(3 * time.Second)
		require.ErrorIs(t, leader.node.Verify(t.Context(), term), replica.ErrNotLeading)
		lost.wipe()
		lost.start()
		time.Sleep(10 * time.Second)
		require.Contains(t, lost.node.Status().Trouble, "it waits for its leader")
		require.ErrorIs(t, leader.node.Verify(t.Context(), term), replica.ErrNotLeading,
			"the lost one does not count")
		require.Empty(t, lost.node.States())

		third.start()
		began := time.Now()
		leader, _ = w.leads(nil)
		settle(t, "it takes part", func() bool { return knowsThreeVoters(leader) && knowsThreeVoters(lost) })
		t.Logf("replaced %s after the third one has come back", time.Since(began))
		w.agree("job", "1")
		next, newer := leader, leader.node.Status().Term
		third.kill() // the new instance counts
		if third == leader {
			next, newer = w.leads(third)
		}
		require.NoError(t, next.node.Propose(newer, "job", []byte("2")))
	})
}

// A rolling update without volumes: the next one ends as soon as the one before is ready.
func TestAllLighthousesLoseTheirDirectoriesInTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b", "c")
		leader, term := w.started()
		require.NoError(t, leader.node.Propose(term, "job", []byte("1")))
		for _, h := range w.hosts {
			h.close()
			h.wipe()
			h.start()
			settle(t, "it is ready", func() bool { return h.node.Status().Trouble == "" })
		}
		settle(t, "all take part", func() bool {
			return !slices.ContainsFunc(w.hosts, func(h *host) bool { return !knowsThreeVoters(h) })
		})
		w.agree("job", "1")
	})
}

func TestTheLeaderRemovesItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b", "c")
		leader, term := w.started()
		began := time.Now()
		require.NoError(t, leader.node.Remove(t.Context(), leader.address))
		next, newer := w.leads(leader)
		t.Logf("replaced after %s", time.Since(began))
		require.Greater(t, newer, term)
		require.Len(t, next.node.Status().Members, 3)
		require.ErrorIs(t, leader.node.Propose(term, "job", []byte("1")), replica.ErrNotLeading)
		require.NoError(t, next.node.Propose(newer, "job", []byte("1")))
	})
}

func TestMembersThatCannotBeAdded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b", "c")
		leader, _ := w.started()
		follower := w.hosts[(slices.Index(w.hosts, leader)+1)%3]
		other := w.add("d")
		other.list = []string{"http://d:1", "http://e:1", "http://f:1"}
		other.start()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		require.ErrorContains(t, leader.node.Add(ctx, "d:1"), "http://")
		require.ErrorContains(t, leader.node.Add(ctx, "http://e:1"), "it does not answer: ")
		require.ErrorContains(t, leader.node.Add(ctx, "http://d:1"), "it does not know this cluster")
		require.ErrorContains(t, leader.node.Remove(t.Context(), "http://d:1"),
			"not in the cluster, which has http://a:1, http://b:1, http://c:1")
		require.ErrorIs(t, follower.node.Remove(t.Context(), leader.address), replica.ErrNotLeading)
	})
}

func TestASurvivorRecoversTheCluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b", "c")
		for _, h := range w.hosts {
			h.bolt = true
		}
		leader, term := w.started()
		for i := range 300 {
			require.NoError(t, leader.node.Propose(term, "job", []byte{byte(i), 1}))
		}
		require.NoError(t, leader.node.Snapshot())
		require.NoError(t, leader.node.Propose(term, "job", []byte("last")))
		w.agree("job", "last")
		survivor := w.hosts[0]
		survivor.kill()
		survivor.network().Revive()
		require.ErrorContains(t, replica.Recover(survivor.config()),
			"the cluster is not lost: this lighthouse and http://b:1, http://c:1, which run")
		for _, h := range w.hosts[1:] {
			h.kill()
		}
		require.ErrorContains(t,
			replica.Recover(func() replica.Config { c := survivor.config(); c.Dir = t.TempDir(); return c }()), "no cluster that could be recovered")
		require.NoError(t, replica.Recover(survivor.config()))
		require.Equal(t, 1, survivor.log.Count("the cluster begins anew with this lighthouse alone"))
		survivor.start()
		_, newer := w.leads(nil)
		require.Greater(t, newer, term)
		require.Equal(t, "last", string(survivor.node.States()["job"]))
		require.NoError(t, survivor.node.Propose(newer, "job", []byte("next")))
		require.NoError(t, survivor.node.Verify(t.Context(), newer))

		// One of the others comes back with its old log. It is refused. With an empty directory it is added.
		back := w.hosts[1]
		back.start()
		time.Sleep(10 * time.Second)
		require.Contains(t, survivor.log.String()+back.log.String(),
			"one of them has the state directory of another cluster")
		require.Equal(t, "next", string(survivor.node.States()["job"]))
		back.close()
		require.NoError(t, os.RemoveAll(back.dir))
		back.start()
		w.hosts[2].wipe()
		w.hosts[2].start()
		time.Sleep(3 * time.Second)
		require.NoError(t, survivor.node.Add(t.Context(), back.address))
		require.NoError(t, survivor.node.Add(t.Context(), w.hosts[2].address))
		w.agree("job", "next")
		// A voter refuses the vote to one whose addition it has not received (hashicorp/raft).
		settle(t, "all are voters", func() bool {
			return knowsThreeVoters(back) &&
				knowsThreeVoters(w.hosts[2])
		})
		survivor.kill()
		next, newest := w.leads(survivor)
		require.NoError(t, next.node.Propose(newest, "job", []byte("more")))
	})
}
