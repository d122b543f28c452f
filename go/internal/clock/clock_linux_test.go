package clock

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestTheClocksOfTheKernelCanBeRead(t *testing.T) {
	for _, id := range []int32{unix.CLOCK_BOOTTIME, unix.CLOCK_MONOTONIC} {
		before := read(id)
		require.Positive(t, before)
		require.GreaterOrEqual(t, read(id), before)
	}
	boot := read(unix.CLOCK_BOOTTIME)
	require.InDelta(t, boot-read(unix.CLOCK_MONOTONIC), suspended(), float64(time.Minute))
}

func TestNowGoesOnWhileTheHostIsSuspended(t *testing.T) {
	t.Cleanup(func() { fake.Store(nil) })
	asleep := Fake()
	require.Zero(t, Suspended())
	before := Now()
	asleep.Add(int64(time.Hour))
	require.Equal(t, time.Hour, Suspended())
	require.GreaterOrEqual(t, Now().Sub(before), time.Hour)
	Fake()
	require.Zero(t, Suspended(), "another test begins without the suspends of this one")
}
