package heal

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/torchft/torchft/go/internal/admission"
)

const (
	// maxConnections bounds the connections that have sent a hello with a valid secret, except leastOfGrant
	// of each grant: each target makes progress (one connection for blocks, one for checksums), however many
	// there are. The number of grants is bounded by that of the HTTP connections over which targets get them.
	maxConnections = 256
	leastOfGrant   = 2
	// When a target should connect again: there may be room after a transfer, and among those without a hello
	// after a moment.
	retryAfter        = 500 * time.Millisecond
	pendingRetryAfter = 50 * time.Millisecond
	helloTimeout      = 10 * time.Second
	// mostPending bounds the connections that have not sent their hello. A target sends its hello at once, so
	// its connection counts here only for a moment.
	mostPending  = 64
	pendingOfOne = 32 // from one address, which several targets may share (NAT)
)

// Server serves offers to targets that send the secret of a Grant.
type Server struct {
	listener net.Listener
	timeout  time.Duration
	limit    limiter

	background bool // serve with the lowest priority (priority_linux.go)
	most       int  // maxConnections, except in tests

	mu          sync.Mutex
	closed      bool
	grants      map[[secretSize]byte]*Grant
	connections map[*connection]bool
	known       int // number of connections with a grant
	running     sync.WaitGroup

	pending *admission.Pending
}

// Grant lets one target read an offer.
type Grant struct {
	server *Server
	offer  *Offer
	secret [secretSize]byte

	served atomic.Int64
	open   int  // number of its connections; server.mu guards it and steady
	steady bool // one of its connections has the flag steady
}

// Listen starts a server on every address of this host, on a free port. timeout is how long a target may take
// for one piece. bytesPerSecond bounds the rate to all targets together; 0: no bound. With inBackground, the
// serving threads have the lowest priority on this host. Threads that serve as an additional source always
// have it.
func Listen(timeout time.Duration, bytesPerSecond int64, inBackground bool) (*Server, error) {
	listener, err := net.Listen("tcp", ":0")
	if err != nil {
		return nil, err
	}
	s := &Server{
		listener: listener, timeout: timeout, background: inBackground,
		limit: limiter{bytesPerSecond: bytesPerSecond}, most: maxConnections,
		grants: map[[secretSize]byte]*Grant{}, connections: map[*connection]bool{},
		pending: admission.New(mostPending, pendingOfOne),
	}
	s.running.Add(1)
	go s.accept()
	return s, nil
}

// Port returns the port that the server listens on.
func (s *Server) Port() int64 { return int64(s.listener.Addr().(*net.TCPAddr).Port) }

// Grant creates a grant with a new secret for one target of an offer.
func (s *Server) Grant(o *Offer) *Grant {
	g := &Grant{server: s, offer: o}
	_, _ = rand.Read(g.secret[:]) // never fails
	s.mu.Lock()
	defer s.mu.Unlock()
	s.grants[g.secret] = g
	return g
}

// Secret returns the secret that the target has to send, in hexadecimal digits.
func (g *Grant) Secret() string { return hex.EncodeToString(g.secret[:]) }

// Served returns how many bytes were sent to the target.
func (g *Grant) Served() int64 { return g.served.Load() }

// Close revokes the secret and closes the target's connections.
func (g *Grant) Close() {
	g.server.mu.Lock()
	delete(g.server.grants, g.secret)
	var mine []*connection
	for c := range g.server.connections {
		if c.grant == g {
			mine = append(mine, c)
		}
	}
	g.server.mu.Unlock()
	for _, c := range mine {
		c.cut()
	}
}

// Close ends the server and every connection, and waits for them.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	for c := range s.connections {
		c.cut()
	}
	s.mu.Unlock()
	_ = s.listener.Close()
	s.running.Wait()
}

func (s *Server) accept() {
	defer s.running.Done()
	for failed := false; ; {
		conn, err := s.listener.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if !failed {
				slog.Warn("checkpoint server: a connection was not accepted", "error", err)
			}
			failed = true
			// For example, too many files are open: retry when some have been closed.
			time.Sleep(10 * time.Millisecond)
			continue
		}
		failed = false
		c := &connection{TCPConn: conn.(*net.TCPConn), server: s, ended: make(chan struct{})}
		_ = c.SetDeadline(time.Now().Add(helloTimeout))
		if !s.add(c) {
			c.cut()
			continue
		}
		go func() {
			defer s.running.Done()
			defer s.remove(c)
			if err := c.serve(); err != nil {
				peer := conn.RemoteAddr().String()
				slog.Debug("checkpoint server: connection ended", "peer", peer, "error", err)
			}
		}()
	}
}

func (s *Server) add(c *connection) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.connections[c] = true
	c.pending = s.pending.Add(c.RemoteAddr(), c.turnAway)
	s.running.Add(1)
	return true
}

func (s *Server) remove(c *connection) {
	c.cut()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.connections, c)
	c.pending.Remove()
	if c.grant != nil {
		s.known--
		c.grant.open--
	}
	if c.worked != nil {
		c.worked()
	}
	if c.steady {
		c.grant.steady = false
	}
}

