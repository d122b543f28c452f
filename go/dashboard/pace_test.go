package dashboard

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestTheDurationOfAStep(t *testing.T) {
	type round struct {
		after        time.Duration
		quorum, step int64
	}
	var fast, slow []round
	for i := range int64(10_000) {
		fast = append(fast, round{time.Duration(i) * time.Millisecond, 1, i})
	}
	for i := range int64(5) {
		slow = append(slow, round{time.Duration(i) * 12 * time.Second, 1, i})
	}
	for name, c := range map[string]struct {
		rounds []round
		idle   time.Duration // since the last round
		want   time.Duration
	}{
		"no step":                   {nil, 0, 0},
		"one step":                  {[]round{{0, 1, 7}}, 0, 0},
		"two steps":                 {[]round{{0, 1, 7}, {time.Second, 1, 8}}, 0, time.Second},
		"a step that is repeated":   {[]round{{0, 1, 7}, {time.Second, 1, 8}, {3 * time.Second, 1, 8}}, 0, time.Second},
		"short steps":               {fast, 0, time.Millisecond},
		"long steps":                {slow, 30 * time.Second, 12 * time.Second},
		"a step that does not end":  {slow, 37 * time.Second, 0},
		"a group with a checkpoint": {[]round{{0, 1, 1}, {time.Second, 2, 5000}}, 0, 0},
		"after a heal":              {[]round{{0, 1, 1}, {8 * time.Second, 2, 2}, {9 * time.Second, 2, 3}}, 0, time.Second},
	} {
		var p pace
		now := start
		for _, r := range c.rounds {
			now = start.Add(r.after)
			p.round(r.quorum, r.step, now)
		}
		assert.Equal(t, c.want, p.duration(now.Add(c.idle)), name)
		assert.LessOrEqual(t, len(p.marks), paceMarks+2, name)
	}
}
