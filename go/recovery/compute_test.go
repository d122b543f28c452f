package recovery

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/quorum"
)

// at returns a quorum of groups a, b, c, … at these steps.
func compute(replicaID string, groupRank int64, q *quorum.Quorum, initSync bool) (Result, error) {
	view, err := NewView(replicaID, q)
	if err != nil {
		return Result{}, err
	}
	return view.Compute(groupRank, initSync)
}

func at(steps ...int64) *quorum.Quorum {
	q := &quorum.Quorum{ID: 7}
	for i, step := range steps {
		id := string(rune('a' + i))
		q.Members = append(q.Members, quorum.Member{
			ReplicaID: id, Address: "http://" + id, StoreAddress: "store " + id, Step: step, WorldSize: 1,
		})
	}
	return q
}

func rank(r int64) *int64 { return &r }

func TestComputeOfOneRank(t *testing.T) {
	for _, c := range []struct {
		name      string
		steps     []int64
		replica   string
		groupRank int64
		initSync  bool

		heal     bool
		source   *int64
		dsts     []int64
		store    string
		maxRank  *int64
		maxWorld int64
	}{
		{name: "alone", steps: []int64{0}, replica: "a", initSync: true,
			store: "store a", maxRank: rank(0), maxWorld: 1},
		{name: "first step, the primary serves all", steps: []int64{0, 0, 0}, replica: "a", initSync: true,
			dsts: []int64{1, 2}, store: "store a", maxRank: rank(0), maxWorld: 3},
		{name: "first step, the others heal from it", steps: []int64{0, 0, 0}, replica: "c", initSync: true,
			heal: true, source: rank(0), store: "store a", maxRank: rank(2), maxWorld: 3},
		{name: "first step, each rank has its own primary", steps: []int64{0, 0, 0}, replica: "b",
			groupRank: 4, initSync: true,
			dsts: []int64{0, 2}, store: "store b", maxRank: rank(1), maxWorld: 3},
		{name: "first step without init_sync", steps: []int64{0, 0, 0}, replica: "c",
			store: "store a", maxRank: rank(2), maxWorld: 3},
		{name: "all equal", steps: []int64{5, 5}, replica: "b", groupRank: 1, initSync: true,
			store: "store b", maxRank: rank(1), maxWorld: 2},
		{name: "the group that is behind", steps: []int64{5, 2, 5}, replica: "b", initSync: true,
			heal: true, source: rank(0), store: "store a", maxWorld: 2},
		{name: "ranks of one group heal from different groups", steps: []int64{5, 2, 5}, replica: "b",
			groupRank: 1,
			heal:      true, source: rank(2), store: "store c", maxWorld: 2},
		{name: "the groups that are behind use different sources", steps: []int64{0, 5, 1, 5, 0},
			replica: "b",
			dsts:    []int64{0, 4}, store: "store b", maxRank: rank(0), maxWorld: 2},
		{name: "the other source", steps: []int64{0, 5, 1, 5, 0}, replica: "d",
			dsts: []int64{2}, store: "store b", maxRank: rank(1), maxWorld: 2},
		{name: "the largest group rank", steps: []int64{5, 0}, replica: "b", groupRank: math.MaxInt64,
			heal: true, source: rank(0), store: "store a", maxWorld: 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, err := compute(c.replica, c.groupRank, at(c.steps...), c.initSync)
			require.NoError(t, err)
			require.Equal(t, int64(7), r.QuorumID)
			require.Equal(t, c.heal, r.Heal)
			require.Equal(t, c.source, r.RecoverSrcReplicaRank)
			if c.source != nil {
				require.Equal(t, "http://"+r.ReplicaIDs[*c.source], r.RecoverSrcManagerAddress)
			}
			require.Equal(t, c.dsts, r.RecoverDstReplicaRanks)
			require.Equal(t, c.store, r.StoreAddress)
			require.Equal(t, c.maxRank, r.MaxReplicaRank)
			require.Equal(t, c.maxWorld, r.MaxWorldSize)
		})
	}
}

