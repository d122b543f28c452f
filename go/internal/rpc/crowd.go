package rpc

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"sync"

	"github.com/torchft/torchft/go/internal/lobby"
)

// Bounds for connections other than those of members. A member makes its first call as soon as it is connected; but all groups of a large job
// may reconnect at the same moment, and share one address.
const (
	mostStrangers  = 20_000
	strangersOfOne = 10_000
	mostReaders    = 4096 // of HTTP: pages, scrapers and other readers
)

// shown is what a connection is known to be for, by its first request.
type shown int

const (
	reader shown = iota + 1 // a request of HTTP
	member                  // a call of gRPC, with the token where there is one
)

// crowd counts connections. That of a member keeps its place. Those without a request yet, and those of HTTP, whose pages need no token, have
// places of their own, of which the oldest connection is closed when there are too many: so they never take the places of members.
type crowd struct {
	net.Listener
	most               int
	refused            *refusals
	strangers, readers *lobby.Lobby

	mu   sync.Mutex
	open int
}

func newCrowd(lis net.Listener, most int, refused *refusals) *crowd {
	return &crowd{
		Listener: lis, most: most, refused: refused,
		strangers: lobby.New(min(mostStrangers, 2*most), min(strangersOfOne, most)), readers: lobby.New(mostReaders, mostReaders),
	}
}

func (c *crowd) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	one := &counted{Conn: conn, crowd: c}
	one.address = &address{Addr: conn.RemoteAddr(), conn: one}
	one.guest = c.strangers.Enter(conn.RemoteAddr(), func() { _ = conn.Close() })
	return one, nil
}

func (c *crowd) enter() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open >= c.most {
		return false
	}
	c.open++
	return true
}

func (c *crowd) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open--
}

// counted is a connection of a crowd.
type counted struct {
	net.Conn
	crowd   *crowd
	address *address

	mu    sync.Mutex
	guest *lobby.Guest // nil for a member's
	is    shown
	ended bool
}

// address is the address of the other side. A call has only this address of its connection: the crowd finds the connection by it.
type address struct {
	net.Addr
	conn *counted
}

// RemoteAddr is what TLS, gRPC and HTTP pass on.
func (c *counted) RemoteAddr() net.Addr { return c.address }

// show records the kind of the connection from an address. It is false if there is no place for the connection.
func show(from net.Addr, what shown) bool {
	a, counts := from.(*address)
	return !counts || a.conn.show(what)
}

func (c *counted) show(what shown) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.is >= what:
		return true
	case c.ended || !c.guest.Leave():
		return false
	}
	if what == reader {
		c.is, c.guest = reader, c.crowd.readers.Enter(c.address.Addr, func() { _ = c.Conn.Close() })
		return true
	}
	if !c.crowd.enter() {
		_ = c.Conn.Close()
		c.crowd.refused.log("torchft: a connection was refused", "from", c.address.String(),
			"reason", fmt.Sprintf("%d are open (max_connections)", c.crowd.most))
		return false
	}
	c.is, c.guest = member, nil
	return true
}

type addressKey struct{}

// withAddress adds the address of its connection to a request of HTTP.
func withAddress(ctx context.Context, conn net.Conn) context.Context {
	return context.WithValue(ctx, addressKey{}, conn.RemoteAddr())
}

// AsMember counts the connection of a request as that of a member, for a route whose callers send the token. It is false if there is no place
// for it.
func AsMember(r *http.Request) bool {
	from, ok := r.Context().Value(addressKey{}).(net.Addr)
	return !ok || show(from, member)
}

// reading serves requests, which give their connections a place.
func reading(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if from, ok := r.Context().Value(addressKey{}).(net.Addr); ok && !show(from, reader) {
			return // it was cut
		}
		h.ServeHTTP(w, r)
	})
}

func (c *counted) Close() error {
	c.mu.Lock()
	if !c.ended {
		c.ended = true
		if c.is == member {
			c.crowd.leave()
		} else {
			c.guest.Leave()
		}
	}
	c.mu.Unlock()
	return c.Conn.Close()
}
