package manager

import (
	"cmp"
	"context"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// Membership is whom a manager asks who takes part in the next step. Today it is a lighthouse.
type Membership interface {
	// Quorum waits for a quorum with m in it. knownQuorumID is the last quorum of the member, 0 if none.
	Quorum(ctx context.Context, m quorum.Member, knownQuorumID int64) (*quorum.Quorum, error)
	// Attend says that the replica of the membership is alive, again and again, until that fails or ctx ends. It calls
	// reached whenever it was heard. interval is how often to say it to a lighthouse that does not know how itself.
	Attend(ctx context.Context, interval time.Duration, reached func()) error
	// Close ends the connection, and every call with it.
	Close() error
}

// LighthouseClient makes calls to a lighthouse, ours or an upstream one. Its connection comes back by itself when it broke.
type LighthouseClient struct {
	addr string
	peer string
	job  string
	conn *grpc.ClientConn
	stub torchftpb.LighthouseServiceClient
	of   int // lighthouses in the list of the member whose client it is; 0 if it is no member's

	// number is of the latest request. It begins at the clock, so that another client of the same replica_id that
	// comes later is not taken for an old one.
	number atomic.Uint64
}

// DialLighthouse connects to the lighthouse at addr, trying again until connectTimeout is over. Of a list of addresses,
// separated by commas, it is the first that is reached.
func DialLighthouse(ctx context.Context, addr string, connectTimeout time.Duration, options ...DialOption) (*LighthouseClient, error) {
	list, err := rpc.ParseAddresses("lighthouse address", addr)
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	end := time.Now().Add(connectTimeout)
	if len(list) == 1 {
		return dialOne(ctx, list[0], connectTimeout, options)
	}
	for {
		for _, one := range list {
			c, err := dialOne(ctx, one, max(1, min(attemptTimeout, time.Until(end))), options)
			switch {
			case err == nil:
				return c, nil
			case ctx.Err() != nil:
				return nil, err
			case time.Now().After(end):
				return nil, status.Errorf(codes.Unavailable, "could not connect to a lighthouse at %s: timed out after %s: %s", addr, connectTimeout, rpc.Message(err))
			}
		}
	}
}

func dialOne(ctx context.Context, addr string, connectTimeout time.Duration, options []DialOption) (*LighthouseClient, error) {
	d := dialSettings(options)
	if d.job == "" {
		d.job = cmp.Or(os.Getenv(rpc.JobEnv), rpc.DefaultJob)
	}
	if err := rpc.ValidateJob(rpc.JobEnv, d.job); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	conn, err := d.security.Dial(ctx, d.network, "lighthouse", addr, connectTimeout)
	if err != nil {
		return nil, err
	}
	c := &LighthouseClient{
		addr: addr,
		peer: "lighthouse at " + addr,
		job:  d.job,
		conn: conn,
		stub: torchftpb.NewLighthouseServiceClient(conn),
	}
	c.number.Store(uint64(time.Now().UnixNano()))
	return c, nil
}

// Quorum waits for a quorum with m in it. knownQuorumID is the last quorum of the member, 0 if none.
func (c *LighthouseClient) Quorum(ctx context.Context, m quorum.Member, knownQuorumID int64) (*quorum.Quorum, error) {
	return c.quorum(ctx, m, knownQuorumID, nil)
}

// quorum is Quorum, and shows the last quorum of the member: nil if it does not.
func (c *LighthouseClient) quorum(ctx context.Context, m quorum.Member, knownQuorumID int64, last *quorum.Quorum) (*quorum.Quorum, error) {
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	req := &torchftpb.LighthouseQuorumRequest{
		Requester:     rpc.MemberToProto(m),
		KnownQuorumId: knownQuorumID,
		RequestNumber: c.number.Add(1),
		Lighthouses:   uint32(c.of),
	}
	if last != nil {
		req.KnownQuorum = rpc.PastToProto(last.Past())
	}
	if err := rpc.CheckRequest(req, req.GetRequester()); err != nil {
		return nil, rpc.Wrap("quorum", c.peer, err)
	}
	resp, err := c.stub.Quorum(rpc.WithJob(ctx, c.job), req)
	if err != nil {
		return nil, rpc.Wrap("quorum", c.peer, err)
	}
	if resp.GetQuorum() == nil {
		return nil, rpc.Wrap("quorum", c.peer, status.Error(codes.Internal, "the answer has no quorum"))
	}
	return rpc.QuorumFromProto(resp.GetQuorum()), nil
}

// Heartbeat says that a replica is alive.
func (c *LighthouseClient) Heartbeat(ctx context.Context, replicaID string) error {
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	_, err := c.stub.Heartbeat(rpc.WithJob(ctx, c.job), &torchftpb.LighthouseHeartbeatRequest{ReplicaId: replicaID})
	return rpc.Wrap("heartbeat", c.peer, err)
}

// comesBack waits for a broken connection to be connected again, and reports whether that succeeded in time.
func (c *LighthouseClient) comesBack(ctx context.Context, until time.Time) bool {
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	if c == nil || ctx.Err() != nil {
		return false
	}
	// Many may have lost theirs at the same moment; and gRPC notices a little later than a stream does.
	select {
	case <-time.After(rpc.RetryBackoff.Wait(1, rand.Float64())):
	case <-ctx.Done():
		return false
	}
	for {
		state := c.conn.GetState()
		if state == connectivity.Ready {
			return true
		}
		c.conn.Connect()
		if !c.conn.WaitForStateChange(ctx, state) {
			return false
		}
	}
}

// Close ends the connection, and every call with it.
func (c *LighthouseClient) Close() error { return c.conn.Close() }
