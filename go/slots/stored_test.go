package slots

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestWhatRanksHaveStored(t *testing.T) {
	one := `{"path": "parts-of-step-5/g/rank-1", "job": "another", "group": "g", "group_rank": 1,
		"group_world_size": 2, "step": 5, "quorum": 3, "saved": 1.5, "bytes": 9, "share": [0, 3, 2]}`
	found := ReadStored("j", []byte(`{"folder": "/c", "slots": [`+one+`]}`))
	assert.Equal(t, Stored{"/c", []Slot{{Job: "j", Group: "g", GroupRank: 1, Path: "parts-of-step-5/g/rank-1",
		Stored: true, GroupWorldSize: 2, Step: 5, Quorum: 3, Saved: 1.5, Bytes: 9, Share: []int64{0, 3, 2}}}},
		found)
	for _, text := range []string{"", "{", "[]", `{"slots": {}}`} {
		assert.Equal(t, Stored{}, ReadStored("j", []byte(text)), text)
	}
	for _, bad := range []string{
		strings.Replace(one, "[0, 3, 2]", "[3, 3, 2]", 1),
		strings.Replace(one, `"step": 5`, `"step": -5`, 1),
		strings.Replace(one, `"group_world_size": 2`, `"group_world_size": 1`, 1),
		strings.Replace(one, `"group_rank": 1`, `"group_rank": -1`, 1),
		strings.Replace(one, "parts-of-step-5/g/rank-1", "", 1),
		strings.Replace(one, "rank-1", strings.Repeat("x", longestPath), 1),
	} {
		assert.Empty(t, ReadStored("j", []byte(`{"slots": [`+bad+`]}`)).Slots, bad)
	}
	many := strings.Repeat(one+",", mostStored) + one
	assert.Len(t, ReadStored("j", []byte(`{"slots": [`+many+`]}`)).Slots, mostStored)
}

func TestTheNewestStepThatAllHostsHaveStored(t *testing.T) {
	stored := func(job string, step, part int64) Slot {
		return Slot{Job: job, Group: fmt.Sprint(part), GroupWorldSize: 1, Step: step,
			Share: []int64{part, 3, 2}, Stored: true}
	}
	memory := stored("a", 9, 1)
	memory.Stored = false
	a := []Slot{stored("a", 5, 0), stored("a", 7, 0), stored("a", 9, 0), memory}
	b := []Slot{stored("a", 5, 1), stored("a", 7, 2), stored("b", 9, 0), stored("b", 9, 1)}
	all := append(append([]Slot{}, a...), b...)
	assert.Equal(t, map[string]int64{"a": 7}, Complete(a, all), "a part of step 9 is in memory alone")
	assert.Equal(t, map[string]int64{"a": 7, "b": 9}, Complete(b, all))
	assert.Empty(t, Complete(a, a))
	assert.Empty(t, Complete([]Slot{memory}, all), "this host stores nothing")
}