var errBusy = errors.New("too many connections of targets are open")

// enter returns the grant for a secret, and counts the connection. The error is errEnded without such a
// grant, and errBusy if the connection has to come again. The first connection of each grant is steady, so
// that a background transfer makes progress even if no processor is ever idle.
func (s *Server) enter(c *connection, secret [secretSize]byte) (*Grant, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	grant := s.grants[secret]
	switch {
	case grant == nil:
		return nil, errEnded
	case !c.pending.Remove():
		return nil, net.ErrClosed // turned away meanwhile
	case s.known >= s.most && grant.open >= leastOfGrant:
		return nil, errBusy
	}
	s.known++
	grant.open++
	c.grant, c.worked = grant, Working()
	c.steady, grant.steady = !grant.steady, true
	return grant, nil
}

// connection is one stream to a target.
type connection struct {
	*net.TCPConn
	server     *Server
	pending    *admission.Conn
	grant      *Grant // server.mu guards grant, worked and steady
	worked     func() // the result of Working; nil before enter
	steady     bool   // in a background transfer: it keeps a small share of a busy processor (leastShare)
	additional bool   // this server is an additional source of the target

	once  sync.Once
	ended chan struct{} // closed by cut

	out    []byte // bytes that are not written yet
	memory [][]byte
	spans  []Span
}

// cut ends the connection at once, also in the middle of a read or write.
func (c *connection) cut() {
	c.once.Do(func() { close(c.ended) })
	abort(c.TCPConn)
}

// turnAway ends a connection for which there is no room before its hello. It does not block: this is the
// first answer on the connection, so the kernel has room for it.
func (c *connection) turnAway() {
	_, _ = c.Write(busy(pendingRetryAfter))
	c.once.Do(func() { close(c.ended) })
	_ = c.Close() // unlike cut, it lets the kernel send the answer
}

// busy is the answer to a target that has to connect again after a while.
func busy(after time.Duration) []byte {
	return response{statusBusy, uint32(after.Milliseconds()), 0}.append(nil)
}

func (c *connection) serve() (err error) {
	defer recovered(&err)
	var hello [helloSize]byte
	if _, err := io.ReadFull(c, hello[:]); err != nil {
		return err
	}
	if string(hello[:len(magic)]) != magic {
		return errors.New("the connection does not begin with the hello of a target")
	}
	grant, err := c.server.enter(c, [secretSize]byte(hello[len(magic):]))
	switch {
	case errors.Is(err, errEnded): // most likely the grant was closed, so the target gets that reason
		c.out = make([]byte, 0, 2*responseSize)
		return c.withdrawn(request{}, err)
	case errors.Is(err, errBusy):
		c.out = busy(retryAfter)
		return c.last(err)
	case err != nil:
		return err
	}
	c.out = make([]byte, 0, pieceSize+2*responseSize)
	// After the hello, not before: blocking reads occupy a thread, and unauthorized clients could open many
	// connections.
	letBlock(c.TCPConn)
	switch {
	case !c.server.background: // normal priority: the whole job may wait for this transfer
	case c.steady:
		leastShare()
	default:
		background()
	}
	var b [requestSize]byte
	for {
		// A target sends requests ahead of the answers. So if no request arrives within the timeout, the
		// target has failed, or has stopped reading.
		_ = c.SetDeadline(time.Now().Add(c.server.timeout))
		if _, err := io.ReadFull(c, b[:]); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := c.answer(grant, parseRequest(b[:])); err != nil {
			return err
		}
	}
}

func (c *connection) answer(g *Grant, r request) error {
	o := g.offer
	switch r.op {
	case opBlock, opEqual:
		if int64(r.block) >= int64(o.layout.Blocks()) {
			return fmt.Errorf("request for block %d: the offer has %d blocks", r.block, o.layout.Blocks())
		}
		if r.op == opEqual {
			// Only additional sources get opEqual, and the target does not depend on them: lowest priority.
			if !c.additional {
				c.additional = true
				background()
			}
			crc, err := c.check(o, int(r.block))
			if err != nil {
				return c.withdrawn(r, err)
			}
			if crc != r.expected {
				return c.reply(r, statusDiffer, nil)
			}
		}
		return c.send(g, r)
	case opSums:
		if int64(r.block)+int64(r.expected) > int64(o.layout.Blocks()) {
			return fmt.Errorf("request for the checksums of %d blocks from block %d: the offer has %d blocks",
				r.expected, r.block, o.layout.Blocks())
		}
		crcs := make([]uint32, r.expected)
		for i := range crcs {
			var err error
			if crcs[i], err = c.check(o, int(r.block)+i); err != nil {
				return c.withdrawn(r, err)
			}
		}
		return c.reply(r, statusOK, appendSums(nil, crcs))
	}
	return fmt.Errorf("unknown request: %d", r.op)
}

