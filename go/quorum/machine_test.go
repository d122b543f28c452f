package quorum

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var epoch = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)

// ring is a machine with the groups of one job, for tests of complete rounds.
type ring struct {
	machine *Machine
	now     time.Time
	waiter  WaiterID
}

func newRing(minReplicas int) *ring {
	policy := Policy{MinReplicas: minReplicas, JoinTimeout: time.Second, HeartbeatTimeout: 5 * time.Second}
	return &ring{machine: NewMachine(policy, epoch, 0), now: epoch}
}

func (r *ring) ask(m Member) []Action {
	r.waiter++
	return r.machine.Step(Asked{Waiter: r.waiter, Member: m}, r.now)
}

// round makes these groups ask, and returns the quorum that is formed at the last request.
func (r *ring) round(t testing.TB, ids ...string) Deliver {
	t.Helper()
	for i, id := range ids {
		actions := r.ask(Member{ReplicaID: id})
		if i < len(ids)-1 {
			require.Empty(t, actions)
			continue
		}
		return delivered(t, actions)
	}
	return Deliver{}
}

// delivered returns the quorum that these actions deliver. A new one is kept before.
func delivered(t testing.TB, actions []Action) Deliver {
	t.Helper()
	i := slices.IndexFunc(actions, func(a Action) bool { _, is := a.(Deliver); return is })
	require.GreaterOrEqual(t, i, 0)
	d := actions[i].(Deliver)
	if slices.ContainsFunc(actions, func(a Action) bool { _, is := a.(Changed); return is }) {
		require.Equal(t, Keep{Kept{Past: d.Quorum.Past(), Highest: d.Quorum.ID}}, actions[i-1])
	}
	return d
}

func TestIDsContinueAboveAnOlderLighthouse(t *testing.T) {
	old := newRing(1)
	for range 500 { // without pauses, each with a new set of members
		old.ask(Member{ReplicaID: "a", CommitFailures: 1})
	}
	last := old.machine.past.latest.ID

	restarted := NewMachine(Policy{MinReplicas: 1, JoinTimeout: 1, HeartbeatTimeout: 1},
		epoch.Add(time.Second), 0)
	actions := restarted.Step(Asked{Waiter: 1, Member: Member{ReplicaID: "x"}}, epoch.Add(time.Second))
	require.Greater(t, delivered(t, actions).Quorum.ID, last,
		"ids continue even if no member reports an earlier quorum")
}

// A quorum that a member shows is kept, since the disk or the log lacks it: the next lighthouse may be asked
// by another group first.
func TestAShownQuorumIsKept(t *testing.T) {
	past := Past{ID: epoch.UnixMilli(), Step: 7,
		Members: []Voter{{ReplicaID: "a", Address: "http://a"}, {ReplicaID: "b", Address: "http://b"}}}
	for from, kept := range map[string]bool{"": false, "a": true} {
		r := newRing(1)
		shown := past.remembered(r.now)
		actions := r.machine.Step(Recalled{Kept: Kept{Past: past}, Quorum: shown, From: from}, r.now)
		keep := Keep{Kept{Past: past, Highest: r.machine.past.ids()}}
		require.Equal(t, kept, slices.ContainsFunc(actions,
			func(a Action) bool { return reflect.DeepEqual(a, keep) }))
		require.GreaterOrEqual(t, r.machine.past.ids(), past.ID)
	}
}

func TestAllWaitersShareOneQuorum(t *testing.T) {
	r := newRing(3)
	d := r.round(t, "c", "a", "b")
	require.Equal(t, []WaiterID{2, 3, 1}, d.Waiters)
	require.Same(t, d.Quorum, r.machine.past.latest)

	next := r.round(t, "a", "b", "c")
	require.Equal(t, d.Quorum.ID, next.Quorum.ID)
	require.NotSame(t, d.Quorum, next.Quorum, "a delivered quorum never changes")
}

func TestMembersArePassedOnAsTheyAre(t *testing.T) {
	m := Member{
		ReplicaID: "a", Address: "http://a", StoreAddress: "a:1", Step: 4, WorldSize: 2, Data: `{"x": 1}`,
		CommitFailures: 3, Handles: []string{"h0", "h1"}, Unknown: []byte{1, 2},
	}
	actions := newRing(1).ask(m)
	require.Equal(t, []Member{m}, delivered(t, actions).Quorum.Members)
}

// The rank that is refused reads this list. A native handle, which is no JSON, has none.
func TestARefusalSaysWhereTheOtherListIs(t *testing.T) {
	for handle, where := range map[string]string{
		`{"id": "x", "store": "host:1", "layout": "ab12"}`: "; its list is in the store at host:1 under " +
			"layout/ab12",
		`{"id": "x", "store": "host:1"}`: "",
		"nccl:0:17":                      "",
	} {
		m := Member{ReplicaID: "a", Layouts: []string{"x"}, Handles: []string{handle}}
		require.Equal(t, "member b reduces other tensors than member a, which is in the job: rank 0 has y, "+
			"that of a has x"+where,
			otherLayout(&Member{ReplicaID: "b", Layouts: []string{"y"}}, &m))
	}
}

