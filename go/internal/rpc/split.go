package rpc

import (
	"log/slog"
	"net"
	"sync"
	"time"
)

// preface is the beginning of every HTTP/2 connection, and so of every gRPC connection.
const preface = "PRI * HTTP/2.0"

// splitter passes the connections of one port to the gRPC server or to the HTTP/1.1 server, depending on
// their first bytes. It reads these on a separate goroutine for each connection, for at most sniffTimeout. So
// a silent connection delays no other one.
type splitter struct {
	lis        net.Listener
	grpc, http *Queue
	sniffing   sync.Map // the connections whose first bytes are awaited
}

func newSplitter(lis net.Listener) *splitter {
	return &splitter{lis: lis, grpc: NewQueue(lis.Addr()), http: NewQueue(lis.Addr())}
}

func (s *splitter) run(tasks *sync.WaitGroup, log *slog.Logger) {
	defer s.close()
	for failed := 0; ; {
		conn, err := s.lis.Accept()
		if err != nil {
			if s.closed() {
				return
			}
			// The process is out of descriptors, or the connection broke before it was accepted. Neither ends
			// the server: it tries again.
			failed++
			if failed == 1 {
				log.Warn("torchft: a connection was not accepted", "error", err)
			}
			select {
			case <-s.grpc.Closed():
				return
			case <-time.After(RetryBackoff.Wait(failed, 0)):
			}
			continue
		}
		failed = 0
		s.sniffing.Store(conn, nil)
		if s.closed() { // perhaps close has not seen this connection
			_ = conn.Close()
			return
		}
		Go(tasks, log, "sniff", func() { s.sniff(conn) })
	}
}

func (s *splitter) sniff(conn net.Conn) {
	// for writes, too: with TLS, the first read makes the handshake
	_ = conn.SetDeadline(time.Now().Add(sniffTimeout))
	start, isGRPC, err := readPreface(conn)
	_ = conn.SetDeadline(time.Time{})
	s.sniffing.Delete(conn)
	switch {
	case err != nil:
		_ = conn.Close()
	case isGRPC:
		s.grpc.Put(&prefixConn{Conn: conn, prefix: start})
	default:
		s.http.Put(&prefixConn{Conn: conn, prefix: start})
	}
}

// readPreface reads until the bytes are the preface or can no longer become it.
func readPreface(conn net.Conn) (start []byte, isGRPC bool, err error) {
	buf := make([]byte, len(preface))
	for n := 0; n < len(buf); {
		m, err := conn.Read(buf[n:])
		n += m
		if string(buf[:n]) != preface[:n] {
			return buf[:n], false, nil
		}
		if err != nil && n < len(buf) {
			return nil, false, err
		}
	}
	return buf, true, nil
}

func (s *splitter) closed() bool { return IsClosed(s.grpc.Closed()) }

func (s *splitter) close() {
	_ = s.grpc.Close() // first: see run
	_ = s.http.Close()
	_ = s.lis.Close()
	s.sniffing.Range(func(conn, _ any) bool {
		_ = conn.(net.Conn).Close()
		return true
	})
}

// Queue is a listener whose connections are passed to it by Put.
type Queue struct {
	addr  net.Addr
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func NewQueue(addr net.Addr) *Queue {
	return &Queue{addr: addr, conns: make(chan net.Conn), done: make(chan struct{})}
}

// Put passes a connection to Accept, and closes it if the listener is closed.
func (q *Queue) Put(conn net.Conn) {
	select {
	case q.conns <- conn:
	case <-q.done:
		_ = conn.Close()
	}
}

func (q *Queue) Accept() (net.Conn, error) {
	select {
	case conn := <-q.conns:
		return conn, nil
	case <-q.done:
		return nil, net.ErrClosed
	}
}

// Close ends Accept and Put.
func (q *Queue) Close() error {
	q.once.Do(func() { close(q.done) })
	return nil
}

// Closed returns a channel that is closed by Close.
func (q *Queue) Closed() <-chan struct{} { return q.done }

func (q *Queue) Addr() net.Addr { return q.addr }

// prefixConn is a connection whose first bytes have been read already: they are read from prefix again.
type prefixConn struct {
	net.Conn
	prefix []byte
}

func (c *prefixConn) Read(p []byte) (int, error) {
	if len(c.prefix) > 0 {
		n := copy(p, c.prefix)
		c.prefix = c.prefix[n:]
		return n, nil
	}
	return c.Conn.Read(p)
}
