package ops

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"
)

// An op is one call in progress: Python starts it, waits outside of Go so that it can look for signals in
// between, and takes the result or cancels.
type op struct {
	cancel context.CancelFunc
	done   chan struct{}
	value  any // valid once done is closed, as err is
	err    error

	mu     sync.Mutex
	notify func() // called once, under mu, when the operation ends
}

// Start runs work on its own goroutine and returns the handle of the operation. A result that nobody
// takes is closed if it can be, so that a cancelled constructor leaves nothing behind.
func Start(timeout time.Duration, work func(context.Context) (any, error)) int64 {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	o := &op{done: make(chan struct{}), cancel: cancel}
	handle := Put(o)
	go func() {
		defer cancel()
		defer o.end()
		defer Guard(&o.err)
		value, err := work(ctx)
		if err != nil {
			value = nil // often a typed nil, which Close would take for an object
		}
		o.value, o.err = value, err
	}()
	return handle
}

func (o *op) end() {
	o.mu.Lock()
	defer o.mu.Unlock()
	close(o.done)
	if o.notify != nil {
		o.notify()
	}
}

// watch reports whether the operation has ended; if not, notify will be called when it does, unless another
// notify takes its place before.
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

// Take forgets the handle of an operation that has ended and returns its result; an error has a class. While
// the operation runs on, done is false, and notify will be called when it ends. Take never waits: a thread
// of Python's that waits inside of Go costs two more switches between threads.
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

// Cancel gives an operation up: notify is not called any more. It does not wait for the operation to end.
func Cancel(handle int64) {
	o, ok := Remove(handle).(*op)
	if !ok {
		return
	}
	o.watch(nil)
	o.cancel()
	go func() {
		<-o.done // work was asked to stop, and ends within its timeout at the latest
		Close(o.value)
	}()
}

// Close ends whatever v is, if it is something that can be ended.
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
