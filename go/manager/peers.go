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

// notifyTimeout is how long a member that counts as failed may take to be notified. A later notice would hardly find it in the same step.
const notifyTimeout = time.Second

// notifyFailed notifies a member that it counts as failed, if it lives and does not know. It does not wait.
func (s *Server) notifyFailed(a round.NotifyFailed) {
	rpc.Go(&s.tasks, s.log, "notify a failed member", func() {
		ctx, cancel := context.WithTimeout(s.ctx, notifyTimeout)
		defer cancel()
		conn, err := rpc.DialSecurely(ctx, s.cfg.Security, s.cfg.Network, "manager", a.Address, notifyTimeout)
		if err == nil {
			_, err = torchftpb.NewPeerServiceClient(conn).NotifyFailed(ctx, &torchftpb.MemberFailed{
				QuorumId: a.Failed.QuorumID, ReplicaId: a.Failed.ReplicaID, Reason: a.Failed.Reason,
			})
			_ = conn.Close()
		}
		s.log.Debug("torchft: a member that counts as failed is notified", "member", a.Failed.ReplicaID, "error", err)
	})
}

// peers serves torchft.PeerService.
type peers struct {
	torchftpb.UnimplementedPeerServiceServer
	server *Server
}

// NotifyFailed takes what the lighthouse reported about this group. Whoever calls can make the group lose a step, as with a vote; with a
// token only members of the job can.
func (p peers) NotifyFailed(_ context.Context, failed *torchftpb.MemberFailed) (*torchftpb.NotifyFailedResponse, error) {
	if own := p.server.cfg.ReplicaID; failed.GetReplicaId() != own {
		return nil, status.Errorf(codes.InvalidArgument, "replica_id is %q: this is the manager server of %s", failed.GetReplicaId(), own)
	}
	p.server.hear(membership.Notice{
		Kind: membership.MemberFailed, QuorumID: failed.GetQuorumId(), ReplicaID: failed.GetReplicaId(), Reason: failed.GetReason(),
	})
	return &torchftpb.NotifyFailedResponse{}, nil
}
