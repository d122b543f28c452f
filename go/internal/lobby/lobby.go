// Package lobby limits the connections that have not been authorized yet, so that unauthorized clients cannot use up all
// connections of a server.
package lobby

import (
	"container/list"
	"net"
	"sync"
)

// Lobby has room for a limited number of connections, and for a smaller number from each address. If one of these limits is
// exceeded, the oldest connection of all, or from that address, is closed: a client of the job sends its first message at once, so
// an old connection most likely does not belong to the job.
type Lobby struct {
	most, ofOne int

	mu    sync.Mutex
	all   *list.List            // of *Guest, oldest first
	hosts map[string]*list.List // the same by address
}

// New returns a Lobby with room for most connections in total, and for ofOne from one address.
func New(most, ofOne int) *Lobby {
	return &Lobby{most: most, ofOne: ofOne, all: list.New(), hosts: map[string]*list.List{}}
}

// Guest is one connection in a Lobby.
type Guest struct {
	lobby  *Lobby
	host   string
	cut    func()
	all    *list.Element // nil if it has left
	ofHost *list.Element
}

// Enter adds a connection. A later call of Enter calls cut to end this connection if the lobby is full then. cut must not block.
func (l *Lobby) Enter(from net.Addr, cut func()) *Guest {
	host := from.String()
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	mine := l.hosts[host]
	switch {
	case mine != nil && mine.Len() >= l.ofOne:
		l.evict(mine.Front().Value.(*Guest))
	case l.all.Len() >= l.most:
		l.evict(l.all.Front().Value.(*Guest))
	}
	if mine = l.hosts[host]; mine == nil {
		mine = list.New()
		l.hosts[host] = mine
	}
	g := &Guest{lobby: l, host: host, cut: cut}
	g.all, g.ofHost = l.all.PushBack(g), mine.PushBack(g)
	return g
}

func (l *Lobby) evict(g *Guest) {
	l.remove(g)
	g.cut()
}

func (l *Lobby) remove(g *Guest) {
	l.all.Remove(g.all)
	mine := l.hosts[g.host]
	mine.Remove(g.ofHost)
	if mine.Len() == 0 {
		delete(l.hosts, g.host)
	}
	g.all = nil
}

// Leave removes a connection that has been authorized or has ended. It reports whether the connection was in the lobby: it is not
// if it was closed by the lobby or has left before.
func (g *Guest) Leave() bool {
	g.lobby.mu.Lock()
	defer g.lobby.mu.Unlock()
	if g.all == nil {
		return false
	}
	g.lobby.remove(g)
	return true
}

// Len returns the number of connections in the lobby.
func (l *Lobby) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all.Len()
}
