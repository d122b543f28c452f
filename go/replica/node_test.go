package replica_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/clock"
	"github.com/torchft/torchft/go/internal/testmain"
	"github.com/torchft/torchft/go/replica"
)

func TestThreeNewLighthousesElectALeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b", "c")
		began := time.Now()
		leader, term := w.started()
		t.Logf("%s leads after %s, term %d", leader.name, time.Since(began), term)
		require.NoError(t, leader.node.Verify(t.Context(), term))
		require.NoError(t, leader.node.Propose(term, "job", []byte("1")))
		w.agree("job", "1")
		require.NoError(t, leader.node.Propose(term, "job", nil))
		settle(t, "no state", func() bool { return len(leader.node.States()) == 0 })
		time.Sleep(3 * time.Second)
		for _, h := range w.hosts {
			s := h.node.Status()
			require.Empty(t, s.Trouble, h.name)
			require.Equal(t, leader.address, s.Leader)
			require.Equal(t, term, s.Term)
			require.Len(t, s.Members, 3)
			for i, m := range s.Members {
				require.Equal(t, replica.Member{Address: w.list[i], Leads: w.list[i] == leader.address,
					Voter: true, Reached: true}, m)
			}
			if h != leader {
				require.ErrorIs(t, h.node.Verify(t.Context(), term), replica.ErrNotLeading)
				require.ErrorIs(t, h.node.Propose(term, "job", []byte("2")), replica.ErrNotLeading)
			}
		}
		require.ErrorIs(t, leader.node.Propose(term-1, "job", []byte("2")), replica.ErrNotLeading)
		time.Sleep(100 * time.Second)
		l2, _ := leader.node.Leader()
		require.Equal(t, leader.address, l2)
		require.Equal(t, term, leader.node.Status().Term, "a healthy cluster elects once")
	})
}

// The log has the times from the failure until another lighthouse leads, with all states.
func TestAFailedLeaderIsReplaced(t *testing.T) {
	for _, c := range []struct {
		how  string
		fail func(*host)
		most time.Duration
	}{
		{"killed", (*host).kill, 1500 * time.Millisecond},
		{"closed", (*host).close, 500 * time.Millisecond},
		{"vanished", func(h *host) { h.end(h.network().Vanish) }, 2500 * time.Millisecond},
		{"stopped", func(h *host) { h.world.network.Pause(h.name) }, 2500 * time.Millisecond},
	} {
		t.Run(c.how, func(t *testing.T) {
			var took []time.Duration
			runs := 6
			if testmain.Full() && !testmain.Race() { // a few elections show a race as well, in less time
				runs = 200
			}
			for range runs {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t, "a", "b", "c")
					old, term := w.started()
					require.NoError(t, old.node.Propose(term, "job", []byte("1")))
					began := time.Now()
					go c.fail(old)
					next, newer := w.leads(old)
					took = append(took, time.Since(began))
					require.Greater(t, newer, term)
					require.Equal(t, "1", string(next.node.States()["job"]))
					require.NoError(t, next.node.Propose(newer, "job", []byte("2")))
					time.Sleep(10 * time.Second)
					if old.node != nil {
						require.ErrorIs(t, old.node.Verify(t.Context(), term), replica.ErrNotLeading)
						w.network.Resume(old.name)
						w.agree("job", "2")
					}
				})
			}
			slices.Sort(took)
			t.Logf("%s: median %s, 90%% %s, most %s", c.how, took[len(took)/2], took[len(took)*9/10],
				took[len(took)-1])
			require.Less(t, took[len(took)-1], 2*c.most)
		})
	}
}

func TestCuts(t *testing.T) {
	for _, c := range []struct {
		name     string
		in, out  bool
		ofLeader bool
	}{
		{"leader, both ways", true, true, true},
		{"leader, what it sends", false, true, true},
		{"leader, what it receives", true, false, true},
		{"follower, both ways", true, true, false},
		{"follower, what it sends", false, true, false},
		{"follower, what it receives", true, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "a", "b", "c")
				leader, term := w.started()
				require.NoError(t, leader.node.Propose(term, "job", []byte("1")))
				at := leader
				if !c.ofLeader {
					at = w.hosts[(slices.Index(w.hosts, leader)+1)%3]
				}
				cut := func(do func(from, to string)) {
					for _, h := range w.hosts {
						if h != at && c.in {
							do(h.name, at.name)
						}
						if h != at && c.out {
							do(at.name, h.name)
						}
					}
				}
				began := time.Now()
				cut(w.network.Sever)
				next, newer := leader, term
				if c.ofLeader {
					next, newer = w.leads(leader)
					t.Logf("replaced after %s", time.Since(began))
					if time.Since(began) < time.Second {
						time.Sleep(time.Second - time.Since(began))
					}
					require.ErrorIs(t, leader.node.Verify(t.Context(), term), replica.ErrNotLeading)
					require.ErrorIs(t, leader.node.Propose(term, "job", []byte("stale")),
						replica.ErrNotLeading)
				} else {
					time.Sleep(20 * time.Second)
					require.NoError(t, leader.node.Verify(t.Context(), term),
						"a follower that is cut off does not disturb the others")
				}
				require.NoError(t, next.node.Propose(newer, "job", []byte("2")))
				time.Sleep(30 * time.Second)
				cut(w.network.Heal)
				w.agree("job", "2")
				time.Sleep(10 * time.Second)
				require.NoError(t, next.node.Verify(t.Context(), newer), "nor when it is back")
			})
		})
	}
}

