package fttest

import (
	"io"
	"net"
	"os"
	"slices"
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

// Close ends both directions. Bytes that were written before still arrive, followed by the end.
func (c *conn) Close() error {
	c.in.leave()
	c.out.close()
	n := c.host.net
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.conns, c)
	delete(n.pipes, c.in)
	return nil
}

// CloseWrite ends the direction to the other side, which can still answer.
func (c *conn) CloseWrite() error { c.out.close(); return nil }

func (c *conn) SetDeadline(t time.Time) error     { return c.SetReadDeadline(t) }
func (c *conn) SetReadDeadline(t time.Time) error { c.in.setDeadline(t); return nil }

// SetWriteDeadline does nothing: a write never blocks.
func (c *conn) SetWriteDeadline(time.Time) error { return nil }

// pipe is one direction of a connection. Its buffer is unlimited. A reader waits until data or the end has
// arrived, or until its deadline.
type pipe struct {
	delay func() time.Duration // delay of the next write; nil: no delay

	mu       sync.Mutex
	changed  *sync.Cond
	chunks   []chunk
	back     *pipe
	closed   bool // by the writer
	unknown  bool // the reader's host was restarted, and does not know the connection
	left     bool // by the reader
	frozen   bool // data on its way and all later data is dropped
	held     int  // number of present reasons why nothing arrives, not even the end
	deadline time.Time
	timer    *time.Timer
}

// chunk is the data of one write or, without data, the end.
type chunk struct {
	data    []byte
	arrives time.Time
}

func newPipe(held int, delay func() time.Duration) *pipe {
	p := &pipe{held: held, delay: delay}
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
		case p.left:
			return 0, io.EOF
		case p.arrived():
			if p.chunks[0].data == nil {
				return 0, io.EOF
			}
			n := copy(to, p.chunks[0].data)
			if p.chunks[0].data = p.chunks[0].data[n:]; len(p.chunks[0].data) == 0 {
				p.chunks = p.chunks[1:]
			}
			return n, nil
		}
		p.changed.Wait()
	}
}

// arrived reports whether there is data or the end to read. If a chunk is still on its way, a timer wakes the
// reader when it arrives.
func (p *pipe) arrived() bool {
	if len(p.chunks) == 0 || p.held > 0 {
		return false
	}
	wait := time.Until(p.chunks[0].arrives)
	if wait > 0 {
		time.AfterFunc(wait, func() { p.change(func() {}) })
	}
	return wait <= 0
}

// write succeeds after the reader has closed its end, as if the data were still on its way: the writer learns
// of the end by reading. With an error, gRPC would retry until its reader sees the end, and in a synctest
// bubble no time passes meanwhile.
func (p *pipe) write(from []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.unknown {
		go p.back.reset()
	}
	if p.closed {
		return 0, io.ErrClosedPipe
	}
	if !p.frozen && !p.left && len(from) > 0 {
		p.send(slices.Clone(from))
	}
	return len(from), nil
}

// send queues a chunk. It arrives after the delay, and not before earlier chunks.
func (p *pipe) send(data []byte) {
	at := time.Now()
	if p.delay != nil {
		at = at.Add(p.delay())
		if n := len(p.chunks); n > 0 && at.Before(p.chunks[n-1].arrives) {
			at = p.chunks[n-1].arrives
		}
	}
	p.chunks = append(p.chunks, chunk{data, at})
	p.changed.Broadcast()
}

// close ends the pipe on the writer's side.
func (p *pipe) close() {
	p.change(func() {
		if !p.closed {
			p.closed = true
			p.send(nil)
		}
	})
}

// leave ends the pipe on the reader's side.
func (p *pipe) leave() { p.change(func() { p.left, p.chunks = true, nil }) }

func (p *pipe) freeze() {
	p.change(func() {
		p.frozen, p.chunks = true, nil
		if p.closed {
			p.send(nil)
		}
	})
}

// reset ends a connection that the other host does not know any more: on a real network the writer would get
// a TCP reset.
func (p *pipe) reset() {
	p.change(func() {
		if p.held >= off {
			p.held, p.chunks, p.closed = p.held-off, nil, true
			p.send(nil)
		}
	})
}

func (p *pipe) hold(by int) { p.change(func() { p.held += by }) }

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
