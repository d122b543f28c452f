package rpc

import "time"

// Backoff is how long to wait before each next attempt: the wait doubles from First to Most.
type Backoff struct {
	First time.Duration
	Most  time.Duration
}

// RetryBackoff is for calls to a lighthouse that is away: quick enough that a restart of it costs a job less
// than a second, slow enough that thousands of groups do not hammer it.
var RetryBackoff = Backoff{First: 20 * time.Millisecond, Most: 500 * time.Millisecond}

// Wait is the pause after the given number of failed attempts. spread, in [0, 1), shortens it by up to
// half, so that groups that failed together do not come back together.
func (b Backoff) Wait(failed int, spread float64) time.Duration {
	wait := b.First
	for i := 1; i < failed && wait < b.Most; i++ {
		wait *= 2
	}
	return time.Duration(float64(min(wait, b.Most)) * (1 - spread/2))
}
