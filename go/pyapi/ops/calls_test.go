package ops_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/pyapi/ops"
)

type ended struct {
	call  string
	value any
	err   string
}

// calls collects the ends of calls.
func calls(t *testing.T) (*ops.Calls[string], chan ended) {
	ends := make(chan ended, 10)
	t.Cleanup(func() { require.Empty(t, ends) })
	return ops.NewCalls(func(call string, value any, err error) {
		e := ended{call: call, value: value}
		if err != nil {
			e.err = err.Error()
		}
		ends <- e
	}), ends
}

func prepare(t *testing.T, timeout time.Duration, work func(context.Context, int64) (any, error)) int64 {
	handle := ops.Put(ops.Prepared(func(n [ops.Numbers]int64) (time.Duration, func(context.Context) (any, error)) {
		return timeout, func(ctx context.Context) (any, error) { return work(ctx, n[0]) }
	}))
	t.Cleanup(func() { ops.Remove(handle) })
	return handle
}

func untilDone(ctx context.Context, _ int64) (any, error) {
	<-ctx.Done()
	return nil, ops.As(ops.Timeout, ctx.Err())
}

func TestACallOfSomethingPrepared(t *testing.T) {
	started, ends := calls(t)
	double := prepare(t, time.Hour, func(_ context.Context, n int64) (any, error) { return 2 * n, nil })
	started.Start("a", double, [ops.Numbers]int64{21})
	require.Equal(t, ended{call: "a", value: int64(42)}, <-ends)
	started.Start("a", double, [ops.Numbers]int64{1})
	require.Equal(t, ended{call: "a", value: int64(2)}, <-ends, "a key is free again when its call has ended")
}

func TestACallThatFails(t *testing.T) {
	started, ends := calls(t)
	started.Start("stale", 1<<60, [ops.Numbers]int64{})
	require.Equal(t, ended{call: "stale", err: "R:this object is shut down"}, <-ends)

	started.Start("error", prepare(t, time.Hour, func(context.Context, int64) (any, error) { return nil, errors.New("no") }), [ops.Numbers]int64{})
	require.Equal(t, ended{call: "error", err: "R:no"}, <-ends)

	started.Start("panic", prepare(t, time.Hour, func(context.Context, int64) (any, error) { panic("boom") }), [ops.Numbers]int64{})
	require.Contains(t, (<-ends).err, "R:a bug in torchft's native library")
}

func TestACallEndsAtItsDeadlineOrWhenCanceled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		started, ends := calls(t)
		long := prepare(t, time.Second, untilDone)
		began := time.Now()
		started.Start("late", long, [ops.Numbers]int64{})
		require.Equal(t, ended{call: "late", err: "T:context deadline exceeded"}, <-ends)
		require.Equal(t, time.Second, time.Since(began))

		started.Start("canceled", long, [ops.Numbers]int64{})
		started.Cancel("canceled")
		require.Equal(t, ended{call: "canceled", err: "T:context canceled"}, <-ends)
		require.Equal(t, time.Second, time.Since(began))
		started.Cancel("canceled") // no effect
		started.Cancel("never begun")
	})
}

// One goroutine starts every call of the process: a panic in a call must not end it.
func TestAPanicBeforeACallBegins(t *testing.T) {
	started, ends := calls(t)
	bad := ops.Put(ops.Prepared(func([ops.Numbers]int64) (time.Duration, func(context.Context) (any, error)) { panic("boom") }))
	t.Cleanup(func() { ops.Remove(bad) })
	started.Start("bad", bad, [ops.Numbers]int64{})
	require.Contains(t, (<-ends).err, "R:a bug in torchft's native library (panic): boom")
}
