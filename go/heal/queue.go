package heal

import (
	"errors"
	"fmt"
	"slices"
	"sync"
)

// queue assigns blocks to streams, each block to one stream at a time.
type queue struct {
	mu      sync.Mutex
	changed sync.Cond

	todo         []int // blocks for any source; blocks that are held back (newQueue) are in neither list
	assigned     []int // blocks for the assigned source only
	left         int   // blocks that have not arrived
	out          int   // blocks that a stream is fetching
	sourceFailed bool  // the assigned source has failed
	closed       bool
	over         chan struct{} // closed when all blocks have arrived, or the queue is closed
	garbled      map[int]int   // by block: how often it arrived with a wrong checksum
	waiting      [roles]int    // streams with nothing to do
	crcs         []uint32
}

// newQueue returns a queue of all blocks except those that are held back until add is called for them.
func newQueue(blocks int, held func(block int) bool) *queue {
	q := &queue{left: blocks, over: make(chan struct{}), garbled: map[int]int{}, crcs: make([]uint32, blocks)}
	q.changed.L = &q.mu
	for block := blocks - 1; block >= 0; block-- {
		if !held(block) {
			q.todo = append(q.todo, block)
		}
	}
	return q
}

// add queues blocks that were held back, in their order and after all others.
func (q *queue) add(blocks []int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	slices.Reverse(blocks)
	q.todo = append(blocks, q.todo...)
	q.changed.Broadcast()
}

// stuck reports whether only the assigned source could deliver the remaining blocks, and it has failed.
func (q *queue) stuck() bool {
	return q.sourceFailed && q.out == 0 && len(q.todo) == 0 && len(q.assigned) > 0
}

// setSourceFailed records whether the assigned source has failed; failed is false when another source has
// been assigned.
func (q *queue) setSourceFailed(failed bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.sourceFailed = failed
	q.changed.Broadcast()
}

// take returns a block to fetch. If there is none and wait is true, take waits for one: the block of a failed
// fetch returns to the queue, and add queues blocks that were held back. ok is false once all blocks have
// arrived, or the queue is closed or stuck.
func (q *queue) take(role Role, wait bool) (block int, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		for _, from := range q.open(role) {
			if n := len(*from); n > 0 {
				block, *from = (*from)[n-1], (*from)[:n-1]
				q.out++
				return block, true
			}
		}
		if q.left == 0 || q.closed || !wait || q.stuck() {
			return 0, false
		}
		q.waiting[role]++
		q.changed.Wait()
		q.waiting[role]--
	}
}

// idle reports whether streams of sources of the other role wait for a block.
func (q *queue) idle(role Role) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.waiting[roles-1-role] > 0
}

// open returns the lists from which a source of this role takes blocks. The assigned source first takes the
// blocks that only it can deliver.
func (q *queue) open(role Role) []*[]int {
	if role == Assigned {
		return []*[]int{&q.assigned, &q.todo}
	}
	return []*[]int{&q.todo}
}

// back puts a block that did not arrive back into the queue.
func (q *queue) back(block int, onlyAssigned bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.out--
	if onlyAssigned {
		q.assigned = append(q.assigned, block)
	} else {
		q.todo = append(q.todo, block)
	}
	q.changed.Broadcast()
}

func (q *queue) arrived(block int, crc uint32) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.crcs[block] = crc
	q.left--
	q.out--
	if q.left == 0 && !q.closed {
		close(q.over)
	}
	if q.left == 0 || q.stuck() {
		q.changed.Broadcast()
	}
}

// wrong counts how often a block was garbled, and returns an error when it was garbled mostGarbled times.
func (q *queue) wrong(block int) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.garbled[block]++
	if q.garbled[block] >= mostGarbled {
		return fmt.Errorf(
			"block %d came with a wrong checksum %d times: the network or the source's memory is broken",
			block, mostGarbled)
	}
	return nil
}

func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.closed && q.left > 0 {
		close(q.over)
	}
	q.closed = true
	q.changed.Broadcast()
}

func (q *queue) complete() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.left == 0
}

var errIncomplete = errors.New("some blocks have not arrived")
