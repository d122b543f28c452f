package quorum

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// stage has the state that the parts of the machine share, without the machine: a quorum of some members,
// which are all alive.
type stage struct {
	core
	past memory
}

func newStage(members ...string) *stage {
	policy := Policy{MinReplicas: 1, JoinTimeout: time.Second, HeartbeatTimeout: 5 * time.Second,
		StalledAfter: 2 * time.Second}
	s := &stage{core: newCore(policy, epoch, 0)}
	s.past = memory{core: &s.core}
	q := &Quorum{ID: 1000, Created: epoch}
	var in []*record
	for _, id := range members {
		r := s.roster.beat(id, epoch)
		q.Members, in = append(q.Members, Member{ReplicaID: id, Address: "http://" + id}), append(in, r)
	}
	s.past.follow(q, in, true)
	return s
}

// take feeds an event to a part after the given time, and returns the resulting actions and failed members.
func (s *stage) take(after time.Duration, event func()) (actions []Action, failed []string) {
	s.open(s.now.Add(after))
	event()
	for _, f := range s.failed {
		failed = append(failed, f.member.id)
	}
	return s.actions, failed
}

// Each part handles its events without the machine.

func TestSuspicionAlone(t *testing.T) {
	s := newStage("a", "b", "c", "d")
	one := suspicion{core: &s.core, past: &s.past}
	suspects := func(by, of string) []Action {
		actions, failed := s.take(0, func() {
			one.suspected(Suspected{Reporter: by, Suspect: of,
				QuorumID: 1000})
		})
		require.Empty(t, failed, "a report alone evicts no member")
		return actions
	}
	require.Empty(t, suspects("a", "d"))
	require.Empty(t, suspects("a", "d"), "each reporter counts once")
	require.Empty(t, suspects("x", "d"), "a report of another process does not count")
	require.Equal(t, []Action{Check{ReplicaID: "d", Address: "http://d", QuorumID: 1000}}, suspects("b", "d"))
	require.Empty(t, suspects("c", "d"), "a member is checked once")
	_, failed := s.take(0, func() { one.lookedAt(Checked{ReplicaID: "d", QuorumID: 999}) })
	require.Empty(t, failed, "a check of another quorum does not count")
	_, failed = s.take(0, func() { one.lookedAt(Checked{ReplicaID: "d", QuorumID: 1000, Reason: "refused"}) })
	require.Equal(t, []string{"d"}, failed)
}

func TestWatchAlone(t *testing.T) {
	s := newStage("a", "b", "c")
	one := watch{core: &s.core, past: &s.past, reconnect: &reconnect{}}
	one.next(false)
	s.roster.ask(Asked{Waiter: 1, Member: Member{ReplicaID: "a", Step: 1}}, s.now)
	actions, _ := s.take(time.Second, one.tick)
	require.Equal(t, []Action{AskProgress{[]string{"b", "c"}}}, actions)
	s.take(0, func() { one.progressed(Progressed{ReplicaID: "b", Progress: Progress{Step: 1, Waits: true}}) })
	actions, _ = s.take(time.Second, one.tick)
	require.Len(t, actions, 2)
	require.Equal(t, "c", actions[0].(Stalled).ReplicaID, "a and b wait for c, and c has not answered")
	s.take(0, func() { s.pause(time.Second); one.next(true) })
	require.Zero(t, one.stalled, "the next step begins without stalled members")
	require.Equal(t, time.Second, one.median(), "the time in which the lighthouse was stopped does not count")
}

func TestDrainsAlone(t *testing.T) {
	s := newStage("a", "b")
	one := drains{core: &s.core, past: &s.past}
	actions, _ := s.take(0, func() { one.drained(Drained{"a", "maintenance"}) })
	require.Equal(t, []Action{Drain{"a", "maintenance"}}, actions)
	actions, failed := s.take(0, func() { one.leaving("a") })
	require.Empty(t, actions, "b may still be in the last step of a")
	require.Empty(t, failed, "a has not failed")
	actions, _ = s.take(0, one.tick)
	require.Empty(t, actions)
	s.roster.ask(Asked{Waiter: 1, Member: Member{ReplicaID: "b"}}, s.now)
	actions, _ = s.take(0, one.tick)
	require.Equal(t, []Action{Release{"a"}}, actions)
	actions, _ = s.take(0, func() { one.leaving("x") })
	require.Equal(t, []Action{Release{"x"}}, actions, "no member shares a step with an unknown one")
}

func TestReconnectAlone(t *testing.T) {
	var one reconnect
	require.False(t, one.needed(), "the members of a healthy quorum keep their connections")
	one.moved("a")
	require.Equal(t, "another process asks as a", one.reason())
	one.rejoined("b")
	one.moved("a")
	require.Equal(t, "b had left, and is back", one.reason(),
		"a return is named before another process, whichever came last")
	one.memberFailed("c")
	one.rejoined("b")
	require.Equal(t, "c failed", one.reason())
	one.forget()
	require.Equal(t, "b had left, and is back", one.reason(),
		"only the failure is dropped: b may have come back after the latest quorum was formed")
	require.True(t, one.needed())
}

func TestSearchAlone(t *testing.T) {
	s := newStage("a", "b")
	one := search{core: &s.core, past: &s.past}
	actions, _ := s.take(0, func() { one.claimed(s.roster.members["a"], Claim{1001, 3}) })
	require.Equal(t, []Action{Recall{"a", 1001}}, actions)
	require.True(t, one.pending(s.now))
	shows := func(from string, members ...Member) (actions []Action, adopted bool) {
		actions, _ = s.take(0, func() {
			adopted = one.recalled(Recalled{Quorum: &Quorum{ID: 1001,
				Members: members}, From: from})
		})
		return actions, adopted
	}
	actions, adopted := shows("b", Member{ReplicaID: "a"})
	require.Equal(t, ClaimDoubted, actions[0].(Report).What, "b was not in quorum 1001")
	require.False(t, adopted)
	_, adopted = shows("a", Member{ReplicaID: "a", Step: 3}, Member{ReplicaID: "c"})
	require.True(t, adopted)
	require.False(t, one.pending(s.now))
	require.Equal(t, int64(1001), s.past.latestID())
	require.True(t, s.roster.members["c"].presumed, "c is presumed alive for heartbeat_timeout_ms")
}
