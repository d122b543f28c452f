package fttest

import (
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// conn is one end of an in-memory connection.
type conn struct {
	host          *Host
	local, remote net.Addr
	in, out       *pipe
}

func (c *conn) Read(p []byte) (int, error)  { return c.in.read(p) }
func (c *conn) Write(p []byte) (int, error) { return c.out.write(p) }
func (c *conn) LocalAddr() net.Addr         { return c.local }
func (c *conn) RemoteAddr() net.Addr        { return c.remote }

func (c *conn) Close() error {
	c.in.close()
	c.out.close()
	c.host.net.mu.Lock()
	defer c.host.net.mu.Unlock()
	delete(c.host.net.conns, c)
	return nil
}

func (c *conn) SetDeadline(t time.Time) error     { return c.SetReadDeadline(t) }
func (c *conn) SetReadDeadline(t time.Time) error { c.in.setDeadline(t); return nil }

// SetWriteDeadline has nothing to do: a write never waits.
func (c *conn) SetWriteDeadline(time.Time) error { return nil }

// pipe is one direction of a connection. It holds as much as is written; a reader waits until there is
// something, the end, or its deadline.
type pipe struct {
	mu       sync.Mutex
	changed  *sync.Cond
	data     []byte
	closed   bool
	frozen   bool
	deadline time.Time
	timer    *time.Timer
}

func newPipe() *pipe {
	p := &pipe{}
	p.changed = sync.NewCond(&p.mu)
	return p
}

func (p *pipe) read(to []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		switch {
		case !p.deadline.IsZero() && !time.Now().Before(p.deadline):
			return 0, os.ErrDeadlineExceeded
		case len(p.data) > 0 && !p.frozen:
			n := copy(to, p.data)
			p.data = p.data[n:]
			return n, nil
		case p.closed:
			return 0, io.EOF
		}
		p.changed.Wait()
	}
}

func (p *pipe) write(from []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return 0, io.ErrClosedPipe
	}
	if !p.frozen {
		p.data = append(p.data, from...)
		p.changed.Broadcast()
	}
	return len(from), nil
}

func (p *pipe) close() { p.change(func() { p.closed = true }) }

func (p *pipe) freeze() { p.change(func() { p.frozen, p.data = true, nil }) }

func (p *pipe) setDeadline(t time.Time) {
	p.change(func() {
		p.deadline = t
		if p.timer != nil {
			p.timer.Stop()
		}
		if !t.IsZero() {
			p.timer = time.AfterFunc(time.Until(t), func() { p.change(func() {}) })
		}
	})
}

func (p *pipe) change(how func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	how()
	p.changed.Broadcast()
}