// check returns the checksum that a block had when it was first read.
func (c *connection) check(o *Offer, block int) (uint32, error) {
	if crc, known := o.sum(block); known {
		return crc, nil
	}
	crc := uint32(0)
	c.spans = o.layout.Spans(block, c.spans[:0])
	err := pieces(c.spans, pieceSize, func(piece []Span, _ int64) (err error) {
		if c.memory, err = o.use(c, piece, c.memory[:0]); err != nil {
			return err
		}
		defer o.done(c)
		for _, part := range c.memory {
			crc = updateChecksum(crc, part)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return crc, o.note(block, crc)
}

// send writes a block. An error after the header ends the connection, so the target sees that the announced
// block is incomplete.
func (c *connection) send(g *Grant, r request) error {
	o := g.offer
	length := o.layout.Length(int(r.block))
	// A checksum that was computed for another target is reused: if the memory has changed since, the
	// checksum does not match the data, and the target refuses the block.
	crc, known := o.sum(int(r.block))
	summing := r.flags&flagChecksum != 0 && !known
	c.out = response{statusOK, r.block, uint32(length)}.append(c.out[:0])
	c.spans = o.layout.Spans(int(r.block), c.spans[:0])
	begun := false
	err := pieces(c.spans, largestPiece(summing || c.server.limit.bytesPerSecond > 0),
		func(piece []Span, n int64) (err error) {
			if err := c.server.limit.wait(n, c.ended); err != nil {
				return err
			}
			if c.memory, err = o.use(c, piece, c.memory[:0]); err != nil {
				if begun { // the target would read the reason as bytes of the block
					return err
				}
				return c.withdrawn(r, err)
			}
			defer o.done(c)
			begun = true
			g.served.Add(n)
			if err := c.write(c.memory); err != nil {
				return err
			}
			// After the write: the kernel's copy is faster, and leaves the piece in the processor's cache.
			if summing {
				for _, part := range c.memory {
					crc = updateChecksum(crc, part)
				}
			}
			return nil
		})
	if err != nil {
		return err
	}
	if summing {
		if err := o.note(int(r.block), crc); err != nil {
			return err
		}
	}
	if r.flags&flagChecksum != 0 {
		c.out = appendSums(c.out, []uint32{crc})
	}
	return c.flush()
}

// write sends the content of out, and then parts. Small parts are collected in out, large ones are written
// without a copy.
func (c *connection) write(parts [][]byte) error {
	for _, part := range parts {
		if len(part) < packBelow && len(c.out)+len(part) <= cap(c.out) {
			c.out = append(c.out, part...)
			continue
		}
		if err := c.flush(); err != nil {
			return err
		}
		if err := c.put(part); err != nil {
			return err
		}
	}
	return nil
}

func (c *connection) flush() error {
	if len(c.out) == 0 {
		return nil
	}
	err := c.put(c.out)
	c.out = c.out[:0]
	return err
}

func (c *connection) put(b []byte) error {
	_ = c.SetWriteDeadline(time.Now().Add(c.server.timeout))
	_, err := c.Write(b)
	return err
}

func (c *connection) reply(r request, status uint32, body []byte) error {
	c.out = response{status, r.block, uint32(len(body))}.append(c.out[:0])
	if len(body) > 0 {
		c.out = append(c.out, body...)
		c.out = appendSums(c.out, []uint32{checksum(body)})
	}
	return c.flush()
}

// withdrawn sends the target the reason why the offer has ended.
func (c *connection) withdrawn(r request, reason error) error {
	_ = c.reply(r, statusWithdrawn, []byte(reason.Error()))
	return c.last(reason)
}

// last sends what is in out as the last answer on the connection, and returns the reason.
func (c *connection) last(reason error) error {
	_ = c.flush()
	// If requests are still unread, Close would send a reset, and the answer could get lost. So wait until
	// the target closes the connection.
	_ = c.CloseWrite()
	_ = c.SetDeadline(time.Now().Add(time.Second))
	_, _ = io.Copy(io.Discard, c)
	return reason
}

// limiter bounds the rate of sent bytes. The zero value has no bound.
type limiter struct {
	bytesPerSecond int64

	mu   sync.Mutex
	next time.Time // when the rate allows the next piece
}

// wait returns when the rate allows n more bytes, or with an error when ended is closed. With a low rate that
// many connections share, the wait can take hours; the end of the server must not be delayed by it.
func (l *limiter) wait(n int64, ended <-chan struct{}) error {
	if l.bytesPerSecond <= 0 {
		return nil
	}
	share := time.Duration(float64(n) / float64(l.bytesPerSecond) * float64(time.Second))
	l.mu.Lock()
	now := time.Now()
	if l.next.Before(now) {
		l.next = now
	}
	pause := l.next.Sub(now)
	l.next = l.next.Add(share)
	l.mu.Unlock()
	turn := time.NewTimer(pause)
	defer turn.Stop()
	select {
	case <-turn.C:
		return nil
	case <-ended:
		l.mu.Lock()
		l.next = l.next.Add(-share) // the next connection may send instead
		l.mu.Unlock()
		return net.ErrClosed
	}
}
