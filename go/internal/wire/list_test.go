package wire

import (
	"fmt"
	"testing"

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
			ReplicaID: fmt.Sprintf("group-%05d", i), Address: fmt.Sprintf("http://node-%d:1", i), WorldSize: 2,
			Data: "{}", Handles: []string{"h0", "h1"}, Layouts: []string{"l"}, Unknown: []byte{0xf8, 0x07, 0x01},
		}
	}
	return members
}

func TestAListTravelsInParts(t *testing.T) {
	for _, n := range []int{0, 1, 20000} {
		change := quorum.Change{Whole: true, Set: manyMembers(n)}
		parts := ChangeToProto(change)
		assert.Equal(t, n > 1000, len(parts) > 1)
		var got quorum.Change
		total := 0
		for _, part := range parts {
			assert.Less(t, proto.Size(part), 2*partSize)
			packed, err := Pack(part)
			require.NoError(t, err)
			total += proto.Size(packed)
			require.NoError(t, AddPart(&got, packed))
		}
		assert.Equal(t, quorum.RevisionOf(change.Set), quorum.RevisionOf(got.Set))
		assert.Len(t, got.Set, n)
		if n > 1000 {
			assert.Less(t, total, 20*n, "the records of members differ little")
		}
	}
	assert.Empty(t, ChangeToProto(quorum.Change{}))
}

// FuzzHeldList sends a member arbitrary messages of a lighthouse: the result is a list in order, or an error.
func FuzzHeldList(f *testing.F) {
	for _, change := range []quorum.Change{
		{}, {Whole: true, Set: manyMembers(30)}, {Left: []int{0, 2}, Set: manyMembers(2)}, {Left: []int{9}},
	} {
		for _, part := range ChangeToProto(change) {
			packed, err := Pack(part)
			require.NoError(f, err)
			for _, p := range []*torchftpb.ListChange{part, packed} {
				bytes, err := proto.Marshal(p)
				require.NoError(f, err)
				states, err := proto.Marshal(&torchftpb.QuorumStates{Step: 4, Others: []*torchftpb.PlacedState{{Place: 1, Step: 2}}})
				require.NoError(f, err)
				f.Add(bytes, states)
			}
		}
	}
	held := manyMembers(4)
	f.Fuzz(func(t *testing.T, change, states []byte) {
		var part torchftpb.ListChange
		var s torchftpb.QuorumStates
		if proto.Unmarshal(change, &part) != nil || proto.Unmarshal(states, &s) != nil {
			return
		}
		var c quorum.Change
		if AddPart(&c, &part) != nil {
			return
		}
		list, err := c.Apply(held)
		if err != nil {
			return
		}
		for i := 1; i < len(list); i++ {
			require.Less(t, list[i-1].ReplicaID, list[i].ReplicaID)
		}
		if q, err := QuorumFromStates(&s, list); err == nil {
			require.Len(t, q.Members, len(list))
		}
	})
}
