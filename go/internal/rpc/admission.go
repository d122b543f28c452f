package rpc

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/torchft/torchft/go/internal/admission"
)

// Bounds for connections that are not known to belong to members. A member's connection counts here until its
// first call. The bounds are large because all groups of a large job may reconnect at the same moment, from
// one address.
const (
	mostUnauthenticated  = 20_000
	unauthenticatedOfOne = 10_000
	mostReaders          = 4096 // HTTP connections: browsers, scrapers of metrics and others
)

// shown is the kind of a connection, which follows from its first request; zero before that.
type shown int

const (
	reader shown = iota + 1 // an HTTP request
	member                  // a gRPC call, with the token if the server has one
)

// admitting bounds the connections of a listener by kind. Each kind has its own limit, so that other
// connections never take the places of members. Above the limit for members, a new connection is closed.
// Above the limits for connections without a request and for HTTP connections, whose pages need no token, the
// oldest one is closed.
//
// netutil.LimitListener has one limit for all, and waits at it: idle connections of anybody would keep the
// members out.
type admitting struct {
	net.Listener
	most                     int
	refused                  *refusals
	unauthenticated, readers *admission.Pending
	open                     atomic.Int64 // connections of members
}

func newAdmitting(lis net.Listener, most int, refused *refusals) *admitting {
	return &admitting{
		Listener: lis, most: most, refused: refused,
		unauthenticated: admission.New(min(mostUnauthenticated, 2*most), min(unauthenticatedOfOne, most)),
		readers:         admission.New(mostReaders, mostReaders),
	}
}

func (c *admitting) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	one := &counted{Conn: conn, listener: c}
	one.address = &address{Addr: conn.RemoteAddr(), conn: one}
	one.pending = c.unauthenticated.Add(conn.RemoteAddr(), func() { _ = conn.Close() })
	return one, nil
}

// enter counts a member's connection, and returns false if there are too many.
func (c *admitting) enter() bool {
	if c.open.Add(1) <= int64(c.most) {
		return true
	}
	c.open.Add(-1)
	return false
}

// counted is a connection of an admitting listener.
type counted struct {
	net.Conn
	listener *admitting
	address  *address

	mu      sync.Mutex
	pending *admission.Conn // nil for a member's connection
	is      shown
	ended   bool
}

// address is the address of the other side with a reference to the connection, since handlers get only the
// address of their connection.
type address struct {
	net.Addr
	conn *counted
}

// RemoteAddr returns an *address: TLS, gRPC and HTTP pass it on to their handlers unchanged.
func (c *counted) RemoteAddr() net.Addr { return c.address }

// show records the kind of the connection from an address. It returns false if the connection is closed: it
// was cut for others, or the limit for members is reached.
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
	case c.ended || !c.pending.Remove():
		return false
	}
	if what == reader {
		c.is, c.pending = reader, c.listener.readers.Add(c.address.Addr, func() { _ = c.Conn.Close() })
		return true
	}
	if !c.listener.enter() {
		c.listener.refused.log("torchft: a connection was refused", c.address.String(),
			fmt.Sprintf("%d are open (max_connections)", c.listener.most))
		_ = c.Conn.Close()
		return false
	}
	c.is, c.pending = member, nil
	return true
}

type addressKey struct{}

// withAddress adds the address of a connection to the context of its HTTP requests.
func withAddress(ctx context.Context, conn net.Conn) context.Context {
	return context.WithValue(ctx, addressKey{}, conn.RemoteAddr())
}

// AsMember counts the connection of an HTTP request as a member's, for routes whose callers send the token.
// It returns false if the limit is reached.
func AsMember(r *http.Request) bool {
	from, ok := r.Context().Value(addressKey{}).(net.Addr)
	return !ok || show(from, member)
}

// reading counts the connection of each request as a reader's, and serves the request.
func reading(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if from, ok := r.Context().Value(addressKey{}).(net.Addr); ok && !show(from, reader) {
			return // there were too many connections without a request, and this one was closed
		}
		h.ServeHTTP(w, r)
	})
}

func (c *counted) Close() error {
	c.mu.Lock()
	if !c.ended {
		c.ended = true
		if c.is == member {
			c.listener.open.Add(-1)
		} else {
			c.pending.Remove()
		}
	}
	c.mu.Unlock()
	return c.Conn.Close()
}
