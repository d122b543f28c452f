package manager

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
)

// retry is what follows a request to the lighthouse that failed.
type retry int

const (
	noRetry     retry = iota // its error is the ranks' answer
	ifRefused                // one of the QuorumRetries
	untilAnswer              // as often as it takes, until the ranks' deadline is near
)

// retryAfter decides by the error, and by how many requests of the round the lighthouse has refused before this one. A lighthouse that
// is away (it restarts, the network is cut) must not cost the job its life. One that answers is believed; it says shortly before the
// deadline why there is no quorum, and there is no time for another request then.
func retryAfter(err error, refused, quorumRetries int64) retry {
	switch {
	case status.Code(err) == codes.DeadlineExceeded:
		return noRetry
	case rpc.IsUnavailable(err):
		return untilAnswer
	case refused < quorumRetries:
		return ifRefused
	default:
		return noRetry
	}
}
