package wire

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
	"github.com/torchft/torchft/go/torchftpb"
)

// failed is a failure as the wire has it.
type failed struct {
	code    codes.Code
	refusal quorum.Refusal // of the lighthouse; empty: it is none
}

// kinds is the one table between the failures of the machines and those on the wire.
var kinds = map[round.Kind]failed{
	round.KindInvalid:     {code: codes.InvalidArgument},
	round.KindTimeout:     {code: codes.DeadlineExceeded},
	round.KindAborted:     {code: codes.Aborted},
	round.KindUnavailable: {code: codes.Unavailable},
	round.KindInternal:    {code: codes.Internal},
	round.KindHeld:        {codes.DeadlineExceeded, quorum.Held},
	round.KindUnneeded:    {codes.FailedPrecondition, quorum.Unneeded},
	round.KindEnded:       {codes.FailedPrecondition, quorum.Ended},
	round.KindPoisoned:    {codes.FailedPrecondition, quorum.Poisoned},
}

// ToStatus converts a failure to the error that a call returns.
func ToStatus(f round.Failure) error {
	to, known := kinds[f.Kind]
	if !known {
		to = kinds[round.KindInternal]
	}
	return Refused(to.code, to.refusal, f.Reason)
}

// FromError converts the error of a call to a failure.
func FromError(err error) round.Failure {
	is := failed{status.Code(err), RefusalOf(err)}
	if rpc.IsTimeout(err) {
		is.code = codes.DeadlineExceeded
	}
	found := round.KindInternal
	for kind, f := range kinds {
		if f == is {
			found = kind
			break
		}
		if f == (failed{code: is.code}) { // of other refusals the code alone is told
			found = kind
		}
	}
	return round.Failure{Kind: found, Reason: rpc.Message(err)}
}

// Refused returns an error whose detail is why the lighthouse gives no quorum. With an empty refusal it is
// another error.
func Refused(code codes.Code, refusal quorum.Refusal, reason string) error {
	s := status.New(code, reason)
	if refusal != "" {
		// it fails only for a text that is no UTF-8
		if detailed, err := s.WithDetails(&torchftpb.CallFailure{Refusal: string(refusal)}); err == nil {
			s = detailed
		}
	}
	return s.Err()
}

// RefusalOf is the inverse of Refused; empty for all other errors.
func RefusalOf(err error) quorum.Refusal {
	for _, detail := range status.Convert(err).Details() {
		if f, ok := detail.(*torchftpb.CallFailure); ok {
			return quorum.Refusal(f.GetRefusal())
		}
	}
	return ""
}

// FailureToProto converts the error of a call on a stream.
func FailureToProto(err error) *torchftpb.CallFailure {
	s := status.Convert(err)
	return &torchftpb.CallFailure{Code: uint32(s.Code()), Message: s.Message(),
		Refusal: string(RefusalOf(err))}
}

// FailureFromProto is its inverse.
func FailureFromProto(f *torchftpb.CallFailure) error {
	return Refused(codes.Code(f.GetCode()), quorum.Refusal(f.GetRefusal()), f.GetMessage())
}
