package recovery

import (
	"bufio"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/quorum"
)

// recordedQuorum is one line of testdata/upstream_*.jsonl, as testdata/record.py writes it.
type recordedQuorum struct {
	WorldSize uint64 `json:"world_size"`
	InitSync  bool   `json:"init_sync"`
	Members   []struct {
		ID      string   `json:"id"`
		Step    int64    `json:"step"`
		Handles []string `json:"handles"`
	} `json:"members"`
	Results []struct {
		ID             string   `json:"id"`
		GroupRank      int64    `json:"group_rank"`
		ReplicaRank    int64    `json:"replica_rank"`
		ReplicaIDs     []string `json:"replica_ids"`
		Store          string   `json:"store"`
		MaxStep        int64    `json:"max_step"`
		MaxReplicaRank *int64   `json:"max_replica_rank"`
		MaxWorldSize   int64    `json:"max_world_size"`
		Heal           bool     `json:"heal"`
		Source         *int64   `json:"source"`
		SourceOwner    string   `json:"source_owner"`
		Destinations   []int64  `json:"destinations"`
		Handles        []string `json:"handles"`
	} `json:"results"`
}

// Groups that run the upstream package must compute the same ranks, store and sources from a quorum as ours
// do, or the job would hang.
func TestAsUpstream(t *testing.T) {
	files, err := filepath.Glob("testdata/upstream_*.jsonl")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, path := range files {
		t.Run(filepath.Base(path), func(t *testing.T) {
			file, err := os.Open(path)
			require.NoError(t, err)
			defer file.Close()
			lines := bufio.NewScanner(file)
			lines.Buffer(nil, 1<<20)
			n := 0
			for ; lines.Scan(); n++ {
				var recorded recordedQuorum
				require.NoError(t, json.Unmarshal(lines.Bytes(), &recorded))
				requireAsRecorded(t, recorded)
			}
			require.NoError(t, lines.Err())
			require.NotZero(t, n)
		})
	}
}

func requireAsRecorded(t *testing.T, recorded recordedQuorum) {
	t.Helper()
	q := &quorum.Quorum{ID: 1}
	for _, m := range recorded.Members { // in random order
		q.Members = append(q.Members, quorum.Member{
			ReplicaID: m.ID, Address: "http://" + m.ID, StoreAddress: "store " + m.ID,
			Step: m.Step, WorldSize: recorded.WorldSize, Handles: m.Handles,
		})
	}
	for _, want := range recorded.Results {
		got, err := compute(want.ID, want.GroupRank, q, recorded.InitSync)
		require.NoError(t, err)
		require.Equal(t, want.ReplicaRank, got.ReplicaRank)
		require.Equal(t, int64(len(recorded.Members)), got.ReplicaWorldSize)
		require.Equal(t, want.ReplicaIDs, got.ReplicaIDs)
		require.Equal(t, want.Store, got.StoreAddress)
		require.Equal(t, want.MaxStep, got.MaxStep)
		require.Equal(t, want.MaxReplicaRank, got.MaxReplicaRank)
		require.Equal(t, want.MaxWorldSize, got.MaxWorldSize)
		require.Equal(t, want.Heal, got.Heal)
		require.ElementsMatch(t, want.Destinations, got.RecoverDstReplicaRanks)
		if want.Heal {
			require.Equal(t, *want.Source, *got.RecoverSrcReplicaRank)
			require.Equal(t, "http://"+want.SourceOwner, got.RecoverSrcManagerAddress)
		} else {
			require.Nil(t, got.RecoverSrcReplicaRank)
		}
		// For a group that sent no handle, upstream has "" in the list; ours leaves the list empty. With
		// both, the groups then meet at the store.
		if slices.Contains(want.Handles, "") || len(want.Handles) == 0 {
			require.Empty(t, got.ReconfigureHandles)
		} else {
			require.Equal(t, want.Handles, got.ReconfigureHandles)
		}
	}
}
