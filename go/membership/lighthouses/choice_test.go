package lighthouses

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/torchft/torchft/go/quorum"
)

func TestWhichLighthouseIsTried(t *testing.T) {
	now := time.Unix(1000, 0)
	for _, test := range []struct {
		name string
		is   func(c *choice)
		want []int
	}{
		{"at the beginning", func(*choice) {}, []int{0, 1, 2}},
		{"one that serves", func(c *choice) { c.arrived(1) }, []int{1}},
		{"it is restarted", func(c *choice) { c.arrived(1); c.broke = now.Add(-failoverAfter / 2) }, []int{1}},
		{"it stays away", func(c *choice) { c.arrived(1); c.broke = now.Add(-failoverAfter) }, []int{0, 1, 2}},
		{"it has too few", func(c *choice) { c.arrived(0); c.shun(0, now) }, []int{1, 2, 0}},
		{"that was long ago", func(c *choice) { c.arrived(0); c.shun(0, now.Add(-avoidFor)) }, []int{0}},
		{"all have too few", func(c *choice) { c.shun(1, now); c.shun(0, now); c.shun(2, now) }, []int{0, 1, 2}},
		{"all go back", func(c *choice) { c.arrived(2); c.failBack(1) }, []int{1, 0, 2}},
		{"to one that had too few", func(c *choice) { c.arrived(2); c.shun(0, now); c.failBack(0) }, []int{0, 1, 2}},
		{"it does not answer", func(c *choice) {
			c.arrived(2)
			c.broke = now
			c.failBack(0)
			c.failed(0, now, false)
		}, []int{2}},
		{"nor does the one before", func(c *choice) {
			c.arrived(2)
			c.broke = now.Add(-failoverAfter)
			c.failBack(0)
			c.failed(0, now, false)
			c.failed(2, now, false)
		}, []int{1, 2, 0}},
		{"it is silent", func(c *choice) { c.arrived(0); c.broke = now; c.failed(0, now, true) }, []int{1, 2, 0}},
		{"another one is, too", func(c *choice) { c.arrived(0); c.broke = now; c.failed(0, now, true); c.failed(1, now, true) }, []int{1, 2, 0}},
		{"it is silent, and the others have too few", func(c *choice) {
			c.arrived(1)
			c.shun(0, now)
			c.shun(2, now)
			c.failed(1, now, true)
		}, []int{1, 0, 2}},
		{"it was silent and answers", func(c *choice) { c.arrived(0); c.failed(0, now, true); c.arrived(0) }, []int{0}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := newChoice(0, 3)
			test.is(&c)
			assert.Equal(t, test.want, c.order(now, false))
			assert.Equal(t, []int{c.at}, c.order(now, true), "bound to it, it asks no other")
		})
	}
	assert.Equal(t, []int{0}, func() []int { c := newChoice(0, 1); return c.order(now, false) }(), "the only one")
}

func TestWhichEarlierLighthousesAMemberReaches(t *testing.T) {
	now := time.Unix(1000, 0)
	c := newChoice(2, 4)
	assert.Equal(t, []int{0, 1}, c.lookAt(now))
	assert.Empty(t, places(c.looked(quorum.PlacesOf(0, 1))), "a look is not enough")
	assert.Equal(t, []int{0}, places(c.looked(quorum.PlacesOf(0))))
	assert.Equal(t, []int{0}, places(c.looked(quorum.PlacesOf(0, 1))))
	assert.Equal(t, []int{0, 1}, places(c.looked(quorum.PlacesOf(0, 1, 2, 3))), "later ones do not matter")
	c.shun(0, now)
	assert.Equal(t, []int{1}, c.lookAt(now), "it would send the member away")
	c.arrived(1)
	assert.Empty(t, places(c.looked(quorum.PlacesOf(0))), "what was seen from elsewhere does not count")
	c.arrived(1)
	assert.Equal(t, []int{0}, places(c.looked(quorum.PlacesOf(0))), "but for a stream that broke")
	c.arrived(0)
	assert.Empty(t, c.lookAt(now))
}

func places(p quorum.Places) (list []int) {
	for i := range 4 {
		if p.Has(i) {
			list = append(list, i)
		}
	}
	return list
}
