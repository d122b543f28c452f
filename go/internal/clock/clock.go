// Package clock tells for how long the host was suspended. The monotonic clock of Go stands still meanwhile,
// on Linux, while other hosts continue.
//
// A process that may count as failed elsewhere must measure its own silence with Now. A process that judges
// the silence of others must not: while its own host is suspended, it could not hear them.
package clock

import (
	"sync/atomic"
	"time"
)

// fake replaces the kernel's clocks in tests.
var fake atomic.Pointer[atomic.Int64]

// Suspended returns for how long the host has been suspended since it booted. On other systems than Linux
// this is 0.
func Suspended() time.Duration {
	if f := fake.Load(); f != nil {
		return time.Duration(f.Load())
	}
	return suspended()
}

// Now returns a time that goes on while the host is suspended. It is comparable only with other results of
// Now: its wall clock reading is too late by the value of Suspended.
func Now() time.Time { return time.Now().Add(Suspended()) }

// Fake lets a test suspend the host of this process: Suspended returns the value of the result, in
// nanoseconds, until the next Fake.
func Fake() *atomic.Int64 {
	f := &atomic.Int64{}
	fake.Store(f)
	return f
}