// A proposal whose outcome was unknown is either kept by every later leader, or by none.
func TestWhatADeposedLeaderProposedConflictsWithNothing(t *testing.T) {
	for i := range 6 {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, "a", "b", "c")
			leader, term := w.started()
			require.NoError(t, leader.node.Propose(term, "job", []byte("1")))
			w.network.Pause(leader.name)
			outcome := make(chan error, 1)
			go func() { outcome <- leader.node.Propose(term, "job", []byte("stale")) }()
			if i%2 == 0 { // one follower gets it
				w.network.Resume(leader.name)
				time.Sleep(time.Microsecond)
				w.network.Pause(leader.name)
			}
			next, newer := w.leads(leader)
			err := <-outcome
			had := string(next.node.States()["job"])
			require.Contains(t, []string{"1", "stale"}, had)
			if err == nil {
				require.Equal(t, "stale", had)
			} else {
				require.ErrorIs(t, err, replica.ErrUnknown)
			}
			require.NoError(t, next.node.Propose(newer, "job", []byte(had+"+")))
			w.network.Resume(leader.name)
			w.agree("job", had+"+")
			time.Sleep(time.Minute)
			w.agree("job", had+"+")
		})
	}
}

// Each event is one line. Raft's own lines about connections, several each second, are for debugging.
func TestTheLogSaysEachEventOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b", "c")
		leader, _ := w.started()
		leader.kill()
		next, _ := w.leads(leader)
		time.Sleep(5 * time.Minute)
		leader.start()
		time.Sleep(5 * time.Second)
		for _, h := range w.hosts {
			require.Zero(t, h.log.Count(`level=WARN msg="torchft: raft: `), "%s", h.log)
			require.Zero(t, h.log.Count("takes no part in a cluster"), "%s", h.log)
			if h != leader {
				require.Equal(t, 1, h.log.Count(`does not answer" lighthouse=`+leader.address), "%s", h.log)
				require.Equal(t, 1, h.log.Count(`answers again" lighthouse=`+leader.address), "%s", h.log)
				require.Equal(t, 1, h.log.Count("the cluster has no leader"), "%s", h.log)
			}
		}
		require.Zero(t, next.log.Count(`has a leader" leader=`+next.address), "the server says that it leads")
		before := next.log.Count("level=WARN")
		next.close()
		require.Equal(t, before, next.log.Count("level=WARN"), "an end on request:\n%s", next.log)
	})
}

func TestAClusterWithoutAMajorityWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b", "c")
		leader, term := w.started()
		require.NoError(t, leader.node.Propose(term, "job", []byte("1")))
		for _, h := range w.hosts {
			if h != leader {
				h.kill()
			}
		}
		time.Sleep(2 * time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, leader.node.Verify(ctx, term), replica.ErrNotLeading)
		address, _ := leader.node.Leader()
		require.Empty(t, address)
		time.Sleep(time.Hour / 10)
		require.Contains(t, leader.node.Status().Trouble,
			"no leader is known; these lighthouses do not answer: ")
		require.Equal(t, 1, leader.log.Count("takes no part in a cluster"))
		for _, h := range w.hosts {
			if h.node == nil {
				h.start()
				break
			}
		}
		next, newer := w.leads(nil)
		require.NoError(t, next.node.Propose(newer, "job", []byte("2")))
		for _, h := range w.hosts {
			if h.node == nil {
				h.start()
			}
		}
		w.agree("job", "2")
	})
}

func TestSnapshotsKeepTheLogShortAndStartNewLighthouses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b", "c")
		leader, term := w.started()
		for i := range 900 {
			require.NoError(t, leader.node.Propose(term, fmt.Sprint("job", i%7), fmt.Append(nil, i)))
		}
		time.Sleep(3 * time.Minute)
		for _, h := range w.hosts {
			first, err := h.memory.FirstIndex()
			require.NoError(t, err)
			require.Greater(t, first, uint64(500), h.name)
		}
		d := w.add("d")
		d.start()
		time.Sleep(3 * time.Second)
		require.Contains(t, d.node.Status().Trouble, "torchft cluster add http://d:1")
		require.NoError(t, leader.node.Add(t.Context(), d.address))
		w.agree("job6", "895")
		require.Len(t, d.node.States(), 7)
		settle(t, "d takes part", func() bool { return d.node.Status().Trouble == "" })
		for _, h := range w.hosts { // all continue from snapshots
			h.kill()
			h.start()
		}
		next, newer := w.leads(nil)
		require.Len(t, next.node.States(), 7)
		require.NoError(t, next.node.Propose(newer, "job0", []byte("end")))
		w.agree("job0", "end")
	})
}

// After a pause a leader may read confirmations that were sent before the pause. So it verifies by an entry
// of the log.
func TestAfterAPauseALeaderVerifiesByAnEntry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asleep := clock.Fake()
		defer clock.Fake()
		w := newWorld(t, "a", "b", "c")
		leader, term := w.started()
		last := func() uint64 {
			index, err := leader.memory.LastIndex()
			require.NoError(t, err)
			return index
		}
		before := last()
		for range 10 {
			require.NoError(t, leader.node.Verify(t.Context(), term))
			time.Sleep(100 * time.Millisecond)
		}
		require.Equal(t, before, last(), "no entry without a pause")
		for i := range uint64(3) {
			asleep.Add(int64(time.Hour))
			require.NoError(t, leader.node.Verify(t.Context(), term))
			require.NoError(t, leader.node.Verify(t.Context(), term))
			require.Equal(t, before+i+1, last())
			time.Sleep(time.Second)
		}
		asleep.Add(int64(time.Hour))
		w.network.Pause(leader.name)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, leader.node.Verify(ctx, term), context.DeadlineExceeded)
		require.ErrorIs(t, leader.node.Verify(t.Context(), term), replica.ErrNotLeading)
	})
}
