package ops_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/pyapi/ops"
	"github.com/torchft/torchft/go/quorum"
)

type closer struct{ closed int }

func (c *closer) Shutdown() { c.closed++ }

func TestAnOperationIsTakenOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		before := ops.Count()
		op := ops.Start(time.Hour, func(context.Context) (any, error) {
			time.Sleep(time.Second)
			return "done", nil
		})
		first, second := 0, 0
		_, done, err := ops.Take(op, func() { first++ })
		require.NoError(t, err)
		require.False(t, done)
		_, done, _ = ops.Take(op, func() { second++ })
		require.False(t, done)

		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, []int{0, 1}, []int{first, second}, "the last notify is called, once")
		value, done, err := ops.Take(op, nil)
		require.NoError(t, err)
		require.True(t, done)
		require.Equal(t, "done", value)
		require.Equal(t, before, ops.Count())

		_, done, err = ops.Take(op, nil)
		require.True(t, done)
		require.EqualError(t, err, "R:no such operation")
	})
}

func TestAnOperationEndsAtItsTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		op := ops.Start(time.Second, func(ctx context.Context) (any, error) {
			<-ctx.Done()
			return nil, ops.As(ops.Timeout, ctx.Err())
		})
		time.Sleep(time.Second)
		synctest.Wait()
		_, done, err := ops.Take(op, nil)
		require.True(t, done)
		require.EqualError(t, err, "T:context deadline exceeded")
	})
}

// If a constructor is cancelled after it has created its object, the object is closed.
func TestCancelClosesAResultThatIsNotTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		before := ops.Count()
		made := &closer{}
		op := ops.Start(time.Hour, func(ctx context.Context) (any, error) {
			<-ctx.Done()
			return made, nil
		})
		_, done, _ := ops.Take(op, func() { t.Error("the operation was cancelled") })
		require.False(t, done)
		ops.Cancel(op)
		ops.Cancel(op)
		require.Equal(t, before, ops.Count())
		synctest.Wait()
		require.Equal(t, 1, made.closed)
	})
}

func TestCancelOfAFailedConstructorClosesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		op := ops.Start(time.Hour, func(context.Context) (any, error) {
			return (*closer)(nil), errors.New("no")
		})
		ops.Cancel(op)
		synctest.Wait()
	})
}

func TestAPanicIsAnErrorOfTheOperation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		op := ops.Start(time.Hour, func(context.Context) (any, error) { panic("oops") })
		synctest.Wait()
		_, done, err := ops.Take(op, nil)
		require.True(t, done)
		require.ErrorContains(t, err, "oops")
		require.True(t, strings.HasPrefix(err.Error(), string(ops.Runtime)), err)
	})
}

func TestErrorsHaveOneClass(t *testing.T) {
	guarded := func(f func() error) (err error) {
		defer ops.Guard(&err)
		return f()
	}
	cause := errors.New("cause")
	for name, test := range map[string]struct {
		err  error
		want string
	}{
		"none":      {nil, ""},
		"unclassed": {cause, "R:cause"},
		"classed":   {ops.As(ops.Timeout, cause), "T:cause"},
		"changed":   {ops.As(ops.Value, ops.As(ops.Timeout, cause)), "V:cause"},
	} {
		t.Run(name, func(t *testing.T) {
			err := guarded(func() error { return test.err })
			if test.want == "" {
				require.NoError(t, err)
				return
			}
			require.EqualError(t, err, test.want)
			require.ErrorIs(t, err, cause)
		})
	}
	require.ErrorContains(t, guarded(func() error { panic(fmt.Errorf("bad")) }), "panic")
	refused := rpc.Wrap("quorum", "m", wire.Refused(codes.FailedPrecondition, quorum.Ended, "it is over"))
	require.EqualError(t, guarded(func() error { return ops.CallFailed(refused) }),
		"R=ended:quorum call to m failed: it is over (FailedPrecondition)")
}

func TestHandles(t *testing.T) {
	before := ops.Count()
	handle := ops.Put("text")
	require.Positive(t, handle)
	value, err := ops.Get[string](handle)
	require.NoError(t, err)
	require.Equal(t, "text", value)

	_, err = ops.Get[int](handle)
	require.ErrorIs(t, err, ops.ErrClosed, "a handle of another kind")

	require.Equal(t, "text", ops.Remove(handle))
	require.Nil(t, ops.Remove(handle))
	_, err = ops.Get[string](handle)
	require.ErrorIs(t, err, ops.ErrClosed)
	require.Greater(t, ops.Put("next"), handle, "handles are never used twice")
	require.Equal(t, before+1, ops.Count())
}
