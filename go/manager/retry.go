package manager

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
)

// retry is the decision whether a failed request to the lighthouse is repeated.
type retry int

const (
	noRetry     retry = iota // no: the ranks get the error
	ifRefused                // yes; it counts as one of the QuorumRetries
	untilAnswer              // yes, until the ranks' deadline is near
)

// retryAfter decides by the error and by the number of requests of the round that the lighthouse has refused
// before. A restart of the lighthouse, or an interruption of the network, must not end the job: UNAVAILABLE
// is retried until the deadline. A lighthouse without a quorum answers DEADLINE_EXCEEDED with the reason
// shortly before the deadline; there is no time for another request then.
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
