package ops

import (
	"context"
	"errors"
	"io"
	"time"
)

// An op is one call in progress: Python starts it, waits in slices so that it can look for signals in
// between, and takes the result or cancels.
type op struct {
	done   chan struct{}
	cancel context.CancelFunc
	value  any
	err    error
}

// Start runs work on its own goroutine and returns the handle of the operation. A result that nobody
// takes is closed if it can be, so that a cancelled constructor leaves nothing behind.
func Start(timeout time.Duration, work func(context.Context) (any, error)) int64 {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	o := &op{done: make(chan struct{}), cancel: cancel}
	handle := Put(o)
	go func() {
		defer cancel()
		defer close(o.done)
		defer Guard(&o.err)
		value, err := work(ctx)
		if err != nil {
			value = nil // often a typed nil, which Close would take for an object
		}
		o.value, o.err = value, err
	}()
	return handle
}

func (o *op) wait(slice time.Duration) bool {
	select {
	case <-o.done:
		return true
	default:
	}
	if slice <= 0 {
		return false
	}
	timer := time.NewTimer(slice)
	defer timer.Stop()
	select {
	case <-o.done:
		return true
	case <-timer.C:
		return false
	}
}

// Take waits up to slice and, once the operation has ended, forgets the handle and returns its result.
// done is false while it runs on. An error has a class.
func Take(handle int64, slice time.Duration) (value any, done bool, err error) {
	o, err := Get[*op](handle)
	if err != nil {
		return nil, true, As(Runtime, errors.New("no such operation"))
	}
	if !o.wait(slice) {
		return nil, false, nil
	}
	Remove(handle)
	return o.value, true, o.err
}

// Cancel gives an operation up. It does not wait for it to end.
func Cancel(handle int64) {
	o, ok := Remove(handle).(*op)
	if !ok {
		return
	}
	o.cancel()
	go func() {
		<-o.done // work was told to stop, and ends within its timeout at the latest
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
