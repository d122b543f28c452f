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
		{"none has served", func(*choice) {}, []int{0, 1, 2}},
		{"one serves", func(c *choice) { c.arrived(1) }, []int{1}},
		{"its stream broke just now", func(c *choice) { c.arrived(1); c.broke = now.Add(-failoverAfter / 2) }, []int{1}},
		{"its stream broke long ago", func(c *choice) { c.arrived(1); c.broke = now.Add(-failoverAfter) }, []int{0, 1, 2}},
		{"it refused because it has too few members", func(c *choice) { c.arrived(0); c.shun(0, now) }, []int{1, 2, 0}},
		{"it refused long ago", func(c *choice) { c.arrived(0); c.shun(0, now.Add(-avoidFor)) }, []int{0}},
		{"all refused because they have too few members", func(c *choice) { c.shun(1, now); c.shun(0, now); c.shun(2, now) }, []int{0, 1, 2}},
		{"all members fail back", func(c *choice) { c.arrived(2); c.failBack(1) }, []int{1, 0, 2}},
		{"all members fail back to one that refused", func(c *choice) { c.arrived(2); c.shun(0, now); c.failBack(0) }, []int{0, 1, 2}},
		{"the target of a failback cannot be reached", func(c *choice) {
			c.arrived(2)
			c.broke = now
			c.failBack(0)
			c.failed(0, now, false)
		}, []int{2}},
		{"neither the target of a failback nor the lighthouse before can be reached", func(c *choice) {
			c.arrived(2)
			c.broke = now.Add(-failoverAfter)
			c.failBack(0)
			c.failed(0, now, false)
			c.failed(2, now, false)
		}, []int{1, 2, 0}},
		{"the serving one accepted an attempt and did not answer", func(c *choice) { c.arrived(0); c.broke = now; c.failed(0, now, true) }, []int{1, 2, 0}},
		{"the serving one and another one did not answer", func(c *choice) { c.arrived(0); c.broke = now; c.failed(0, now, true); c.failed(1, now, true) }, []int{1, 2, 0}},
		{"it did not answer, and the others refused because they have too few members", func(c *choice) {
			c.arrived(1)
			c.shun(0, now)
			c.shun(2, now)
			c.failed(1, now, true)
		}, []int{1, 0, 2}},
		{"the serving one answers again", func(c *choice) { c.arrived(0); c.failed(0, now, true); c.arrived(0) }, []int{0}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := newChoice(0, 3)
			test.is(&c)
			assert.Equal(t, test.want, c.order(now, false))
			assert.Equal(t, []int{c.at}, c.order(now, true), "a member that is bound to one asks no other")
		})
	}
	assert.Equal(t, []int{0}, func() []int { c := newChoice(0, 1); return c.order(now, false) }(), "a list of one lighthouse")
}

func TestWhichEarlierLighthousesAMemberReaches(t *testing.T) {
	now := time.Unix(1000, 0)
	c := newChoice(2, 4)
	assert.Equal(t, []int{0, 1}, c.lookAt(now))
	assert.Empty(t, places(c.looked(quorum.PlacesOf(0, 1))), "a lighthouse must be reached by two probes in a row")
	assert.Equal(t, []int{0}, places(c.looked(quorum.PlacesOf(0))))
	assert.Equal(t, []int{0}, places(c.looked(quorum.PlacesOf(0, 1))))
	assert.Equal(t, []int{0, 1}, places(c.looked(quorum.PlacesOf(0, 1, 2, 3))), "later lighthouses of the list are ignored")
	c.shun(0, now)
	assert.Equal(t, []int{1}, c.lookAt(now), "a lighthouse that refused because it has too few members is not probed")
	c.arrived(1)
	assert.Empty(t, places(c.looked(quorum.PlacesOf(0))), "probes are forgotten when the member has come from another lighthouse")
	c.arrived(1)
	assert.Equal(t, []int{0}, places(c.looked(quorum.PlacesOf(0))), "probes are kept when the member reconnects to the same lighthouse")
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
