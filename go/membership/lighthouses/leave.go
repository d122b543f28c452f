package lighthouses

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

// Finish makes Close report that the training is complete.
func (m *Member) Finish() { m.finished.Store(true) }

// Leave announces that the group has completed its last step, and returns when no peer needs its data of that step any more.
func (m *Member) Leave(ctx context.Context) error {
	for failed := 1; ; failed++ {
		err := m.leaveOnce(ctx)
		if !rpc.IsUnavailable(err) { // UNAVAILABLE is retried: if the lighthouse never gets this message, it counts the end of the group as a failure
			return err
		}
		if !rpc.Pause(ctx, failed) {
			return err
		}
	}
}

// leaveOnce returns UNAVAILABLE if another attempt may succeed.
func (m *Member) leaveOnce(ctx context.Context) error {
	stream, client, err := m.connect(ctx)
	if status.Code(err) == codes.Unimplemented {
		return nil // an upstream lighthouse does not know this message: it removes the group when its heartbeats end
	}
	if err != nil {
		return err
	}
	if !stream.Post(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Leaving{Leaving: true}, Step: m.step.Load()}) {
		return rpc.Wrap("leave", client.peer, rpc.ErrUnread)
	}
	select {
	case <-stream.free:
		return nil
	case <-stream.Ended:
		err = stream.Err()
	case <-ctx.Done():
		err = status.FromContextError(ctx.Err()).Err()
	}
	return rpc.Wrap("leave", client.peer, err)
}
