package wire

import (
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

func manyMembers(n int) []quorum.Member {
	members := make([]quorum.Member, n)
	for i := range members {
		members[i] = quorum.Member{
			ReplicaID: fmt.Sprintf("group-%05d", i), Address: fmt.Sprintf("http://node-%d:1", i),
			WorldSize: 2, Step: 7,
			Data: "{}", Handles: []string{"h0", "h1"}, Layouts: []string{"l"},
			Unknown: []byte{0xf8, 0x07, 0x01},
		}
	}
	return members
}

func quorumOf(members []quorum.Member) *quorum.Quorum {
	return &quorum.Quorum{ID: 9, Created: time.Unix(7, 8).UTC(), Members: members}
}

func equal(a, b []quorum.Member) bool {
	return slices.EqualFunc(a, b, func(a, b quorum.Member) bool { return reflect.DeepEqual(a, b) })
}

func whole(t testing.TB, q *quorum.Quorum, list uint64) *torchftpb.Delivery {
	t.Helper()
	p, err := WholeToProto(q, list)
	require.NoError(t, err)
	return p
}

func TestAQuorumIsDeliveredAsItIs(t *testing.T) {
	for _, n := range []int{0, 1, 20, 20000} {
		var received Delivered
		first := quorumOf(manyMembers(n))
		p := whole(t, first, 3)
		require.NoError(t, received.Next(p))
		assert.True(t, equal(first.Members, received.Quorum.Members))
		assert.LessOrEqual(t, proto.Size(p), 20*max(n, 10), "the records of members differ little")

		second := quorumOf(manyMembers(n))
		second.Stands, second.Speeds = true, []int64{1, 300}
		for i := range second.Members {
			second.Members[i].SetState(quorum.State{Step: 8})
		}
		if n > 0 {
			second.Members[n/2].SetState(quorum.State{Step: 3, CommittedQuorumID: 2, CommitFailures: 1})
		}
		p = StatesToProto(second, 3)
		assert.LessOrEqual(t, proto.Size(p), 52)
		require.NoError(t, received.Next(p))
		assert.Equal(t, second.ID, received.Quorum.ID)
		assert.Equal(t, second.Created, received.Quorum.Created)
		assert.True(t, received.Quorum.Stands)
		assert.Equal(t, second.Speeds, received.Quorum.Speeds)
		assert.True(t, equal(second.Members, received.Quorum.Members))
		if n > 0 {
			assert.EqualValues(t, 7, first.Members[0].Step, "a delivered quorum does not change")
		}
	}
}

func TestAWrongDelivery(t *testing.T) {
	list := quorumOf(manyMembers(30))
	states := func(list uint64, place uint32) *torchftpb.Delivery {
		return &torchftpb.Delivery{List: list, Form: &torchftpb.Delivery_States{
			States: &torchftpb.QuorumStates{Others: []*torchftpb.PlacedState{{Place: place}}},
		}}
	}
	swapped := manyMembers(3)
	swapped[0], swapped[1] = swapped[1], swapped[0]
	twice := manyMembers(2)
	twice[1] = twice[0]
	short := whole(t, list, 1)
	short.Form = &torchftpb.Delivery_Packed{Packed: short.GetPacked()[:len(short.GetPacked())/2]}
	noQuorum := []byte{1, 1, 0, 0xfe, 0xff, 0xff} // one stored byte, 0xff
	for name, wrong := range map[string]*torchftpb.Delivery{
		"no form":              {},
		"another list":         states(2, 0),
		"a place outside":      states(1, 30),
		"not in order":         whole(t, quorumOf(swapped), 2),
		"a member twice":       whole(t, quorumOf(twice), 2),
		"no quorum":            {Form: &torchftpb.Delivery_Packed{Packed: noQuorum}},
		"no compressed data":   {Form: &torchftpb.Delivery_Packed{Packed: []byte("\xff\xff nonsense")}},
		"cut short":            short,
		"nothing was packed":   {Form: &torchftpb.Delivery_Packed{}},
		"a place of 32 bits":   states(1, 1<<32-1),
		"list 0 is that of no": states(0, 0),
	} {
		t.Run(name, func(t *testing.T) {
			var received Delivered
			require.NoError(t, received.Next(whole(t, list, 1)))
			before := received
			require.Error(t, received.Next(wrong))
			assert.Equal(t, before, received)
		})
	}
	var none Delivered
	require.ErrorContains(t, none.Next(states(0, 0)), "list 0", "no list was sent on this stream")
}

// FuzzDelivery sends a member two arbitrary deliveries: each is a quorum in order, or an error. `go test`
// runs the seeds; `go test ./internal/wire -fuzz FuzzDelivery` continues with mutations of them.
func FuzzDelivery(f *testing.F) {
	for _, n := range []int{1, 30} {
		q := quorumOf(manyMembers(n))
		first, err := proto.Marshal(whole(f, q, 1))
		require.NoError(f, err)
		second, err := proto.Marshal(StatesToProto(q, 1))
		require.NoError(f, err)
		f.Add(first, second)
		f.Add(first[:len(first)/2], second[:len(second)/2])
	}
	f.Fuzz(func(t *testing.T, first, second []byte) {
		var received Delivered
		for _, encoded := range [][]byte{first, second} {
			var p torchftpb.Delivery
			if proto.Unmarshal(encoded, &p) != nil || received.Next(&p) != nil {
				continue
			}
			q := received.Quorum
			for i := 1; i < len(q.Members); i++ {
				require.Less(t, q.Members[i-1].ReplicaID, q.Members[i].ReplicaID)
			}
			_, err := proto.Marshal(QuorumToProto(q))
			_ = err // an error is allowed, as for a replica id that is not UTF-8; only a panic would be a bug
		}
	})
}
