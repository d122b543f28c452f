package quorum

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// stage has the state that the parts of the machine share, without the machine: a quorum of some members, which are all alive.
type stage struct {
	core
	past memory
	list succession
}

func newStage(seat Seat, members ...string) *stage {
	policy := Policy{MinReplicas: 1, JoinTimeout: time.Second, HeartbeatTimeout: 5 * time.Second, StalledAfter: 2 * time.Second}
	s := &stage{core: newCore(policy, epoch), list: succession{seat: seat}}
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
	s := newStage(Seat{}, "a", "b", "c", "d")
	one := suspicion{core: &s.core, past: &s.past}
	suspects := func(by, of string) []Action {
		actions, failed := s.take(0, func() { one.suspected(Suspected{Reporter: by, Suspect: of, QuorumID: 1000}) })
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
	s := newStage(Seat{}, "a", "b", "c")
	one := watch{core: &s.core, past: &s.past, reconnect: &reconnect{}}
	one.next(false)
	s.roster.ask(Asked{Waiter: 1, Member: Member{ReplicaID: "a", Step: 1}}, s.now)
	actions, _ := s.take(time.Second, one.tick)
	require.Equal(t, []Action{AskProgress{[]string{"b", "c"}}}, actions)
	s.take(0, func() { one.progressed(Progressed{ReplicaID: "b", Progress: Progress{Step: 1, Waits: true}}) })
	actions, _ = s.take(time.Second, one.tick)
	require.Len(t, actions, 2)
	require.Equal(t, "c", actions[0].(Stalled).ReplicaID, "a and b wait for c, and c has not answered")
	s.take(0, func() { one.forgive(time.Second); one.next(true) })
	require.Zero(t, one.stalled, "the next step begins without stalled members")
	require.Equal(t, time.Second, one.median(), "the time in which the lighthouse was stopped does not count")
}

func TestDrainsAlone(t *testing.T) {
	s := newStage(Seat{}, "a", "b")
	one := drains{core: &s.core, past: &s.past}
	actions, _ := s.take(0, func() { one.drained(Drained{"a", "maintenance"}) })
	require.Equal(t, []Action{Drain{"a", "maintenance"}}, actions)
	actions, failed := s.take(0, func() { require.True(t, one.leaving("a")) })
	require.Empty(t, actions, "b may still be in the last step of a")
	require.Empty(t, failed, "a has not failed")
	actions, _ = s.take(0, one.tick)
	require.Empty(t, actions)
	s.roster.ask(Asked{Waiter: 1, Member: Member{ReplicaID: "b"}}, s.now)
	actions, _ = s.take(0, one.tick)
	require.Equal(t, []Action{Release{"a"}}, actions)
	actions, _ = s.take(0, func() { require.False(t, one.leaving("x")) })
	require.Equal(t, []Action{Release{"x"}}, actions, "no member shares a step with an unknown one")
}

func TestEndsAlone(t *testing.T) {
	s := newStage(Seat{0, 2}, "a", "b", "c")
	one := ends{core: &s.core, past: &s.past, list: &s.list}
	s.list.greets("c", 0, false, s.now)
	s.list.answered("c", s.now.Add(time.Millisecond))
	_, failed := s.take(10*time.Millisecond, func() { one.ended("c") })
	require.Empty(t, failed, "c is alive: its stream has not broken")
	s.roster.disconnected("c", s.now)
	actions, _ := s.take(0, func() { one.disconnected("c") })
	require.Equal(t, []Action{Probe{"c", "http://c"}}, actions)
	_, failed = s.take(0, func() { one.ended("c") })
	require.Equal(t, []string{"c"}, failed)
	require.Contains(t, s.list.ended, "c", "c was bound: its end is a vote")
	_, failed = s.take(0, func() { one.ended("b") })
	require.Empty(t, failed)
	require.NotContains(t, s.list.ended, "b")
	s.roster.disconnected("b", s.now)
	s.take(0, func() { one.ended("b") })
	require.NotContains(t, s.list.ended, "b", "b was not bound: its end is no vote")
	actions, _ = s.take(0, func() { require.True(t, one.votesWaived(VotesWaived{[]string{"b", "x"}, "an operator"})) })
	require.Equal(t, []Action{Waived{"b", "an operator"}}, actions)
}

func TestReconnectAlone(t *testing.T) {
	var one reconnect
	require.False(t, one.needed(), "the members of a healthy quorum keep their connections")
	one.moved("a")
	require.Equal(t, "another process asks as a", one.reason())
	one.rejoined("b")
	one.moved("a")
	require.Equal(t, "b had left, and is back", one.reason(), "a return is named before another process, whichever came last")
	one.memberFailed("c")
	one.rejoined("b")
	require.Equal(t, "c failed", one.reason())
	one.forget()
	require.Equal(t, "b had left, and is back", one.reason(), "only the failure is dropped: b may have come back after the latest quorum was formed")
	require.True(t, one.needed())
}

func TestBondsAlone(t *testing.T) {
	const latest = 1000
	var one bonds
	now := epoch
	holds := func() bool { return one.holds("a", latest, now) }
	one.answered("a", now)
	require.False(t, holds(), "a has sent no greeting: the quorum that it knows is not known here")
	one.greets("a", latest, false, now)
	require.False(t, holds(), "a has answered no stamp")

	stamp := now.Add(time.Millisecond)
	one.answered("a", stamp)
	now = stamp.Add(bondHolds - 1)
	require.True(t, holds())
	one.answered("a", stamp)
	now = stamp.Add(bondHolds)
	require.False(t, holds(), "a second answer to the same stamp does not extend the bond")
	require.True(t, one.promised("a", latest), "a member's own report that it ends is a vote at any time")

	fresh := now
	one.answered("a", fresh)
	require.True(t, holds())
	require.False(t, one.holds("a", latest-1, now), "a knows a quorum that the lighthouse does not")
	one.answered("a", stamp)
	require.True(t, holds(), "an earlier stamp that comes late changes nothing")

	sent := now
	now = now.Add(time.Millisecond)
	one.release("a", now)
	require.False(t, holds() || one.promised("a", latest))
	one.answered("a", sent)
	require.False(t, holds(), "a stamp of before the release does not bind again")
	one.answered("a", now.Add(time.Millisecond))
	require.True(t, holds())
	one.greets("a", latest, true, now.Add(2*time.Millisecond))
	require.False(t, holds(), "a comes from another lighthouse: the bond to this one had ended")

	one.answered("a", now.Add(3*time.Millisecond))
	one.end("a")
	require.Contains(t, one.ended, "a")
	require.False(t, holds() || one.promised("a", latest), "a second report of the same end gives no second vote")

	one.greets("b", latest, false, now)
	one.answered("b", now.Add(time.Millisecond))
	none := func(string) bool { return false }
	one.sweep(now.Add(BondTime), none)
	require.Contains(t, one.bound, "b", "the bond of b may still hold")
	one.sweep(now.Add(2*BondTime+2*time.Millisecond), none)
	require.Empty(t, one.bound, "the bond of b has run out, and b is not here")
}

func TestVotesAlone(t *testing.T) {
	s := newStage(Seat{0, 2}, "a", "b", "c", "d")
	one := votes{core: &s.core, past: &s.past, list: &s.list, ends: &ends{core: &s.core, past: &s.past, list: &s.list}}
	for ids, missing := range map[string]int{"abc": 0, "ab": 0, "bc": 2, "a": 3} {
		var in []*record
		for _, id := range ids {
			in = append(in, s.roster.members[string(id)])
		}
		_, lacks := one.lacking(decision{}, in)
		assert.Len(t, lacks, missing, ids)
	}
	s.list.seat = Seat{}
	reason, _ := one.lacking(decision{}, nil)
	require.Empty(t, reason, "a lighthouse without a list needs no votes")
}

func TestTermsAlone(t *testing.T) {
	s := newStage(Seat{}, "a")
	one := terms{core: &s.core, past: &s.past, list: &s.list}
	greet := func(e Greeted) []Action {
		actions, _ := s.take(0, func() {
			if r := one.admit(e); r != nil {
				one.greeted(r, e)
			}
		})
		return actions
	}
	require.Equal(t, []Action{Welcome{ReplicaID: "a"}}, greet(Greeted{ReplicaID: "a", Seat: Seat{0, 1}}))
	require.IsType(t, RefuseStream{}, greet(Greeted{ReplicaID: "b", Seat: Seat{0, 2}})[0], "a has another list")
	s.list.seat = Seat{0, 2}
	actions := greet(Greeted{ReplicaID: "b", Seat: Seat{0, 2}, Term: 3})
	require.IsType(t, Renew{}, actions[0], "a higher term begins, and ends all other streams")
	require.Equal(t, Welcome{ReplicaID: "b", Term: 4, Bond: BondTime}, actions[1])
	require.IsType(t, RefuseStream{}, greet(Greeted{ReplicaID: "c", Seat: Seat{0, 2}, Term: maxTerm})[0], "the largest term would leave no later one")
}

func TestFailbackAlone(t *testing.T) {
	s := newStage(Seat{1, 2}, "a", "b")
	one := failback{core: &s.core, past: &s.past, list: &s.list}
	one.reaches("a", PlacesOf(0, 1))
	actions, _ := s.take(0, one.tick)
	require.Empty(t, actions, "b does not reach the first lighthouse")
	one.reaches("b", PlacesOf(0))
	actions, failed := s.take(0, one.tick)
	require.Len(t, actions, 1)
	require.Zero(t, actions[0].(FailBack).Place)
	require.Empty(t, failed, "a member that is told to fail back has not failed")
	require.Empty(t, s.roster.alive())
	one.cameBack(1000)
	require.Len(t, s.roster.alive(), 2, "one member is back: the other one is presumed alive for heartbeat_timeout_ms")
}

func TestSearchAlone(t *testing.T) {
	s := newStage(Seat{0, 2}, "a", "b")
	one := search{core: &s.core, past: &s.past, list: &s.list, terms: &terms{core: &s.core, past: &s.past, list: &s.list}}
	actions, _ := s.take(0, func() { one.claimed(s.roster.members["a"], 1001) })
	require.Equal(t, []Action{Recall{"a", 1001}}, actions)
	require.True(t, one.pending(s.now))
	shows := func(from string, members ...Voter) (actions []Action, adopted bool) {
		actions, _ = s.take(0, func() { adopted = one.recalled(Recalled{Past: Past{ID: 1001, Members: members}, From: from}) })
		return actions, adopted
	}
	actions, adopted := shows("b", Voter{ReplicaID: "a"})
	require.IsType(t, Doubted{}, actions[0], "b was not in quorum 1001")
	require.False(t, adopted)
	_, adopted = shows("a", Voter{ReplicaID: "a"}, Voter{ReplicaID: "c"})
	require.True(t, adopted)
	require.False(t, one.pending(s.now))
	require.Equal(t, int64(1001), s.past.latestID())
	require.True(t, s.roster.members["c"].presumed, "c is presumed alive for heartbeat_timeout_ms")
}
