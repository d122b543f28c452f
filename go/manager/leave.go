package manager

import (
	"context"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

// Leaver is a Membership that can be told of an end that is no failure.
type Leaver interface {
	// Leave says that the group has ended its last step, and returns when nobody needs it any more: its peers have ended
	// that step, too. It may be called several times, at the same time.
	Leave(ctx context.Context) error
}

// Finisher is a Membership that can be told that the training has ended on purpose.
type Finisher interface {
	// Finish makes the end of the membership say so. A lighthouse that hears it of all groups forgets the job's past.
	Finish()
}

func (m *member) Finish() { m.finished.Store(true) }

// Finish is for a group whose training has ended on purpose, before Shutdown.
func (s *Server) Finish() {
	if finisher, ok := s.membership.(Finisher); ok {
		finisher.Finish()
	}
}

func (m *member) Leave(ctx context.Context) error {
	for failed := 1; ; failed++ {
		err := m.leaveOnce(ctx)
		if !rpc.IsUnavailable(err) { // there is no lighthouse for a moment: without its word the end would count as a failure
			return err
		}
		select {
		case <-time.After(rpc.RetryBackoff.Wait(failed, rand.Float64())):
		case <-ctx.Done():
			return err
		case <-m.ctx.Done():
			return err
		}
	}
}

// leaveOnce is UNAVAILABLE where another attempt may do.
func (m *member) leaveOnce(ctx context.Context) error {
	stream, client, _, err := m.connect(ctx)
	if status.Code(err) == codes.Unimplemented {
		return nil // an upstream lighthouse hears of it when the heartbeats end
	}
	if err != nil {
		return err
	}
	m.leaves(stream.place)
	stream.send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Leaving{Leaving: true}})
	select {
	case <-stream.free:
		return nil
	case <-stream.ended:
		err = stream.err
	case <-ctx.Done():
		err = status.FromContextError(ctx.Err()).Err()
	}
	return rpc.Wrap("leave", client.peer, err)
}

// leave lets the group go without being missed. Without a membership that can be told there is nothing to wait for.
func (s *Server) leave(ctx context.Context) error {
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	stop := context.AfterFunc(s.ctx, cancel)
	defer stop()
	if leaver, ok := s.membership.(Leaver); ok {
		return leaver.Leave(ctx)
	}
	return nil
}
