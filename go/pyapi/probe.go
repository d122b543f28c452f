package pyapi

import (
	"context"
	"fmt"
	"time"

	"github.com/torchft/torchft/go/pyapi/ops"
)

// ProbeStart is for the tests of the binding: it starts an operation that ends in a chosen way after a delay.
// outcome is "value", "panic", "panic-in-start" (before there is an operation), "nil-dereference" (a panic
// that starts as a signal), or the text of an error.
func ProbeStart(outcome string, delayUs, timeoutUs int64) (op int64, err error) {
	defer ops.Guard(&err)
	if outcome == "panic-in-start" {
		panic("probe")
	}
	return ops.Start(micros(timeoutUs), func(ctx context.Context) (any, error) {
		select {
		case <-time.After(micros(delayUs)):
		case <-ctx.Done():
			return nil, ops.As(ops.Timeout, ctx.Err())
		}
		switch outcome {
		case "value":
			return "value", nil
		case "panic":
			panic("probe")
		case "nil-dereference":
			var o *struct{ field string }
			return o.field, nil
		default:
			return nil, fmt.Errorf("probe: %s", outcome)
		}
	}), nil
}
