package ops

import (
	"context"
	"sync"
	"time"
)

// Numbers is how many numbers a call of something prepared can have.
const Numbers = 3

// Prepared is a call that lacks only its numbers. It returns the deadline of the work and the work, and does not wait.
type Prepared func(numbers [Numbers]int64) (time.Duration, func(context.Context) (any, error))

// Calls are calls in progress of what was prepared. K is how the caller knows them apart.
type Calls[K comparable] struct {
	end func(call K, value any, err error)

	mu     sync.Mutex
	cancel map[K]context.CancelFunc
}

// NewCalls returns a set of calls; each ends with one call of end, whose error has a class.
func NewCalls[K comparable](end func(call K, value any, err error)) *Calls[K] {
	return &Calls[K]{end: end, cancel: map[K]context.CancelFunc{}}
}

// Start runs what the handle stands for on a goroutine of its own.
func (c *Calls[K]) Start(call K, prepared int64, numbers [Numbers]int64) {
	do, err := Get[Prepared](prepared)
	if err != nil {
		c.end(call, nil, As(Runtime, err))
		return
	}
	timeout, work, err := prepare(do, numbers)
	if err != nil {
		c.end(call, nil, err)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	c.mu.Lock()
	c.cancel[call] = cancel
	c.mu.Unlock()
	go func() {
		value, err := guarded(ctx, work)
		c.mu.Lock()
		delete(c.cancel, call) // before the end: the caller may use the same key again
		c.mu.Unlock()
		cancel()
		c.end(call, value, err)
	}()
}

// Cancel cancels a call, if it has not ended; it then ends soon.
func (c *Calls[K]) Cancel(call K) {
	c.mu.Lock()
	cancel := c.cancel[call]
	c.mu.Unlock()
	if cancel != nil {
		cancel()
	}
}

// prepare runs on the one goroutine that starts every call: a panic must not end it.
func prepare(do Prepared, numbers [Numbers]int64) (timeout time.Duration, work func(context.Context) (any, error), err error) {
	defer Guard(&err)
	timeout, work = do(numbers)
	return timeout, work, nil
}

func guarded(ctx context.Context, work func(context.Context) (any, error)) (value any, err error) {
	defer Guard(&err)
	return work(ctx)
}
