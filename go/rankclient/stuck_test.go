package rankclient

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/torchft/torchft/go/torchftpb"
)

// stuck is a stream to a server that reads nothing until it is released.
type stuck struct {
	grpc.BidiStreamingClient[torchftpb.RankRequest, torchftpb.RankResponse]
	released chan struct{}
}

func (s stuck) Send(*torchftpb.RankRequest) error {
	<-s.released
	return nil
}

// gRPC's Send blocks while a stopped process does not read. Each call still ends at its deadline, and reports do not block.
func TestACallEndsInTimeAlthoughTheServerDoesNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		wire := stuck{released: make(chan struct{})}
		defer close(wire.released)
		s := newSession(nil)
		defer s.cancel()
		stream := &clientStream{wire: wire, ended: make(chan struct{}), waiting: map[uint64]chan *torchftpb.RankResponse{}}
		s.stream.Store(stream)
		for range 200 {
			began := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			done := make(chan error, 1)
			go func() {
				s.ReportCount(Counted{Name: "divergences", Number: 1})
				_, err := stream.call(ctx, &torchftpb.RankRequest{})
				done <- err
			}()
			select {
			case err := <-done:
				require.Error(t, err)
			case <-time.After(time.Minute):
				require.Fail(t, "the call has not ended")
			}
			cancel()
			require.LessOrEqual(t, time.Since(began), time.Second)
		}
	})
}