// Groups that reached one step in different quorums hold different weights.
func TestEqualStepsOfDifferentQuorums(t *testing.T) {
	for _, c := range []struct {
		name      string
		steps     []int64
		committed []int64
		initSync  bool

		upToDate []int64
		want     int64
	}{
		{name: "committed in one quorum", steps: []int64{5, 5}, committed: []int64{9, 9},
			upToDate: []int64{0, 1}, want: 9},
		{name: "committed in two quorums, the newer one counts", steps: []int64{5, 5, 5},
			committed: []int64{8, 9, 8}, upToDate: []int64{1}, want: 9},
		{name: "the step comes first", steps: []int64{6, 5}, committed: []int64{8, 9}, upToDate: []int64{0},
			want: 8},
		{name: "from a checkpoint, of no quorum", steps: []int64{5, 5}, committed: []int64{-1, 9},
			upToDate: []int64{1}, want: 9},
		{name: "all from a checkpoint", steps: []int64{5, 5}, committed: []int64{-1, -1},
			upToDate: []int64{0, 1}, want: -1},
		{name: "the start of a job", steps: []int64{0, 0}, committed: []int64{-1, -1}, initSync: true,
			upToDate: []int64{0, 1}, want: -1},
		{name: "a member does not report its quorum", steps: []int64{5, 5, 5}, committed: []int64{8, 9, 0},
			upToDate: []int64{0, 1, 2}},
		{name: "a member that is behind does not report its quorum", steps: []int64{5, 5, 3},
			committed: []int64{8, 9, 0}, upToDate: []int64{0, 1}},
		{name: "no member reports its quorum", steps: []int64{5, 5}, committed: []int64{0, 0},
			upToDate: []int64{0, 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			q := at(c.steps...)
			for i := range q.Members {
				q.Members[i].CommittedQuorumID = c.committed[i]
			}
			var upToDate []int64
			for i, m := range q.Members {
				r, err := compute(m.ReplicaID, 0, q, c.initSync)
				require.NoError(t, err)
				require.Equal(t, c.want, r.CommittedQuorumID)
				if r.MaxReplicaRank != nil {
					require.Equal(t, int64(len(upToDate)), *r.MaxReplicaRank)
					upToDate = append(upToDate, int64(i))
				} else {
					require.True(t, r.Heal)
				}
				if !c.initSync {
					require.Equal(t, r.MaxReplicaRank == nil, r.Heal)
				}
				require.Equal(t, int64(len(c.upToDate)), r.MaxWorldSize)
			}
			require.Equal(t, c.upToDate, upToDate)
		})
	}
}

func TestCommitFailuresAreTheLargest(t *testing.T) {
	q := at(1, 1, 1)
	q.Members[1].CommitFailures = 3
	r, err := compute("a", 0, q, true)
	require.NoError(t, err)
	require.Equal(t, int64(3), r.CommitFailures)
}

func TestHandlesOnlyIfAllRanksSentThem(t *testing.T) {
	complete := func() *quorum.Quorum {
		q := at(1, 1)
		for i := range q.Members {
			q.Members[i].WorldSize = 2
			q.Members[i].Handles = []string{fmt.Sprint("h", i, 0), fmt.Sprint("h", i, 1)}
		}
		return q
	}
	for _, c := range []struct {
		name   string
		change func(q *quorum.Quorum)
		want   []string
		lack   []string
	}{
		{"all", func(*quorum.Quorum) {}, []string{"h0 1", "h1 1"}, nil},
		{"a group of 0.2.0", func(q *quorum.Quorum) { q.Members[0].Handles = nil }, nil, []string{"a"}},
		{"a lighthouse of 0.2.0", func(q *quorum.Quorum) {
			q.Members[0].Handles, q.Members[1].Handles = nil, nil
		}, nil, []string{"a", "b"}},
		{"the handle of a rank is missing",
			func(q *quorum.Quorum) { q.Members[1].Handles = q.Members[1].Handles[:1] }, nil, []string{"b"}},
		{"the handle of a rank is empty", func(q *quorum.Quorum) { q.Members[1].Handles[0] = "" }, nil,
			[]string{"b"}},
		{"more handles than ranks", func(q *quorum.Quorum) { q.Members[1].WorldSize = 1 }, nil,
			[]string{"b"}},
		{"a smaller group", func(q *quorum.Quorum) {
			q.Members[1].WorldSize, q.Members[1].Handles = 1, q.Members[1].Handles[:1]
		}, nil, []string{"b"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			q := complete()
			c.change(q)
			r, err := compute("a", 1, q, true)
			require.NoError(t, err)
			require.Equal(t, c.want, r.ReconfigureHandles)
			require.Equal(t, c.lack, r.ReplicasWithoutHandles)
		})
	}
}

func TestErrorsOfCompute(t *testing.T) {
	_, err := compute("x", 0, at(1, 1), true)
	require.EqualError(t, err, "member x is not in quorum 7 of 2 members")
	_, err = compute("x", 0, at(), true)
	require.EqualError(t, err, "member x is not in quorum 7 of 0 members")
	_, err = compute("a", -1, at(1), true)
	require.EqualError(t, err, "group_rank is -1: it must be at least 0")
}

