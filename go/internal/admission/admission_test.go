package admission

import (
	"net"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestTheOldestGoesFirst(t *testing.T) {
	l := New(4, 3)
	var cut []int
	conns := map[int]*Conn{}
	enter := func(number int, host string) {
		conns[number] = l.Add(&net.TCPAddr{IP: net.ParseIP(host), Port: number},
			func() { cut = append(cut, number) })
	}
	enter(1, "10.0.0.1")
	enter(2, "10.0.0.2")
	enter(3, "10.0.0.2")
	enter(4, "10.0.0.2")
	assert.Empty(t, cut)
	enter(5, "10.0.0.2")
	assert.Equal(t, []int{2}, cut, "above the limit of one address, its own oldest connection is closed")
	enter(6, "10.0.0.3")
	assert.Equal(t, []int{2, 1}, cut, "above the total limit, the oldest connection is closed")

	assert.False(t, conns[1].Remove(), "connection 1 was cut")
	assert.True(t, conns[3].Remove())
	assert.False(t, conns[3].Remove(), "connection 3 was removed already")
	enter(7, "10.0.0.4")
	assert.Equal(t, []int{2, 1}, cut, "there was room")
	assert.Equal(t, 4, l.Len())
	for _, c := range conns {
		c.Remove()
	}
	assert.Zero(t, l.Len())
	assert.Empty(t, l.hosts, "addresses are forgotten")
}
