package rpc

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// OpenStream opens a stream within ctx. The stream itself lasts until life ends, or cancel is called.
func OpenStream[S any](
	ctx, life context.Context, open func(context.Context, ...grpc.CallOption) (S, error),
) (stream S, cancel context.CancelFunc, err error) {
	streaming, cancel := context.WithCancel(life)
	inTime := context.AfterFunc(ctx, cancel)
	stream, err = open(streaming)
	if !inTime() {
		err = status.FromContextError(ctx.Err()).Err()
	}
	if err != nil {
		cancel()
	}
	return stream, cancel, err
}

// Stream is a client's side of a stream, until its connection breaks. It sends requests Q, and receives
// messages M, some of which answer a request with an A.
type Stream[Q, M, A any] struct {
	Ended chan struct{} // closed when the stream has broken

	wire   grpc.BidiStreamingClient[Q, M]
	cancel context.CancelFunc
	err    error                 // why the stream has broken; valid once Ended is closed
	left   atomic.Pointer[error] // why this side has ended it; set before that
	sender Sender

	mu      sync.Mutex
	waiting map[uint64]chan answered[A] // by the number of the request
}

type answered[A any] struct {
	answer A
	err    error
}

// NewStream returns a Stream over an open one, which cancel ends. The caller calls Receive on another
// goroutine.
func NewStream[Q, M, A any](wire grpc.BidiStreamingClient[Q, M], cancel context.CancelFunc) *Stream[Q, M, A] {
	return &Stream[Q, M, A]{
		wire: wire, cancel: cancel, Ended: make(chan struct{}), waiting: map[uint64]chan answered[A]{},
	}
}

// Receive passes the messages of the server to handle until the stream breaks, or handle returns an error. An
// uncaught panic would end the training.
func (s *Stream[Q, M, A]) Receive(handle func(*M) error) {
	defer s.cancel()
	defer close(s.Ended)
	defer func() {
		if left := s.left.Load(); left != nil {
			s.err = *left
		} else if errors.Is(s.err, io.EOF) {
			s.err = status.Error(codes.Unavailable, "the server ended the stream")
		}
	}()
	defer Recovered(slog.Default(), "a stream", &s.err)
	for s.err == nil {
		var message *M
		if message, s.err = s.wire.Recv(); s.err == nil {
			s.err = handle(message)
		}
	}
}

// IsClosed reports whether a channel is closed, to which nothing is sent.
func IsClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Broken reports whether the stream has broken.
func (s *Stream[Q, M, A]) Broken() bool { return IsClosed(s.Ended) }

// Err returns why the stream has broken, nil while it is open.
func (s *Stream[Q, M, A]) Err() error {
	if !s.Broken() {
		return nil
	}
	return s.err
}

// End ends the stream, and returns when Receive has. Err returns why, unless the stream had broken before.
func (s *Stream[Q, M, A]) End(why error) {
	s.left.CompareAndSwap(nil, &why)
	s.cancel()
	<-s.Ended
}

// ErrUnread reports that a message was not queued.
var ErrUnread = status.Error(codes.Unavailable, "the server does not read the messages of this client")

// Post queues a message that is not answered, and does not block. It returns false if the server has not read
// the earlier ones.
func (s *Stream[Q, M, A]) Post(message *Q) bool {
	// fails only if the stream has broken: Err returns the error
	return s.sender.Post(func() { _ = s.wire.Send(message) })
}

// Flushed returns a channel that is closed when all messages queued so far have been sent.
func (s *Stream[Q, M, A]) Flushed() <-chan struct{} { return s.sender.Flushed() }

// Call sends a request with a number, and waits for Answer, until ctx ends or the stream breaks. request is
// called when the earlier messages have been sent, unless ctx has ended by then. If it ends before the
// answer, withdraw is sent.
func (s *Stream[Q, M, A]) Call(
	ctx context.Context, number uint64, request func() *Q, withdraw *Q,
) (answer A, err error) {
	waiter := make(chan answered[A], 1)
	s.mu.Lock()
	s.waiting[number] = waiter
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.waiting, number)
	}()
	queued := s.sender.Post(func() {
		if ctx.Err() == nil { // a vote for whose decision nobody waits must not count
			_ = s.wire.Send(request())
		}
	})
	if !queued {
		return answer, ErrUnread
	}
	select {
	case a := <-waiter:
		return a.answer, a.err
	case <-s.Ended:
		err = s.err
	case <-ctx.Done():
		err = status.FromContextError(ctx.Err()).Err()
	}
	select {
	case a := <-waiter: // it arrived just before the end of the stream or of the call
		return a.answer, a.err
	default:
	}
	if ctx.Err() != nil { // after the look at the answer: the server answers a cancelled call, too
		s.Post(withdraw)
	}
	return answer, err
}

// Answer ends the Call with this number, if it still waits.
func (s *Stream[Q, M, A]) Answer(number uint64, answer A, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if waiter := s.waiting[number]; waiter != nil {
		delete(s.waiting, number)
		waiter <- answered[A]{answer, err}
	}
}

// FarewellTime is how long the end of a client may wait until its last messages are sent.
const FarewellTime = 200 * time.Millisecond

// Pause waits before another attempt (RetryBackoff). It returns false if ctx has ended.
func Pause(ctx context.Context, failed int) bool {
	select {
	case <-time.After(RetryBackoff.Wait(failed, rand.Float64())):
		return true
	case <-ctx.Done():
		return false
	}
}
