package ops

import (
	"context"
	"sync"
	"time"
)

// Numbers is how many numbers are passed at each start of a prepared call.
const Numbers = 3

// Prepared is a call whose other arguments are fixed. Given the numbers, it returns the timeout of the work and the work itself. It
// does not block.
type Prepared func(numbers [Numbers]int64) (time.Duration, func(context.Context) (any, error))

// Calls has the prepared calls in progress. The caller identifies each by a K.
type Calls[K comparable] struct {
	end func(call K, value any, err error)

	mu     sync.Mutex
	cancel map[K]context.CancelFunc
}

// NewCalls returns an empty set. end is called once for each call that ends; its error has a class (As).
func NewCalls[K comparable](end func(call K, value any, err error)) *Calls[K] {
	return &Calls[K]{end: end, cancel: map[K]context.CancelFunc{}}
}

// Start runs the prepared call with this handle on a new goroutine.
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
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cancel[call] = run(timeout, work, func(value any, err error) {
		c.mu.Lock()
		delete(c.cancel, call) // before the end: the caller may use the same key again
		c.mu.Unlock()
		c.end(call, value, err)
	})
}

// Cancel cancels a call that has not ended. Its end is still reported by a call of end.
func (c *Calls[K]) Cancel(call K) {
	c.mu.Lock()
	cancel := c.cancel[call]
	c.mu.Unlock()
	if cancel != nil {
		cancel()
	}
}

// prepare returns a panic as an error: it runs on the goroutine that starts all calls.
func prepare(do Prepared, numbers [Numbers]int64) (timeout time.Duration, work func(context.Context) (any, error), err error) {
	defer Guard(&err)
	timeout, work = do(numbers)
	return timeout, work, nil
}
