package heal

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// errRevoked is sent to a target if the source had to change its memory before there was a copy.
var errRevoked = errors.New("the source has resumed training, and has no copy of its state")

var errEnded = errors.New("the source no longer offers this state")

var errChanged = errors.New("the state changed while it was offered: two readings of a block differ")

// Offer is memory that targets may read: the caller's own, or a copy that the caller has made of it. Memory
// on a device is read from its copy only: a request waits until the part that it reads has been copied.
//
// Memory is in use while a piece of it is being sent. Revoke and End return when none of the memory that they
// take back is in use. A target that reads a piece too slowly is disconnected.
type Offer struct {
	layout Layout

	mu      sync.Mutex
	changed chan struct{} // closed and replaced when anything below has changed
	own     [][]byte
	copies  []partial
	away    map[int]int64 // as in Memory
	failed  error         // why copying from devices ended early
	state   offerState
	inUse   map[*connection]bool // true: the connection sends some of the caller's own memory

	crcs  []uint32
	known []bool
}

// offerState is the state of an Offer; it only increases.
type offerState int

const (
	offered offerState = iota // targets may read all of it
	revoked                   // targets may read copies only: the caller may change its own memory
	ended                     // targets may read nothing
)

// partial is a copy of which the first ready bytes are complete.
type partial struct {
	memory []byte
	ready  int64
}

// NewOffer offers memory in blocks of this size; if it is 0, a size is chosen.
func NewOffer(memory *Memory, blockSize int64) (*Offer, error) {
	layout, err := NewLayout(memory.Sizes(), blockSize)
	if err != nil {
		return nil, err
	}
	o := &Offer{
		layout: layout, own: memory.regions, copies: make([]partial, len(memory.regions)), away: memory.away,
		changed: make(chan struct{}), inUse: map[*connection]bool{},
		crcs: make([]uint32, layout.Blocks()), known: make([]bool, layout.Blocks()),
	}
	return o, nil
}

// BlockSize returns the size of the offer's blocks in bytes.
func (o *Offer) BlockSize() int64 { return o.layout.BlockSize }

// Copied announces a copy of a region, whose first `ready` bytes are read instead of the original ones.
func (o *Offer) Copied(index, address, ready int64) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if index < 0 || index >= int64(len(o.own)) {
		return fmt.Errorf("copy of region %d: the offer has %d regions", index, len(o.own))
	}
	copied, err := region(address, o.layout.sizes[index])
	if err != nil {
		return err
	}
	if ready < 0 || ready > int64(len(copied)) {
		return fmt.Errorf("copy of region %d: it has %d bytes, and the region has %d", index, ready,
			len(copied))
	}
	o.copies[index] = partial{copied, ready}
	o.wake()
	return nil
}

// CopyFailed announces that copying has failed. Requests that wait for a copy fail with the reason.
func (o *Offer) CopyFailed(reason string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.failed = fmt.Errorf("the source could not copy its state from the device: %s", reason)
	o.wake()
}

// wake wakes the connections that wait for a copy, and those that take memory back. The caller holds mu.
func (o *Offer) wake() {
	close(o.changed)
	o.changed = make(chan struct{})
}

// use appends the memory of a piece, which stays in use until done is called. If the piece is on a device,
// use waits for the copy, at most as long as a target may take for a piece.
func (o *Offer) use(c *connection, piece []Span, memory [][]byte) ([][]byte, error) {
	var expired <-chan time.Time
	for {
		got, changed, err := o.tryUse(c, piece, memory)
		if changed == nil {
			return got, err
		}
		if expired == nil {
			expired = time.After(c.server.timeout)
		}
		select {
		case <-changed:
		case <-c.ended:
			return memory, net.ErrClosed
		case <-expired:
			return memory, fmt.Errorf(
				"timed out: the source did not copy its state from the device within %v", c.server.timeout)
		}
	}
}

// tryUse is use without the wait: if the piece is not copied yet, it returns the channel to wait for.
func (o *Offer) tryUse(c *connection, piece []Span, memory [][]byte) ([][]byte, <-chan struct{}, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.state == ended {
		return memory, nil, errEnded
	}
	own := false
	for _, span := range piece {
		from, end := o.copies[span.Region], span.Offset+span.Length
		if end > from.ready {
			_, away := o.away[span.Region]
			switch {
			case away && o.failed != nil:
				return memory, nil, o.failed
			case o.state == revoked:
				return memory, nil, errRevoked
			case away:
				return memory, o.changed, nil
			}
			own, from.memory = true, o.own[span.Region]
		}
		memory = append(memory, from.memory[span.Offset:end])
	}
	o.inUse[c] = own
	return memory, nil, nil
}

func (o *Offer) done(c *connection) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.inUse, c)
	o.wake()
}

// Revoke takes the caller's own memory back; copies stay offered. Connections that still send it after the
// grace are closed. The result is false if the memory is in use even after the timeout: then the caller must
// not change it.
func (o *Offer) Revoke(grace, timeout time.Duration) bool {
	o.mu.Lock()
	o.state = max(o.state, revoked)
	o.wake()
	o.mu.Unlock()
	return o.wait(func(own bool) bool { return own }, grace, timeout)
}

// End takes all memory back, including copies. The result is the same as Revoke's.
func (o *Offer) End(timeout time.Duration) bool {
	o.mu.Lock()
	o.state = ended
	o.wake()
	o.mu.Unlock()
	return o.wait(func(bool) bool { return true }, 0, timeout)
}

// wait returns when the memory to be taken back is no longer in use, or the timeout has passed. After the
// grace it closes the connections.
func (o *Offer) wait(matters func(own bool) bool, grace, timeout time.Duration) bool {
	cut, expired := time.After(grace), time.After(timeout)
	for cuts := false; ; {
		o.mu.Lock()
		left, changed := 0, o.changed
		for c, own := range o.inUse {
			if matters(own) {
				left++
				if cuts {
					c.cut()
				}
			}
		}
		o.mu.Unlock()
		if left == 0 {
			return true
		}
		select {
		case <-changed:
		case <-cut:
			cuts = true
		case <-expired:
			return false
		}
	}
}

// note records the checksum of a block. A second reading must give the same one: otherwise the memory was
// changed while it was offered.
func (o *Offer) note(block int, crc uint32) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.known[block] && o.crcs[block] != crc {
		return errChanged
	}
	o.crcs[block], o.known[block] = crc, true
	return nil
}

func (o *Offer) sum(block int) (crc uint32, known bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.crcs[block], o.known[block]
}
