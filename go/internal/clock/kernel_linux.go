package clock

import (
	"time"

	"golang.org/x/sys/unix"
)

// suspended returns the difference between the two clocks of the kernel that differ only in this time.
func suspended() time.Duration { return read(unix.CLOCK_BOOTTIME) - read(unix.CLOCK_MONOTONIC) }

func read(id int32) time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(id, &t) // it fails only for an unknown clock
	return time.Duration(t.Nano())
}
