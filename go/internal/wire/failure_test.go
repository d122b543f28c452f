package wire_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/testmain"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
)

func TestMain(m *testing.M) { testmain.NoGoroutineIsLeft(m) }

func TestCodes(t *testing.T) {
	for kind, code := range map[round.Kind]codes.Code{
		round.KindInvalid: codes.InvalidArgument, round.KindTimeout: codes.DeadlineExceeded,
		round.KindAborted:     codes.Aborted,
		round.KindUnavailable: codes.Unavailable, round.KindInternal: codes.Internal,
		round.KindHeld: codes.DeadlineExceeded, round.KindUnneeded: codes.FailedPrecondition,
		round.KindEnded: codes.FailedPrecondition, round.KindPoisoned: codes.FailedPrecondition,
		round.Kind(99): codes.Internal,
	} {
		err := wire.ToStatus(round.Failure{Kind: kind, Reason: "why"})
		assert.Equal(t, code, status.Code(err))
		assert.Equal(t, kind == round.KindTimeout || kind == round.KindHeld, rpc.IsTimeout(err))
		sent := wire.FailureFromProto(wire.FailureToProto(rpc.Wrap("quorum", "x", err))) // over a stream
		if kind != 99 {
			assert.Equal(t, round.Failure{Kind: kind, Reason: "why"}, wire.FromError(err))
			assert.Equal(t, kind, wire.FromError(sent).Kind)
		}
		assert.Equal(t, wire.RefusalOf(err), wire.RefusalOf(sent))
		assert.Equal(t, kind >= round.KindHeld && kind != 99, wire.RefusalOf(err) != "", kind)
	}
	for _, err := range []error{
		context.DeadlineExceeded, context.Canceled, fmt.Errorf("x: %w", context.DeadlineExceeded),
		status.Error(codes.Canceled, "Timeout expired"),
		rpc.Wrap("quorum", "x", status.Error(codes.DeadlineExceeded, "")),
	} {
		assert.True(t, rpc.IsTimeout(err), "%v", err)
		assert.Equal(t, round.KindTimeout, wire.FromError(err).Kind)
	}
	assert.False(t, rpc.IsTimeout(nil))
	assert.Equal(t, round.KindInternal, wire.FromError(errors.New("odd")).Kind)
	assert.Equal(t, round.KindInternal, wire.FromError(status.Error(codes.PermissionDenied, "no")).Kind)
	misfit := wire.Refused(codes.InvalidArgument, quorum.Misfit, "another world_size")
	assert.Equal(t, round.Failure{Kind: round.KindInvalid, Reason: "another world_size"}, wire.FromError(misfit))
}
