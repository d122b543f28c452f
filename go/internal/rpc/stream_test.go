package rpc

import (
	"context"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// text is a message of a stream.
type text string

func asText(s string) *text { return (*text)(&s) }

type textStream = Stream[text, text, string]

// wire is a stream whose two directions are functions.
type wire struct {
	grpc.BidiStreamingClient[text, text]
	send func(*text) error
	recv func() (*text, error)
}

func (w *wire) Send(m *text) error   { return w.send(m) }
func (w *wire) Recv() (*text, error) { return w.recv() }

func call(ctx context.Context, s *textStream, number uint64) (string, error) {
	return s.Call(ctx, number, func() *text { return asText("ask") }, asText("withdraw"))
}

// A server that shuts down sends its last answers first. A decision to commit must reach its caller, although
// the end of the stream follows at once.
func TestAnAnswerCountsThatCameBeforeTheEnd(t *testing.T) {
	for range 50 {
		asked := make(chan struct{})
		w := &wire{}
		s := NewStream[text, text, string](w, func() {})
		w.send = func(*text) error {
			close(asked)
			<-s.Ended
			return nil
		}
		received := 0
		w.recv = func() (*text, error) {
			<-asked
			if received++; received > 1 {
				return nil, io.EOF
			}
			return asText("yes"), nil
		}
		go s.Receive(func(m *text) error {
			s.Answer(1, string(*m), nil)
			return nil
		})
		answer, err := call(t.Context(), s, 1)
		require.NoError(t, err)
		assert.Equal(t, "yes", answer)
		<-s.Ended
		assert.Equal(t, codes.Unavailable, status.Code(s.Err()))
	}
}

// gRPC's Send blocks while a stopped process does not read. Each call still ends at its deadline, posts do
// not block, and a request for whose answer nobody waits any more is not sent.
func TestACallEndsInTimeAlthoughTheServerDoesNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		released := make(chan struct{})
		sent := map[text]int{}
		s := NewStream[text, text, string](&wire{send: func(m *text) error {
			<-released
			sent[*m]++
			return nil
		}}, func() {})
		for number := range uint64(200) {
			began := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			s.Post(asText("report"))
			_, err := call(ctx, s, number)
			require.Equal(t, codes.DeadlineExceeded, status.Code(err))
			require.Equal(t, time.Second, time.Since(began))
			cancel()
		}
		for s.Post(asText("report")) {
		}
		_, err := call(t.Context(), s, 1000)
		require.ErrorIs(t, err, ErrUnread)
		close(released)
		<-s.Flushed()
		assert.Zero(t, sent["ask"])
		assert.Equal(t, 200, sent["withdraw"])
	})
}

// A panic of the handler ends the stream, not the process; so does the client itself, with its reason.
func TestTheEndOfAStreamHasAReason(t *testing.T) {
	s := NewStream[text, text, string](&wire{recv: func() (*text, error) { return asText(""), nil }},
		func() {})
	require.NoError(t, s.Err())
	s.Receive(func(*text) error { panic("boom") })
	assert.True(t, s.Broken())
	require.ErrorContains(t, s.Err(), "boom")

	ctx, cancel := context.WithCancel(t.Context())
	s = NewStream[text, text, string](&wire{recv: func() (*text, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}}, cancel)
	go s.Receive(func(*text) error { return nil })
	s.End(ErrUnread)
	assert.Equal(t, ErrUnread, s.Err())
}

// A stream of a Pool that does not read delays the others for stuckTime, and then no more.
func TestAStuckStreamGetsAGoroutineOfItsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var pool Pool
		released := make(chan struct{})
		stuck, other := Sender{Pool: &pool}, Sender{Pool: &pool}
		stuck.Post(func() { <-released })
		for _, delay := range []time.Duration{stuckTime, 0, 0} {
			began := time.Now()
			<-other.Flushed()
			assert.Equal(t, delay, time.Since(began))
		}
		close(released)
		<-stuck.Flushed()
	})
}
