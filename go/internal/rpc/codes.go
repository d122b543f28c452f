package rpc

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// IsTimeout reports whether a call ended because its deadline had passed. Upstream servers answer an expired
// call with CANCELLED, so that counts too.
func IsTimeout(err error) bool {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return true
	}
	code := status.Code(err)
	return code == codes.DeadlineExceeded || code == codes.Canceled
}

// IsUnavailable reports whether the peer was not reached, is shutting down, or went away during the call.
func IsUnavailable(err error) bool { return status.Code(err) == codes.Unavailable }

// Message returns the text of an error without gRPC's "rpc error: code = …", and without the code that
// CallError adds: an error that quotes the message has its own code.
func Message(err error) string {
	call, ok := err.(*CallError) //nolint:errorlint // a wrapping error has its own text, which must be kept
	if ok {
		return call.message()
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var texts []string
		for _, one := range joined.Unwrap() {
			texts = append(texts, Message(one))
		}
		return strings.Join(texts, "; ")
	}
	if s, ok := status.FromError(err); ok {
		return plain(s.Message())
	}
	return err.Error()
}

// plain removes what gRPC writes around the reason why a connection failed: `connection error: desc =
// "transport: Error while dialing: …"`.
func plain(message string) string {
	quoted, is := strings.CutPrefix(message, "connection error: desc = ")
	reason, err := strconv.Unquote(quoted)
	if !is || err != nil {
		return message
	}
	return strings.TrimPrefix(strings.TrimPrefix(reason, "transport: "), "Error while dialing: ")
}

// CallError names the failed call and its server. IsTimeout and status.Code still find the status code in it.
type CallError struct {
	Call string // such as "quorum"
	Peer string // such as "manager at http://host:1234"
	Err  error
}

func (e *CallError) Error() string {
	return fmt.Sprintf("%s (%s)", e.message(), status.Code(e.Err))
}

func (e *CallError) message() string {
	outcome := "failed"
	if IsTimeout(e.Err) {
		outcome = "timed out" // callers look for these words
	}
	return fmt.Sprintf("%s call to %s %s: %s", e.Call, e.Peer, outcome, Message(e.Err))
}

func (e *CallError) Unwrap() error { return e.Err }

// Wrap returns a CallError, or nil if err is nil.
func Wrap(call, peer string, err error) error {
	if err == nil {
		return nil
	}
	return &CallError{Call: call, Peer: peer, Err: err}
}
