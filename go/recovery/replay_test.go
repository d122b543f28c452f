package recovery

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestReplay checks which groups reduce the kept gradients of a failed step again.
func TestReplay(t *testing.T) {
	for _, c := range []struct {
		name      string
		steps     []int64
		committed []int64 // nil: all in quorum 6
		silent    []int   // members that do not announce that they replay
		initSync  bool
		want      []bool
	}{
		{name: "no group committed the step", steps: []int64{5, 5, 5}, want: []bool{true, true, true}},
		{name: "alone", steps: []int64{5}, want: []bool{true}},
		{name: "one group committed it", steps: []int64{6, 5, 5}, want: []bool{true, false, false}},
		{name: "one group committed it in the newer quorum", steps: []int64{6, 6, 5},
			committed: []int64{7, 6, 6}, want: []bool{true, false, false}},
		{name: "one joins", steps: []int64{5, 0, 5}, committed: []int64{6, -1, 6},
			want: []bool{true, false, true}},
		{name: "one does not announce it", steps: []int64{5, 5, 5}, silent: []int{2},
			want: []bool{false, false, false}},
		{name: "one that joins does not announce it", steps: []int64{5, 5, 0}, silent: []int{2},
			want: []bool{false, false, false}},
		{name: "the first step, each rank has its own primary", steps: []int64{0, 0, 0},
			committed: []int64{-1, -1, -1}, initSync: true, want: []bool{false, false, false}},
		{name: "the first step, alone", steps: []int64{0}, committed: []int64{-1}, initSync: true,
			want: []bool{true}},
		{name: "the first step without init_sync", steps: []int64{0, 0}, committed: []int64{-1, -1},
			want: []bool{true, true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			q := at(c.steps...)
			for i := range q.Members {
				q.Members[i].ReplaysFailedSteps = true
				q.Members[i].CommittedQuorumID = 6
				if c.committed != nil {
					q.Members[i].CommittedQuorumID = c.committed[i]
				}
			}
			for _, i := range c.silent {
				q.Members[i].ReplaysFailedSteps = false
			}
			var got []bool
			for _, m := range q.Members {
				r, err := compute(m.ReplicaID, 0, q, c.initSync)
				require.NoError(t, err)
				got = append(got, r.Replay)
			}
			require.Equal(t, c.want, got)
		})
	}
}
