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

	"github.com/torchft/torchft/go/internal/rpc"
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
	stream := newMemberStream(m, &Client{peer: "a"}, wire, func() {})
	m.stream.Store(stream)
	return m, stream, wire
}

// The lighthouse ignores a report of an incomplete group that arrives before the group's request is answered,
// and counts the group as failed if the report arrives after the answer. So an earlier report must not arrive
// after a later request.
func TestReportsAndRequestsAreSentInTheirOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, stream, wire := stuckStream()
		close(wire.released)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		m.Report(&torchftpb.MemberMessage{
			Message: &torchftpb.MemberMessage_Incomplete{Incomplete: "rank 1 is disconnected"},
		})
		_, err := stream.ask(ctx, 1, quorum.Member{ReplicaID: "a"}, 0)
		require.Equal(t, codes.DeadlineExceeded, status.Code(err))
		synctest.Wait()
		require.Len(t, wire.sent, 3)
		assert.Equal(t, "rank 1 is disconnected", (<-wire.sent).GetIncomplete())
		assert.EqualValues(t, 1, (<-wire.sent).GetAsk().GetNumber())
		assert.EqualValues(t, 1, (<-wire.sent).GetWithdraw())
	})
}

// A quorum that has arrived is passed on at once, even if the member opens its next stream at that moment,
// which may take seconds.
func TestAQuorumDoesNotWaitForTheNextStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, stream, wire := stuckStream()
		close(wire.released)
		m.opening = make(chan struct{}, 1)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		done := make(chan error, 1)
		go func() {
			_, err := m.Quorum(ctx, quorum.Member{ReplicaID: "a"}, 0)
			done <- err
		}()
		synctest.Wait()
		m.opening <- struct{}{} // another call opens a stream
		stream.Answer((<-wire.sent).GetAsk().GetNumber(), &quorum.Quorum{ID: 1}, nil)
		synctest.Wait()
		select {
		case err := <-done:
			require.NoError(t, err)
		default:
			require.Fail(t, "the quorum has not been passed on")
		}
	})
}

// After Leave the lighthouse has released the member already. The end, with Finished, is announced
// nevertheless before the connection closes.
func TestTheEndIsAnnouncedAfterALeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, stream, wire := stuckStream()
		close(stream.welcomed)
		close(stream.free)
		go func() {
			time.Sleep(rpc.FarewellTime / 2)
			close(wire.released)
		}()
		m.Finish(7)
		m.announceEnd()
		require.Len(t, wire.sent, 1)
		assert.True(t, (<-wire.sent).GetFinished())
	})
}
