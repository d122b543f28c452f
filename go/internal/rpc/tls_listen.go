package rpc

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/torchft/torchft/go/internal/auth"
)

// secureListener returns connections that perform the TLS handshake when they are first read: a client that
// delays its handshake must not block Accept.
type secureListener struct {
	net.Listener
	config  *auth.Watched[*tls.Config]
	refused *refusals
}

func (l secureListener) Accept() (net.Conn, error) {
	raw, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &secureConn{Conn: tls.Server(raw, l.config.Get()), refused: l.refused}, nil
}

type secureConn struct {
	*tls.Conn
	refused *refusals
	began   sync.Once
}

func (c *secureConn) Read(p []byte) (int, error) {
	c.began.Do(func() {
		if err := c.Handshake(); err != nil { //nolint:noctx // the connection has a deadline
			c.complain(err)
		}
	})
	return c.Conn.Read(p)
}

func (c *secureConn) complain(err error) {
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
		return // the client sent nothing, like a port scan or a health check
	}
	plain, isPlain := errors.AsType[tls.RecordHeaderError](err)
	if isPlain && plain.Conn != nil {
		err = errors.New("the client does not speak TLS, which this server requires: the address must " +
			"begin with https://")
		switch string(plain.RecordHeader[:]) {
		case "GET /", "HEAD ", "POST ", "PUT /", "OPTIO":
			// An error is ignored: the connection is closed next.
			_, _ = io.WriteString(plain.Conn, "HTTP/1.0 400 Bad Request\r\nContent-Type: "+
				"text/plain\r\n\r\nThis port speaks TLS: use https://\n")
		}
	}
	c.refused.log("torchft: a connection was refused", c.RemoteAddr().String(), err)
	if !isPlain {
		c.linger()
	}
}

// linger waits up to a second for the other side to close. If this side closed while unread data arrives, the
// kernel would send a reset, and the client might not read the TLS alert with the reason of the refusal.
func (c *secureConn) linger() {
	raw := c.NetConn()
	_ = raw.SetDeadline(time.Now().Add(time.Second))
	_, _ = io.CopyN(io.Discard, raw, maxHeader)
}

// refusals logs at most one refusal a second, and one a minute of the same host with the same reason: refused
// clients retry.
type refusals struct {
	logger *slog.Logger

	mu     sync.Mutex
	last   time.Time
	logged map[string]time.Time // by host and reason
}

func (r *refusals) log(message, from string, reason any, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now, key := time.Now(), fmt.Sprint(auth.HostOf(from), " ", reason)
	if now.Sub(r.last) < time.Second || now.Sub(r.logged[key]) < time.Minute {
		return
	}
	if r.logged == nil || len(r.logged) >= 100 {
		r.logged = map[string]time.Time{}
	}
	r.last, r.logged[key] = now, now
	r.logger.Warn(message, append([]any{"from", from, "reason", reason}, args...)...)
}
