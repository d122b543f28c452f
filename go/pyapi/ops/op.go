package ops

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"
)

// op is one call in progress. Python starts it, waits for it outside of Go, where it can check for signals,
// and takes the result or cancels the call.
type op struct {
	cancel context.CancelFunc
	done   chan struct{}
	value  any // value and err are valid once done is closed
	err    error

	mu     sync.Mutex
	notify func() // called once, under mu, when the operation ends
}

// Start runs work on its own goroutine and returns the handle of the operation. A result that is not taken is
// closed if it has a Close, so that a cancelled constructor leaves nothing behind.
func Start(timeout time.Duration, work func(context.Context) (any, error)) int64 {
	o := &op{done: make(chan struct{})}
	handle := Put(o)
	o.cancel = Run(timeout, work, o.end)
	return handle
}

// Run runs work on a goroutine of its own, and passes its result, or its panic as an error, to end.
func Run(
	timeout time.Duration, work func(context.Context) (any, error), end func(value any, err error),
) context.CancelFunc {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	go func() {
		defer cancel()
		end(func() (value any, err error) {
			defer Guard(&err)
			return work(ctx)
		}())
	}()
	return cancel
}

func (o *op) end(value any, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err = err; err == nil {
		// otherwise the value may be a typed nil, which Close would treat as an object
		o.value = value
	}
	close(o.done)
	if o.notify != nil {
		o.notify()
	}
}

// watch reports whether the operation has ended. If not, notify will be called when it ends, unless it is
// replaced by another notify before.
func (o *op) watch(notify func()) (ended bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	select {
	case <-o.done:
		return true
	default:
		o.notify = notify
		return false
	}
}

// Take removes the handle of an operation that has ended, and returns its result; an error has a class. If
// the operation is still running, done is false, and notify will be called when it ends. Take never waits: if
// a Python thread waited inside of Go, that would cost two more thread switches.
func Take(handle int64, notify func()) (value any, done bool, err error) {
	o, err := Get[*op](handle)
	if err != nil {
		return nil, true, As(Runtime, errors.New("no such operation"))
	}
	if !o.watch(notify) {
		return nil, false, nil
	}
	Remove(handle)
	return o.value, true, o.err
}

// Cancel cancels an operation: notify is not called any more. It does not wait for the operation to end.
func Cancel(handle int64) {
	o, ok := Remove(handle).(*op)
	if !ok {
		return
	}
	o.watch(nil)
	o.Close()
}

// Close cancels the operation, and does not wait for its end.
func (o *op) Close() {
	o.cancel()
	go func() {
		<-o.done // the work's context is cancelled, and it ends within its timeout at the latest
		Close(o.value)
	}()
}

// Close closes v, if it has a method for that.
func Close(v any) {
	defer func() {
		if p := recover(); p != nil {
			_ = panicked(p)
		}
	}()
	switch t := v.(type) {
	case interface{ Shutdown() }:
		t.Shutdown()
	case interface{ Close() }:
		t.Close()
	case io.Closer:
		_ = t.Close()
	}
}
