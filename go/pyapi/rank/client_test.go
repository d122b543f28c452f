package rank

import (
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/recovery"
)

func ptr(n int64) *int64 { return &n }

func steady() recovery.Result {
	return recovery.Result{
		QuorumID: 7, ReplicaRank: 1, ReplicaWorldSize: 2, StoreAddress: "store:1", MaxStep: 10,
		MaxReplicaRank: ptr(1), MaxWorldSize: 2, ReplicaIDs: []string{"a", "b"}, Handles: []string{"x", "y"},
	}
}

func TestARoundBringsAChange(t *testing.T) {
	change := func(edit func(*recovery.Result)) recovery.Result {
		r := steady()
		edit(&r)
		return r
	}
	for name, after := range map[string]recovery.Result{
		"QuorumID":              change(func(r *recovery.Result) { r.QuorumID = 8 }),
		"ReplicaRank":           change(func(r *recovery.Result) { r.ReplicaRank = 0 }),
		"ReplicaWorldSize":      change(func(r *recovery.Result) { r.ReplicaWorldSize = 3 }),
		"Sources":               change(func(r *recovery.Result) { r.Sources = []recovery.Source{{ReplicaRank: 1}} }),
		"RecoverDstReplicaRank": change(func(r *recovery.Result) { r.RecoverDstReplicaRank = []int64{0} }),
		"Helpers":               change(func(r *recovery.Result) { r.Helpers = []string{"http://a"} }),
		"HelpDstReplicaRank":    change(func(r *recovery.Result) { r.HelpDstReplicaRank = []int64{0} }),
		"StoreAddress":          change(func(r *recovery.Result) { r.StoreAddress = "store:2" }),
		"MaxReplicaRank":        change(func(r *recovery.Result) { r.MaxReplicaRank = nil }),
		"MaxWorldSize":          change(func(r *recovery.Result) { r.MaxWorldSize = 1 }),
		"Heal":                  change(func(r *recovery.Result) { r.Heal = true }),
		"CommitFailures":        change(func(r *recovery.Result) { r.CommitFailures = 1 }),
		"CommittedQuorumID":     change(func(r *recovery.Result) { r.CommittedQuorumID = 6 }),
		"Replay":                change(func(r *recovery.Result) { r.Replay = true }),
		"Draining":              change(func(r *recovery.Result) { r.Draining = true }),
		"ReplicaIDs":            change(func(r *recovery.Result) { r.ReplicaIDs = []string{"a", "c"} }),
		"Handles":               change(func(r *recovery.Result) { r.Handles = []string{"x", "z"} }),
		"WithoutHandles":        change(func(r *recovery.Result) { r.WithoutHandles = []string{"a"} }),
	} {
		t.Run(name, func(t *testing.T) {
			c := New(nil)
			require.True(t, c.Changed(steady()), "the first one")
			require.False(t, c.Changed(steady()))
			require.True(t, c.Changed(after))
		})
	}
	// A field added to Result must be looked at too: the step is the only one that may differ.
	require.Equal(t, 19, reflect.TypeFor[recovery.Result]().NumField())
}

func TestOnlyTheStepDiffers(t *testing.T) {
	c := New(nil)
	c.Changed(steady())
	next := steady()
	next.MaxStep++
	require.False(t, c.Changed(next))
}

func TestAHealIsAChangeEveryTime(t *testing.T) {
	c := New(nil)
	heal := steady()
	heal.Heal = true
	require.True(t, c.Changed(heal))
	require.True(t, c.Changed(heal))
	serve := steady()
	serve.RecoverDstReplicaRank = []int64{0}
	require.True(t, c.Changed(serve))
	require.True(t, c.Changed(serve))
}
