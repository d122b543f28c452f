package manager

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/round"
	"github.com/torchft/torchft/go/torchftpb"
)

const (
	// notifyTimeout bounds the call that notifies a member that it counts as failed. A later notice would hardly reach it in the same step.
	notifyTimeout = time.Second
	// mostNotified bounds the members that are notified at the same time, since each needs a socket: if most of a job fails, few
	// members are left to notify many. Live members answer within milliseconds.
	mostNotified = 32
)

// notifyFailed notifies a member that it counts as failed, in case it is alive and does not know that. It does not block.
func (s *Server) notifyFailed(a round.NotifyFailed) {
	rpc.Go(&s.tasks, s.log, "notify a failed member", func() {
		ctx, cancel := context.WithTimeout(s.ctx, notifyTimeout)
		defer cancel()
		err := s.notify(ctx, a)
		s.log.Debug("torchft: a member that counts as failed is notified", "member", a.Failed.ReplicaID, "error", err)
	})
}

// notify calls the member, once fewer than mostNotified others are being notified. If the member's process has ended, the connection
// is refused, and the member is not dialed again.
func (s *Server) notify(ctx context.Context, a round.NotifyFailed) error {
	select {
	case s.notifying <- struct{}{}:
		defer func() { <-s.notifying }()
	case <-ctx.Done():
		return ctx.Err()
	}
	conn, err := rpc.DialLater(s.cfg.Security, s.cfg.Network, "manager", a.Address)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	_, err = torchftpb.NewPeerServiceClient(conn).NotifyFailed(ctx, &torchftpb.MemberFailed{
		QuorumId: a.Failed.QuorumID, ReplicaId: a.Failed.ReplicaID, Reason: a.Failed.Reason,
	})
	return err
}

// peers serves torchft.PeerService.
type peers struct {
	torchftpb.UnimplementedPeerServiceServer
	server *Server
}

// NotifyFailed handles a forwarded report of the lighthouse that this group failed. A caller can make the group lose a step, as it can
// with a call of ShouldCommit. If the job has a token, only clients with the token can call.
func (p peers) NotifyFailed(_ context.Context, failed *torchftpb.MemberFailed) (*torchftpb.NotifyFailedResponse, error) {
	if own := p.server.cfg.ReplicaID; failed.GetReplicaId() != own {
		return nil, status.Errorf(codes.InvalidArgument, "replica_id is %q: this is the manager server of %s", failed.GetReplicaId(), own)
	}
	p.server.handleNotice(membership.Notice{
		Kind: membership.MemberFailed, QuorumID: failed.GetQuorumId(), ReplicaID: failed.GetReplicaId(), Reason: failed.GetReason(),
	})
	return &torchftpb.NotifyFailedResponse{}, nil
}
