package wire

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/rpc"
)

// The handles of a large quorum, of 10,000 groups with 8 ranks each, fit into a request.
func TestAQuorumIsShownAsItIs(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{1, 20, 10000} {
		q := quorumOf(manyMembers(n))
		q.Stands = n == 20
		for i := range q.Members {
			q.Members[i].Handles = nil
			for range 8 {
				q.Members[i].Handles = append(q.Members[i].Handles,
					fmt.Sprintf(`{"id": "%016x%016x", "store": "node-%d:29500"}`, random.Uint64(),
						random.Uint64(), i))
			}
		}
		p, err := PackPast(q)
		require.NoError(t, err)
		shown, err := Unpack(p)
		require.NoError(t, err)
		require.Equal(t, q, shown)
	}
}

func TestAQuorumThatIsTooLargeIsShownWithoutItsRecords(t *testing.T) {
	q := quorumOf(manyMembers(10))
	q.Stands, q.Speeds, q.Skipped = true, []int64{1, 300}, []string{"0.1.2"}
	noise := make([]byte, rpc.MaxRequest/8)
	_, _ = rand.NewChaCha8([32]byte{}).Read(noise)
	for i := range q.Members {
		for at := range noise {
			noise[at] = noise[at]<<1>>1 ^ byte(i) // ASCII
		}
		q.Members[i].Data, q.Members[i].Step = string(noise[i:]), 7
	}
	p, err := PackPast(q)
	require.NoError(t, err)
	require.Less(t, len(p), 1000)
	shown, err := Unpack(p)
	require.NoError(t, err)
	require.Equal(t, q.Past(), shown.Past())
	records := shown.Members
	shown.Members = q.Members
	require.Equal(t, q, shown, "only records are left out")
	require.Empty(t, records[0].Data)
}
