package wire

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/round"
)

// kinds is the one table between the failures of the machines and the status codes on the wire.
var kinds = map[round.Kind]codes.Code{
	round.KindInvalid:     codes.InvalidArgument,
	round.KindTimeout:     codes.DeadlineExceeded,
	round.KindAborted:     codes.Aborted,
	round.KindUnavailable: codes.Unavailable,
	round.KindInternal:    codes.Internal,
}

// ToStatus converts a failure to the error that a call returns.
func ToStatus(f round.Failure) error {
	code, known := kinds[f.Kind]
	if !known {
		code = codes.Internal
	}
	return status.Error(code, f.Reason)
}

// FromError converts the error of a call to a failure.
func FromError(err error) round.Failure {
	if rpc.IsTimeout(err) {
		return round.Failure{Kind: round.KindTimeout, Reason: rpc.Message(err)}
	}
	code := status.Code(err)
	for kind, c := range kinds {
		if c == code {
			return round.Failure{Kind: kind, Reason: rpc.Message(err)}
		}
	}
	return round.Failure{Kind: round.KindInternal, Reason: rpc.Message(err)}
}
