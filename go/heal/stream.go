package heal

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"time"
)

const (
	dialTimeout = 5 * time.Second
	// ahead is how many requests are kept pending on a stream, so that the source always has the next one.
	ahead = 2
	// slowAfter is how long a block may take while streams of other sources are idle. After that, one of
	// these streams fetches the block.
	slowAfter = 2 * time.Second
	// lookEvery is the interval at which an incomplete read checks slowAfter and StallAfter.
	lookEvery = 500 * time.Millisecond
)

// stream fetches blocks from a source over one connection.
type stream struct {
	source  *source
	conn    *net.TCPConn
	unhook  func() bool // stops the hook that closes the connection when the transfer ends
	arrived int         // blocks

	pending []int // requested blocks, in the order of the requests
	scratch []byte
	spans   []Span
}

func (st *stream) open() error {
	if st.conn != nil {
		return nil
	}
	s := st.source
	dialer := net.Dialer{Timeout: dialTimeout}
	dialed, err := dialer.DialContext(s.fetch.ctx, "tcp", s.address)
	if err != nil {
		return err
	}
	conn := dialed.(*net.TCPConn)
	letBlock(conn)
	st.conn = conn
	st.unhook = context.AfterFunc(s.fetch.ctx, func() { abort(conn) })
	if st.scratch == nil {
		st.scratch = make([]byte, pieceSize)
	}
	return st.write(append([]byte(magic), s.secret...))
}

func (st *stream) close() {
	if st.conn != nil {
		st.unhook()
		_ = st.conn.Close()
		st.conn = nil
	}
	for _, block := range st.pending {
		st.source.fetch.queue.back(block, false)
	}
	st.pending = st.pending[:0]
}

func (st *stream) write(b []byte) error {
	_ = st.conn.SetWriteDeadline(time.Now().Add(st.source.fetch.settings.StallAfter))
	_, err := st.conn.Write(b)
	if err == nil {
		return nil
	}
	// A busy source closes the connection after its answer, which may still be unread.
	answer := st.scratch[:responseSize]
	if st.read(answer) == nil {
		if _, busy := parseResponse(answer); errors.As(busy, new(busyError)) {
			return busy
		}
	}
	return err
}

// read fills b, or fails after StallAfter.
func (st *stream) read(b []byte) error {
	_ = st.conn.SetReadDeadline(time.Now().Add(st.source.fetch.settings.StallAfter))
	_, err := readFull(st.conn, b)
	return err
}

// fill is like read, for a part of a block whose transfer began at a given time. It also fails if the block
// has taken longer than slowAfter and a stream of another source is idle, which then fetches the block.
func (st *stream) fill(b []byte, began time.Time) error {
	f := st.source.fetch
	last := time.Now() // when the last bytes arrived
	for before := len(b); len(b) > 0; {
		_ = st.conn.SetReadDeadline(time.Now().Add(lookEvery))
		n, err := readFull(st.conn, b)
		b = b[n:]
		switch {
		case err == nil:
		case !errors.Is(err, os.ErrDeadlineExceeded):
			return err
		case len(b) == before && time.Since(last) > f.settings.StallAfter:
			return err
		case time.Since(began) > slowAfter && f.queue.idle(st.source.role):
			return st.tooSlow()
		}
		if len(b) < before {
			before, last = len(b), time.Now()
		}
	}
	return nil
}

// fetch takes blocks from the queue until it is empty. An error leaves the connection unusable.
func (st *stream) fetch() error {
	f, s := st.source.fetch, st.source
	var sums []uint32
	if s.role != Assigned {
		var err error
		if sums, err = f.assignedSums(); err != nil {
			return err
		}
	}
	for {
		for len(st.pending) < ahead {
			// If no request is pending, wait: when another stream fails, its blocks return to the queue.
			block, ok := f.queue.take(s.role, len(st.pending) == 0)
			if !ok {
				break
			}
			st.pending = append(st.pending, block)
			if err := st.open(); err != nil {
				return err
			}
			if err := st.write(st.request(block, sums).append(nil)); err != nil {
				return err
			}
		}
		if len(st.pending) == 0 {
			return nil
		}
		if err := st.receive(st.pending[0], sums); err != nil {
			return err
		}
	}
}

func (st *stream) request(block int, sums []uint32) request {
	r := request{op: opBlock, block: uint32(block)}
	if !st.source.fetch.settings.Unchecked {
		r.flags |= flagChecksum
	}
	if st.source.role != Assigned {
		r.op, r.expected = opEqual, sums[block]
	}
	return r
}