// Each member computes its plan on its own; the plans of all members must be consistent.
func TestPlansOfAllMembersFitTogether(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		steps := make([]int64, 1+rng.IntN(9))
		for i := range steps {
			steps[i] = rng.Int64N(3)
		}
		q, groupRank, initSync := at(steps...), rng.Int64N(5), rng.IntN(2) == 0
		least := rng.Int64N(2) // 0: some members do not report their quorum
		committed := make([]int64, len(steps))
		for i := range committed {
			committed[i] = least + rng.Int64N(3)
			q.Members[i].CommittedQuorumID = committed[i]
		}
		rng.Shuffle(len(q.Members), func(i, j int) {
			q.Members[i], q.Members[j] = q.Members[j],
				q.Members[i]
		})

		plans := make([]Result, len(steps))
		for i := range steps {
			var err error
			plans[i], err = compute(string(rune('a'+i)), groupRank, q, initSync)
			require.NoError(t, err)
		}
		healing, served, additional := 0, map[int64]int64{}, map[int64][]string{}
		for i, p := range plans {
			require.Equal(t, int64(i), p.ReplicaRank)
			require.Equal(t, plans[0].StoreAddress, p.StoreAddress, "all meet at one store")
			require.Equal(t, plans[0].MaxWorldSize, p.MaxWorldSize)
			latest := p.CommittedQuorumID == 0 || p.CommittedQuorumID == committed[i]
			require.Equal(t, steps[i] == p.MaxStep && latest, p.MaxReplicaRank != nil)
			require.Equal(t, p.Heal, p.RecoverSrcReplicaRank != nil)
			require.False(t, p.Heal && len(p.RecoverDstReplicaRanks) > 0, "a healing group is no source")
			if p.MaxReplicaRank == nil {
				require.True(t, p.Heal, "a group that is behind heals")
			}
			if p.Heal {
				healing++
			}
			for _, d := range p.RecoverDstReplicaRanks {
				require.NotContains(t, served, d, "two groups serve one target")
				served[d] = p.ReplicaRank
			}
			for _, d := range p.HelpDstReplicaRanks {
				require.False(t, p.Heal, "a healing group is no additional source")
				require.NotEqual(t, *plans[d].RecoverSrcReplicaRank, p.ReplicaRank,
					"the assigned source of a target is no additional source of it")
				additional[d] = append(additional[d], fmt.Sprint("http://", p.ReplicaIDs[i]))
			}
		}
		require.Len(t, served, healing)
		load := map[int64]int{}
		for _, s := range served {
			load[s]++
		}
		for s, targets := range load {
			sources := len(steps) - healing
			require.LessOrEqual(t, targets, (healing+sources-1)/sources,
				"source %d serves more than its share", s)
		}
		for d, s := range served {
			require.Equal(t, s, *plans[d].RecoverSrcReplicaRank, "source and target agree")
			require.ElementsMatch(t, additional[d], plans[d].AdditionalSourceAddresses,
				"the additional sources and the target agree")
			require.LessOrEqual(t, len(plans[d].AdditionalSourceAddresses), mostAdditional)
			require.False(t, plans[s].Heal, "a source is up to date")
		}
	}
}

// Each group that is up to date, except upstream ones, is an additional source of about as many healing
// groups as the others.
func TestAdditionalSources(t *testing.T) {
	for _, c := range []struct {
		name       string
		steps      []int64
		committed  []int64
		additional map[string][]string // by healing group
	}{
		{"one of two sources", []int64{5, 0, 5}, []int64{9, -1, 9}, map[string][]string{"b": {"c"}}},
		{"no other source", []int64{5, 0}, []int64{9, -1}, map[string][]string{"b": nil}},
		{"two targets begin with different sources", []int64{5, 5, 5, 0, 0}, []int64{9, 9, 9, -1, -1},
			map[string][]string{"d": {"b", "c"}, "e": {"c", "a"}}},
		{"no more than three", []int64{0, 5, 5, 5, 5, 5}, []int64{-1, 9, 9, 9, 9, 9},
			map[string][]string{"a": {"c", "d", "e"}}},
		{"an upstream group is no additional source", []int64{5, 0, 5, 5}, []int64{9, -1, 0, 9},
			map[string][]string{"b": {"d"}}},
		{"a group with weights of an older quorum is no source", []int64{5, 0, 5}, []int64{9, -1, 8},
			map[string][]string{"b": nil, "c": nil}},
		{"at the first step only the primary is a source", []int64{0, 0, 0}, []int64{-1, -1, -1},
			map[string][]string{"b": nil, "c": nil}},
	} {
		t.Run(c.name, func(t *testing.T) {
			q := at(c.steps...)
			for i := range q.Members {
				q.Members[i].CommittedQuorumID = c.committed[i]
			}
			for _, m := range q.Members {
				r, err := compute(m.ReplicaID, 0, q, true)
				require.NoError(t, err)
				var want []string
				for _, id := range c.additional[m.ReplicaID] {
					want = append(want, "http://"+id)
				}
				require.Equal(t, want, r.AdditionalSourceAddresses)
				if _, heals := c.additional[m.ReplicaID]; heals {
					require.True(t, r.Heal)
				}
			}
		})
	}
}

func TestTheSpeedsOfAllMembersAndOfThoseAtTheLargestStep(t *testing.T) {
	q := at(5, 2, 5)
	q.Speeds = []int64{100, 50, 200}
	for _, id := range []string{"a", "b", "c"} {
		r, err := compute(id, 0, q, false)
		require.NoError(t, err)
		require.Equal(t, []int64{100, 50, 200}, r.Speeds)
		require.Equal(t, []int64{100, 200}, r.MaxSpeeds)
	}
	for _, speeds := range [][]int64{nil, {100, 50}, {100, 0, 200}} {
		q.Speeds = speeds
		r, err := compute("a", 0, q, false)
		require.NoError(t, err)
		require.Nil(t, r.Speeds)
		require.Nil(t, r.MaxSpeeds)
	}
}
