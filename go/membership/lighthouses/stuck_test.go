package lighthouses

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// stuck is a stream to a lighthouse that reads nothing until it is released.
type stuck struct {
	torchftpb.MemberService_AttendClient
	released chan struct{}
	sent     chan *torchftpb.MemberMessage
}

func (s stuck) Send(message *torchftpb.MemberMessage) error {
	<-s.released
	s.sent <- message
	return nil
}

func stuckStream() (*Member, *memberStream, stuck) {
	wire := stuck{released: make(chan struct{}), sent: make(chan *torchftpb.MemberMessage, 1000)}
	m := &Member{}
	stream := &memberStream{wire: wire, member: m, ended: make(chan struct{}), free: make(chan struct{}), waiting: map[uint64]chan asked{}}
	m.present.Store(stream)
	return m, stream, wire
}

// The lighthouse ignores a report of an incomplete group that arrives before the group's request is answered, and counts the group as
// failed if the report arrives after the answer. So an earlier report must not arrive after a later request.
func TestReportsAndRequestsAreSentInTheirOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, stream, wire := stuckStream()
		close(wire.released)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		m.Incomplete("rank 1 is disconnected")
		_, err := stream.ask(ctx, 1, quorum.Member{ReplicaID: "a"}, 0)
		require.Equal(t, codes.DeadlineExceeded, status.Code(err))
		synctest.Wait()
		require.Len(t, wire.sent, 3)
		assert.Equal(t, "rank 1 is disconnected", (<-wire.sent).GetIncomplete())
		assert.EqualValues(t, 1, (<-wire.sent).GetAsk().GetNumber())
		assert.EqualValues(t, 1, (<-wire.sent).GetWithdraw())
	})
}

// gRPC's Send blocks while a stopped process does not read. Each call still ends at its deadline.
func TestACallEndsInTimeAlthoughTheLighthouseDoesNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, stream, wire := stuckStream()
		defer close(wire.released)
		for number := range uint64(200) {
			began := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			done := make(chan error, 1)
			go func() {
				_, err := stream.ask(ctx, number+1, quorum.Member{ReplicaID: "a"}, 0)
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

// A quorum that has arrived is passed on at once, even if the member opens its next stream at that moment, which may take seconds.
func TestAQuorumDoesNotWaitForTheNextStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, stream, wire := stuckStream()
		close(wire.released)
		stream.client = &Client{peer: "a"}
		m.opening, m.stream = make(chan struct{}, 1), stream
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		done := make(chan error, 1)
		go func() {
			_, err := m.Quorum(ctx, quorum.Member{ReplicaID: "a"}, 0)
			done <- err
		}()
		synctest.Wait()
		m.opening <- struct{}{} // another call opens a stream
		stream.answer((<-wire.sent).GetAsk().GetNumber(), asked{quorum: &quorum.Quorum{ID: 1}})
		synctest.Wait()
		select {
		case err := <-done:
			require.NoError(t, err)
		default:
			require.Fail(t, "the quorum has not been passed on")
		}
	})
}

// After Leave the lighthouse has released the member already. The end, with Finished, is announced nevertheless before the connection closes.
func TestTheEndIsAnnouncedAfterALeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, stream, wire := stuckStream()
		stream.welcomed = make(chan struct{})
		close(stream.welcomed)
		close(stream.free)
		go func() {
			time.Sleep(farewellTime / 2)
			close(wire.released)
		}()
		m.Finish()
		m.announceEnd()
		require.Len(t, wire.sent, 1)
		assert.True(t, (<-wire.sent).GetFinished())
	})
}