// receive reads the answer to the oldest request. A block of an additional source must have the checksum that
// the assigned source has announced (sums): the checksum sent with the block only proves that it arrived
// unchanged.
func (st *stream) receive(block int, sums []uint32) error {
	f := st.source.fetch
	r, err := st.header(block)
	if err != nil {
		return err
	}
	if r.status == statusDiffer {
		st.pending = append(st.pending[:0], st.pending[1:]...)
		f.queue.back(block, true)
		return nil
	}
	if int64(r.length) != f.layout.Length(block) {
		return fmt.Errorf("block %d has %d bytes at the source and %d here", block, r.length,
			f.layout.Length(block))
	}
	crc, err := st.body(block)
	if err != nil {
		return err
	}
	st.pending = append(st.pending[:0], st.pending[1:]...)
	if !f.settings.Unchecked {
		sent, err := st.sum()
		bad := err == nil && st.source.role != Assigned && (sent != crc || crc != sums[block])
		if err != nil || bad || sent != crc {
			f.received.Add(-f.layout.Length(block))
			f.queue.back(block, bad)
		}
		switch {
		case err != nil:
			return err
		case bad: // the queue assigns it to the assigned source
			return st.source.gaveWrong(block)
		case sent != crc:
			if err := f.queue.wrong(block); err != nil {
				f.fail(fmt.Errorf("%s: %w", st.source.address, err))
				return err
			}
			return nil // the block is fetched again; the stream itself is intact
		}
	}
	st.arrived++
	f.arrived(block, crc)
	return nil
}

// header reads the header of a response and, if the offer was withdrawn, the reason.
func (st *stream) header(block int) (response, error) {
	b := st.scratch[:responseSize]
	if err := st.read(b); err != nil {
		return response{}, err
	}
	r, err := parseResponse(b)
	if err != nil {
		return r, err
	}
	switch {
	case r.status == statusWithdrawn:
		reason, err := st.text(r.length, 1000)
		if err != nil {
			return r, err
		}
		return r, st.source.end(withdrawnError{string(reason)})
	case r.block != uint32(block),
		r.status != statusOK && (r.status != statusDiffer || st.source.role == Assigned):
		return r, fmt.Errorf("answer %#x for block %d instead of %d: %w", r.status, r.block, block,
			errGarbled)
	}
	return r, nil
}

// body reads a block into memory. If it fails, its bytes are not counted as received.
func (st *stream) body(block int) (crc uint32, err error) {
	f, received := st.source.fetch, int64(0)
	defer func() {
		if err != nil {
			f.received.Add(-received)
		}
	}()
	checked, began := !f.settings.Unchecked, time.Now()
	st.spans = f.layout.Spans(block, st.spans[:0])
	for _, span := range st.spans {
		// Staging memory is reused, so its pages are mapped already.
		if memory := f.memory.regions[span.Region]; memory != nil {
			populate(memory[span.Offset : span.Offset+span.Length])
		}
	}
	err = pieces(st.spans, largestPiece(checked), func(piece []Span, length int64) error {
		target := st.scratch[:min(length, pieceSize)]
		if len(piece) == 1 {
			target = f.place(block, piece[0])
		}
		if err := st.fill(target, began); err != nil {
			return err
		}
		if checked {
			crc = updateChecksum(crc, target)
		}
		if len(piece) > 1 {
			for _, span := range piece {
				copy(f.place(block, span), target)
				target = target[span.Length:]
			}
		}
		received += length
		f.received.Add(length)
		return nil
	})
	return crc, err
}

// tooSlow ends the stream, so that its blocks return to the queue for idle streams. An additional source is
// not used any more. The stream to the assigned source reconnects: some blocks may be available only there.
func (st *stream) tooSlow() error {
	if st.source.role != Assigned {
		return st.source.end(slowError{})
	}
	return slowError{}
}

func (st *stream) sum() (uint32, error) {
	b := st.scratch[:4]
	if err := st.read(b); err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint32(b), nil
}

// text reads a checked body of at most limit bytes.
func (st *stream) text(length uint32, limit int64) ([]byte, error) {
	if int64(length) > limit {
		return nil, fmt.Errorf("an answer of %d bytes: %w", length, errGarbled)
	}
	body := make([]byte, length)
	if err := st.read(body); err != nil {
		return nil, err
	}
	sent, err := st.sum()
	if err != nil {
		return nil, err
	}
	if sent != checksum(body) {
		return nil, errGarbled
	}
	return body, nil
}

// ask sends a request whose answer is not a block.
func (st *stream) ask(r request, limit int64) ([]byte, error) {
	if err := st.open(); err != nil {
		return nil, err
	}
	if err := st.write(r.append(nil)); err != nil {
		return nil, err
	}
	answer, err := st.header(int(r.block))
	if err != nil {
		return nil, err
	}
	return st.text(answer.length, limit)
}
