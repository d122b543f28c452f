// Package admission limits the connections that have not been authorized yet, so that unauthorized clients
// cannot use up all connections of a server.
package admission

import (
	"container/list"
	"net"
	"sync"
)

// Pending has room for a limited number of connections, and for a smaller number from each address. If one of
// these limits is exceeded, the oldest connection of all, or from that address, is closed: a client of the
// job sends its first message at once, so an old connection most likely does not belong to the job.
type Pending struct {
	most, ofOne int

	mu    sync.Mutex
	all   *list.List            // of *Conn, oldest first
	hosts map[string]*list.List // the same by address
}

// New returns a Pending with room for most connections in total, and for ofOne from one address.
func New(most, ofOne int) *Pending {
	return &Pending{most: most, ofOne: ofOne, all: list.New(), hosts: map[string]*list.List{}}
}

// Conn is one of these connections.
type Conn struct {
	in     *Pending
	host   string
	cut    func()
	all    *list.Element // nil once it is removed
	ofHost *list.Element
}

// Add adds a connection. A later call of Add calls cut to end this connection if there is no room then. cut
// must not block.
func (p *Pending) Add(from net.Addr, cut func()) *Conn {
	host := from.String()
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	mine := p.hosts[host]
	switch {
	case mine != nil && mine.Len() >= p.ofOne:
		p.evict(mine.Front().Value.(*Conn))
	case p.all.Len() >= p.most:
		p.evict(p.all.Front().Value.(*Conn))
	}
	if mine = p.hosts[host]; mine == nil {
		mine = list.New()
		p.hosts[host] = mine
	}
	c := &Conn{in: p, host: host, cut: cut}
	c.all, c.ofHost = p.all.PushBack(c), mine.PushBack(c)
	return c
}

func (p *Pending) evict(c *Conn) {
	p.remove(c)
	c.cut()
}

func (p *Pending) remove(c *Conn) {
	p.all.Remove(c.all)
	mine := p.hosts[c.host]
	mine.Remove(c.ofHost)
	if mine.Len() == 0 {
		delete(p.hosts, c.host)
	}
	c.all = nil
}

// Remove removes a connection that has been authorized or has ended. It reports whether the connection was
// there: it is not if it was cut or removed before.
func (c *Conn) Remove() bool {
	c.in.mu.Lock()
	defer c.in.mu.Unlock()
	if c.all == nil {
		return false
	}
	c.in.remove(c)
	return true
}

// Len returns the number of connections.
func (p *Pending) Len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.all.Len()
}
