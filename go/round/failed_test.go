package round

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/quorum"
)

func TestAStrideReachesAllMembersAndLeavesTheRack(t *testing.T) {
	for size := 1; size <= 300; size++ {
		stride, place := Stride(size), 0
		for i := range size - 1 {
			place = (place + stride) % size
			require.NotZero(t, place, "%d of %d", i, size)
		}
		for rack := 2; size >= 64 && rack <= size/3; rack++ {
			require.GreaterOrEqual(t, stride%size, rack, "a rack of %d of %d", rack, size)
			require.GreaterOrEqual(t, size-stride, rack, "a rack of %d of %d", rack, size)
		}
	}
}

// Each live member learns of the failures of the others in its own random order, and decides alone. In the end, each failed member
// has been notified by the first three live members that follow it, and by no other.
func TestTheNextThreeLiveMembersNotifyAFailedOne(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		q := &quorum.Quorum{ID: 7}
		for i := range 1 + r.IntN(12) {
			id := fmt.Sprintf("m%02d", i)
			q.Members = append(q.Members, quorum.Member{ReplicaID: id, Address: "http://" + id})
		}
		size := len(q.Members)
		order := r.Perm(size)
		living := order[:1+r.IntN(size)]
		failed := order[len(living):]
		want, got := map[string][]int{}, map[string][]int{}
		for _, f := range failed {
			for i := 1; i < size && len(want[q.Members[f].ReplicaID]) < 3; i++ {
				if place := (f + i*Stride(size)) % size; slices.Contains(living, place) {
					want[q.Members[f].ReplicaID] = append(want[q.Members[f].ReplicaID], place)
				}
			}
		}
		for _, place := range living {
			m := NewMachine(Group{ReplicaID: q.Members[place].ReplicaID, WorldSize: 1})
			m.follow(q)
			if r.IntN(2) == 0 { // the next quorum arrives before the reports of the failures
				m.follow(&quorum.Quorum{ID: 8, Members: q.Members[place : place+1]})
			}
			for _, i := range r.Perm(len(failed)) {
				for _, a := range m.Step(MemberFailed{QuorumID: 7, ReplicaID: q.Members[failed[i]].ReplicaID, Reason: "it is silent"}, epoch) {
					n := a.(NotifyFailed)
					require.Equal(t, "http://"+n.Failed.ReplicaID, n.Address)
					got[n.Failed.ReplicaID] = append(got[n.Failed.ReplicaID], place)
				}
			}
		}
		for _, places := range []map[string][]int{want, got} {
			for id := range places {
				slices.Sort(places[id])
			}
		}
		require.Equal(t, want, got, "seed %d: of %d, %v live", seed, size, living)
	}
}
