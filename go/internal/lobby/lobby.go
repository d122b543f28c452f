// Package lobby limits the connections that have not been authorized yet, so that other clients cannot use up the connections that a server
// allows.
package lobby

import (
	"container/list"
	"net"
	"sync"
)

// Lobby has room for a number of connections, and for a smaller number of each address. If it is full, the oldest connection is
// closed, of that address or of all: a client of the job sends its first message at once, so an old connection is most likely
// none of the job's.
type Lobby struct {
	most, ofOne int

	mu    sync.Mutex
	all   *list.List            // of *Guest, oldest first
	hosts map[string]*list.List // the same by address
}

// New makes a Lobby with room for most connections, and for ofOne of one address.
func New(most, ofOne int) *Lobby {
	return &Lobby{most: most, ofOne: ofOne, all: list.New(), hosts: map[string]*list.List{}}
}

// Guest is one connection in a Lobby.
type Guest struct {
	lobby  *Lobby
	host   string
	cut    func()
	all    *list.Element // nil: it has left
	ofHost *list.Element
}

// Enter adds a connection. cut is called to end it if the lobby is full, perhaps in a later call of Enter; it must not block.
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

// Leave frees the place of a connection that has been authorized or has ended. It reports whether the connection had a place: one that was
// closed or has left has none.
func (g *Guest) Leave() bool {
	g.lobby.mu.Lock()
	defer g.lobby.mu.Unlock()
	if g.all == nil {
		return false
	}
	g.lobby.remove(g)
	return true
}

// Len is the number of connections in the lobby.
func (l *Lobby) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all.Len()
}
