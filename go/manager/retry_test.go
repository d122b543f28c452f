package manager

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestRetryAfter(t *testing.T) {
	for _, row := range []struct {
		code     codes.Code
		refused  int64
		retries  int64
		expected retry
	}{
		{codes.Unavailable, 0, 0, untilAnswer},
		{codes.Unavailable, 5, 0, untilAnswer},
		{codes.DeadlineExceeded, 0, 3, noRetry},
		{codes.Internal, 0, 0, noRetry},
		{codes.Internal, 0, 1, ifRefused},
		{codes.Internal, 1, 1, noRetry},
		{codes.InvalidArgument, 2, 3, ifRefused},
		{codes.Unauthenticated, 0, 1, ifRefused},
		{codes.ResourceExhausted, 0, 0, noRetry},
		{codes.OK, 0, 0, noRetry}, // an error without a code
	} {
		err := errors.New("no code")
		if row.code != codes.OK {
			err = status.Error(row.code, "no")
		}
		assert.Equal(t, row.expected, retryAfter(err, row.refused, row.retries),
			"%s, %d refused, quorum_retries=%d", row.code, row.refused, row.retries)
	}
}
