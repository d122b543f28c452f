package manager

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// Membership is whom a manager asks who takes part in the next step. Today it is a lighthouse.
type Membership interface {
	// Quorum waits for a quorum with m in it. knownQuorumID is the last quorum of the member, 0 if none.
	Quorum(ctx context.Context, m quorum.Member, knownQuorumID int64) (*quorum.Quorum, error)
	// Heartbeat says that the replica is alive.
	Heartbeat(ctx context.Context, replicaID string) error
	// Close ends the connection, and every call with it.
	Close() error
}

// LighthouseClient is a connection to a lighthouse, ours or a published one. It comes back by itself when it broke.
type LighthouseClient struct {
	peer string
	conn *grpc.ClientConn
	stub torchftpb.LighthouseServiceClient
}

var _ Membership = (*LighthouseClient)(nil)

// DialLighthouse connects to the lighthouse at addr, trying again until connectTimeout is over.
func DialLighthouse(ctx context.Context, addr string, connectTimeout time.Duration, options ...DialOption) (*LighthouseClient, error) {
	conn, err := rpc.Dial(ctx, dialSettings(options).network, "lighthouse", addr, connectTimeout)
	if err != nil {
		return nil, err
	}
	return &LighthouseClient{
		peer: "lighthouse at " + addr,
		conn: conn,
		stub: torchftpb.NewLighthouseServiceClient(conn),
	}, nil
}

func (c *LighthouseClient) Quorum(ctx context.Context, m quorum.Member, knownQuorumID int64) (*quorum.Quorum, error) {
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	resp, err := c.stub.Quorum(ctx, &torchftpb.LighthouseQuorumRequest{Requester: rpc.MemberToProto(m), KnownQuorumId: knownQuorumID})
	if err != nil {
		return nil, rpc.Wrap("quorum", c.peer, err)
	}
	if resp.GetQuorum() == nil {
		return nil, rpc.Wrap("quorum", c.peer, status.Error(codes.Internal, "the answer has no quorum"))
	}
	return rpc.QuorumFromProto(resp.GetQuorum()), nil
}

func (c *LighthouseClient) Heartbeat(ctx context.Context, replicaID string) error {
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	_, err := c.stub.Heartbeat(ctx, &torchftpb.LighthouseHeartbeatRequest{ReplicaId: replicaID})
	return rpc.Wrap("heartbeat", c.peer, err)
}

func (c *LighthouseClient) Close() error { return c.conn.Close() }
