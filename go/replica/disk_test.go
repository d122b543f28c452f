package replica_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/replica"
)

func TestALighthouseWhoseDiskFailsLeavesTheCluster(t *testing.T) {
	for _, c := range []struct {
		name, of string
		err      error
		want     string
	}{
		{"full", "StoreLogs", syscall.ENOSPC, "writing the log: no space left on device"},
		{"read-only", "", syscall.EROFS, "read-only file system"},
		{"damaged", "GetLog", errors.New("the record is damaged"), "reading the log: the record is damaged"},
		{"hanging", "", nil, "timed out after 2s: the disk does not answer"},
		{"hanging for entries", "StoreLogs", nil, "writing the log: timed out after 2s"},
		{"votes cannot be written", "Set", syscall.EIO, "writing"},
		{"the term cannot be written", "SetUint64 CurrentTerm", syscall.EIO,
			"writing the term: input/output error"},
		{"snapshots cannot be written", "Create", syscall.ENOSPC,
			"writing a snapshot: no space left on device"},
	} {
		for _, ofLeader := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, leader %t", c.name, ofLeader), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t, "a", "b", "c")
					leader, term := w.started()
					require.NoError(t, leader.node.Propose(term, "job", []byte("1")))
					w.agree("job", "1")
					bad := leader
					if !ofLeader {
						bad = w.hosts[(slices.Index(w.hosts, leader)+1)%3]
					}
					settle(t, "no trouble", func() bool { return bad.node.Status().Trouble == "" })
					defer close(bad.disk.until)
					bad.disk.fail(c.of, c.err)
					began := time.Now()
					// Each operation of Raft comes: entries, snapshots, and elections, since the leader is
					// closed, or cut off if it is the bad one.
					next, newer := leader, term
					for i := 0; !strings.Contains(bad.node.Status().Trouble, "disk") && i < 60; i++ {
						err := next.node.Propose(newer, "job", fmt.Append(nil, i))
						_ = bad.node.Snapshot()
						if i%5 == 4 || err != nil {
							if next != bad {
								next.close()
								next.start()
								next, newer = w.leads(nil)
							} else {
								w.network.Pause(bad.name)
								next, newer = w.leads(bad)
								w.network.Resume(bad.name)
							}
						}
						time.Sleep(200 * time.Millisecond)
					}
					t.Logf("left after %s: %s", time.Since(began), bad.node.Status().Trouble)
					require.Contains(t, bad.node.Status().Trouble, "the disk of the state directory failed: ")
					require.Contains(t, bad.node.Status().Trouble, c.want)
					require.Equal(t, 1, bad.log.Count("level=ERROR"))
					require.ErrorIs(t, bad.node.Verify(t.Context(), newer), replica.ErrNotLeading)
					require.ErrorContains(t, bad.node.Propose(newer, "job", nil), "disk")
					if next == bad {
						next, newer = w.leads(bad)
						t.Logf("replaced after %s", time.Since(began))
					}
					settle(t, "the others serve", func() bool {
						if next.node.Propose(newer, "job", []byte("2")) == nil {
							return true
						}
						select {
						case l := <-next.node.Leadership():
							newer = l.Term
						default:
						}
						for _, h := range w.hosts {
							if h != bad && h.node.Status().Leader == h.address {
								next, newer = h, h.node.Status().Term
							}
						}
						return false
					})
					bad.kill()
					bad.start()
					w.agree("job", "2")
				})
			})
		}
	}
}

// A process that was stopped must not take its disk for a hanging one.
func TestASlowDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b", "c")
		leader, term := w.started()
		for range 5 {
			leader.disk.fail("StoreLogs", nil)
			time.AfterFunc(1900*time.Millisecond, func() {
				leader.disk.fault.Store(nil)
				close(leader.disk.until)
			})
			began := time.Now()
			require.NoError(t, leader.node.Propose(term, "job", []byte("1")))
			require.Greater(t, time.Since(began), 1800*time.Millisecond)
			leader.disk.until = make(chan struct{})
		}
		require.Empty(t, leader.node.Status().Trouble)
	})
}

func TestTheDiskKeepsWhatRaftWrites(t *testing.T) {
	dir := t.TempDir()
	open := replica.OpenStore(replica.Config{})
	s, err := open(dir)
	require.NoError(t, err)
	now := time.Unix(1700000000, 5)
	var logs []*raft.Log
	for i := uint64(5); i < 15; i++ {
		logs = append(logs, &raft.Log{Index: i, Term: i / 2, Type: raft.LogCommand, Data: []byte(strings.Repeat("x", int(i))), AppendedAt: now}) //nolint:gosec // small
	}
	require.NoError(t, s.StoreLogs(logs))
	require.NoError(t, s.SetUint64([]byte("CurrentTerm"), 7))
	require.NoError(t, s.Set([]byte("LastVoteCand"), []byte("b")))
	require.NoError(t, s.DeleteRange(5, 6))
	_, err = open(dir)
	require.ErrorContains(t, err, "is in use by another process")
	require.NoError(t, s.Close())
	s, err = open(dir)
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	first, err := s.FirstIndex()
	require.NoError(t, err)
	last, err := s.LastIndex()
	require.NoError(t, err)
	require.Equal(t, []uint64{7, 14}, []uint64{first, last})
	var l raft.Log
	for _, want := range logs[2:] {
		require.NoError(t, s.GetLog(want.Index, &l))
		require.Equal(t, *want, l)
	}
	require.ErrorIs(t, s.GetLog(6, &l), raft.ErrLogNotFound)
	require.ErrorIs(t, s.GetLog(15, &l), raft.ErrLogNotFound)
	require.NoError(t, s.DeleteRange(9, 9))
	require.ErrorContains(t, s.GetLog(9, &l), "the entry 9 is missing")
	term, err := s.GetUint64([]byte("CurrentTerm"))
	require.NoError(t, err)
	require.Equal(t, uint64(7), term)
	vote, err := s.Get([]byte("LastVoteCand"))
	require.NoError(t, err)
	require.Equal(t, "b", string(vote))
	_, err = s.Get([]byte("other"))
	require.EqualError(t, err, "not found")
}

func TestASnapshotOnDiskIsDamaged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b", "c")
		for _, h := range w.hosts {
			h.bolt = true
		}
		leader, term := w.started()
		for i := range 200 {
			require.NoError(t, leader.node.Propose(term, "job", fmt.Append(nil, i)))
		}
		bad := w.hosts[(slices.Index(w.hosts, leader)+1)%3]
		w.agree("job", "199")
		require.NoError(t, bad.node.Snapshot())
		bad.close()
		found, err := filepath.Glob(filepath.Join(bad.dir, "snapshots", "*", "state.bin"))
		require.NoError(t, err)
		require.Len(t, found, 1)
		text, err := os.ReadFile(found[0])
		require.NoError(t, err)
		text[len(text)/2] ^= 1
		require.NoError(t, os.WriteFile(found[0], text, 0o600))
		_, err = bad.open()
		require.ErrorContains(t, err, "--state_dir is")
		t.Log(err)
		require.NoError(t, leader.node.Propose(term, "job", []byte("2")))
	})
}