// Each restart of a group has a new replica_id: the machine's memory must not grow with their number.
func TestMemoryIsBoundedByLiveMembers(t *testing.T) {
	r := newRing(2)
	for i := range 10000 {
		r.now = r.now.Add(time.Second)
		r.machine.Step(Beat{ReplicaID: fmt.Sprint("beats ", i)}, r.now)
		r.ask(Member{ReplicaID: fmt.Sprint("asks ", i)})
		r.machine.Step(Withdrawn{ReplicaID: fmt.Sprint("asks ", i), Waiter: r.waiter}, r.now)
		require.LessOrEqual(t, len(r.machine.roster.members), 10)
		require.Zero(t, r.machine.Describe(r.now).Waiters)
	}
	r.machine.Step(Tick{}, r.now.Add(5*time.Second))
	require.Empty(t, r.machine.roster.members)
	require.Zero(t, r.machine.roster.pulses.Len())
}

func TestAClockThatIsSetBackIsIgnored(t *testing.T) {
	r := newRing(2)
	r.ask(Member{ReplicaID: "a"})
	r.machine.Step(Beat{ReplicaID: "a"}, r.now.Add(-time.Hour))
	require.Equal(t, 1, r.machine.Describe(r.now.Add(4*time.Second)).Candidates)
}

func TestDescribeAsJSON(t *testing.T) {
	r := newRing(2)
	empty, err := json.Marshal(r.machine.Describe(r.now))
	require.NoError(t, err)
	require.JSONEq(t, `{
		"quorum_id": 0, "quorum": [], "quorum_age_ms": 0, "max_step": 0,
		"reason": "no member asks for a quorum",
		"healthy": 0, "candidates": 0, "waiters": 0, "members": [],
		"min_replicas": 2, "max_replicas": 0, "join_timeout_ms": 1000, "heartbeat_timeout_ms": 5000,
		"median_step_ms": 0, "stalled_after_ms": 5000, "eject_after_ms": {}
	}`, string(empty))

	r.ask(Member{ReplicaID: "a", Address: "http://a:1", StoreAddress: "a:2", Step: 3, WorldSize: 2})
	r.round(t, "b")
	r.now = r.now.Add(1500 * time.Millisecond)
	r.ask(Member{ReplicaID: "b", Step: 4, CommitFailures: 1})
	r.now = r.now.Add(500 * time.Millisecond)
	full, err := json.Marshal(r.machine.Describe(r.now))
	require.NoError(t, err)
	require.JSONEq(t, fmt.Sprintf(`{
		"quorum_id": %d, "quorum": ["a", "b"], "quorum_age_ms": 2000, "quorum_created": "2026-11-01T00:00:00Z", "max_step": 3,
		"reason": "1 member asked, min_replicas is 2; missing: a",
		"healthy": 2, "candidates": 1, "waiters": 1,
		"members": [
			{"replica_id": "a", "heartbeat_age_ms": 2000, "healthy": true, "in_quorum": true, "waiting": false, "waiting_ms": 0,
			 "address": "http://a:1", "store_address": "a:2", "step": 3, "world_size": 2, "commit_failures": 0, "shrink_only": false},
			{"replica_id": "b", "heartbeat_age_ms": 500, "healthy": true, "in_quorum": true, "waiting": true, "waiting_ms": 500,
			 "step": 4, "world_size": 0, "commit_failures": 1, "shrink_only": false}
		],
		"min_replicas": 2, "max_replicas": 0, "join_timeout_ms": 1000, "heartbeat_timeout_ms": 5000,
		"median_step_ms": 0, "stalled_after_ms": 5000, "eject_after_ms": {}
	}`, epoch.UnixMilli()+1), string(full))
}

func TestReasonsNameOnlySomeOfManyMissingMembers(t *testing.T) {
	r := newRing(1)
	for i := range 30 {
		r.machine.Step(Beat{ReplicaID: fmt.Sprintf("r%02d", i)}, r.now)
	}
	r.ask(Member{ReplicaID: "a"})
	require.Equal(t, "1 of 31 healthy members asked, more than half are needed; "+
		"missing: r00, r01, r02, r03, r04, r05, r06, r07 and 22 more", r.machine.Describe(r.now).Reason)
}

// The machine's results are actions. The only other methods that a shell can call are queries (Describe).
func TestResultsLeaveAsActionsOnly(t *testing.T) {
	machine := reflect.TypeFor[*Machine]()
	var methods []string
	for i := range machine.NumMethod() {
		methods = append(methods, machine.Method(i).Name)
	}
	require.Equal(t, []string{"Describe", "InUse", "Knows", "StandsBy", "Step"}, methods)
	for _, field := range reflect.VisibleFields(machine.Elem()) {
		require.False(t, field.IsExported(), field.Name)
	}
}

func TestASilenceIsReportedInWholeMilliseconds(t *testing.T) {
	r := newRing(2)
	r.round(t, "a", "b")
	r.now = r.now.Add(5044*time.Millisecond + 407226*time.Nanosecond)
	require.Contains(t, fmt.Sprintf("%+v", r.machine.Step(Tick{}, r.now)), "no sign of life for 5044 ms")
}
