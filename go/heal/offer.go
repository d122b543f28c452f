package heal

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

// errRevoked is what a target hears when the source needed its memory back before there was a copy.
var errRevoked = errors.New("the source trains on, and there is no copy of its state")

var errEnded = errors.New("the source offers this state no longer")

var errChanged = errors.New("the state changed while it was offered: two readings of a block differ")

// Offer is memory that targets may read: the caller's own, or a copy that the caller has made of it.
//
// Each piece is in use while it is being sent. Revoke and End return when nobody uses the memory that they are about; a
// target that takes its piece too slowly is cut off.
type Offer struct {
	layout Layout

	mu      sync.Mutex
	changed sync.Cond
	own     [][]byte
	copies  [][]byte
	revoked bool
	ended   bool
	inUse   map[*connection]bool // true: of the caller's own memory

	crcs  []uint32
	known []bool
}

// NewOffer offers memory in blocks of this size; 0 chooses one.
func NewOffer(memory *Memory, blockSize int64) (*Offer, error) {
	layout, err := NewLayout(memory.Sizes(), blockSize)
	if err != nil {
		return nil, err
	}
	o := &Offer{
		layout: layout, own: memory.regions, copies: make([][]byte, len(memory.regions)), inUse: map[*connection]bool{},
		crcs: make([]uint32, layout.Blocks()), known: make([]bool, layout.Blocks()),
	}
	o.changed.L = &o.mu
	return o, nil
}

// BlockSize is the size of its blocks in bytes.
func (o *Offer) BlockSize() int64 { return o.layout.BlockSize }

// Copied says where a copy of a region is; from now on that is read.
func (o *Offer) Copied(index, address int64) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if index < 0 || index >= int64(len(o.own)) {
		return fmt.Errorf("region %d of %d", index, len(o.own))
	}
	copied, err := region(address, int64(len(o.own[index])))
	if err != nil {
		return err
	}
	o.copies[index] = copied
	return nil
}

// use appends the memory of a piece and keeps it from being taken back until done.
func (o *Offer) use(c *connection, piece []Span, memory [][]byte) ([][]byte, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended {
		return memory, errEnded
	}
	own := false
	for _, span := range piece {
		from := o.copies[span.Region]
		if from == nil {
			if o.revoked {
				return memory, errRevoked
			}
			own, from = true, o.own[span.Region]
		}
		memory = append(memory, from[span.Offset:span.Offset+span.Length])
	}
	o.inUse[c] = own
	return memory, nil
}

func (o *Offer) done(c *connection) {
	o.mu.Lock()
	delete(o.inUse, c)
	o.mu.Unlock()
	o.changed.Broadcast()
}

// Revoke takes the caller's own memory back; copies stay offered. Whoever uses it still after the grace is cut off. The
// result is false if somebody uses it even so after the timeout: the memory must not be changed then.
func (o *Offer) Revoke(grace, timeout time.Duration) bool {
	o.mu.Lock()
	o.revoked = true
	o.mu.Unlock()
	return o.wait(func(own bool) bool { return own }, grace, timeout)
}

// End takes everything back.
func (o *Offer) End(timeout time.Duration) bool {
	o.mu.Lock()
	o.ended = true
	o.mu.Unlock()
	return o.wait(func(bool) bool { return true }, 0, timeout)
}

// wait returns when no use is left that matters.
func (o *Offer) wait(matters func(own bool) bool, grace, timeout time.Duration) bool {
	cutAt, expired := time.Now().Add(grace), false
	wake := func(expire bool) func() {
		return func() {
			o.mu.Lock() // or a waiter that is about to wait would miss it
			expired = expired || expire
			o.mu.Unlock()
			o.changed.Broadcast()
		}
	}
	defer time.AfterFunc(grace, wake(false)).Stop()
	defer time.AfterFunc(timeout, wake(true)).Stop()
	o.mu.Lock()
	defer o.mu.Unlock()
	for {
		left := 0
		for c, own := range o.inUse {
			if matters(own) {
				left++
				if !time.Now().Before(cutAt) {
					c.cut()
				}
			}
		}
		if left == 0 || expired {
			return left == 0
		}
		o.changed.Wait()
	}
}

// note keeps the checksum of a block as it was read; a second reading must give the same.
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
