package lighthouses

import (
	"cmp"
	"context"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// Client makes unary calls to a lighthouse, ours or an upstream one. It reconnects by itself.
type Client struct {
	addr string
	peer string
	job  string
	conn *grpc.ClientConn
	stub torchftpb.LighthouseServiceClient
	of   int // length of the lighthouse list of the member that uses the client; 0 if none does

	// number is the number of the latest request: the lighthouse refuses requests with smaller ones, which
	// were delayed. It starts at the clock's nanoseconds, so that the requests of a later client with the
	// same replica_id have larger numbers.
	number atomic.Uint64
}

// Dial connects to the lighthouse at addr, and retries until connectTimeout is over. If addr is a list,
// separated by commas, it connects to the first lighthouse that it reaches. A file of addresses is read for
// each attempt, and may be missing until then.
func Dial(ctx context.Context, addr string, connectTimeout time.Duration, with rpc.Dialing) (*Client, error) {
	read := func() (list []string, err error) {
		if list, err = rpc.ParseAddresses("lighthouse address", addr); err != nil {
			err = status.Error(codes.InvalidArgument, err.Error())
		}
		return list, err
	}
	end := time.Now().Add(connectTimeout)
	list, err := read()
	if !filepath.IsAbs(addr) {
		if err != nil {
			return nil, err
		}
		if len(list) == 1 {
			return dialOne(ctx, list[0], connectTimeout, with)
		}
	}
	var last atomic.Value // the error of the last attempt, in words
	last.Store("the first attempt has not ended")
	defer rpc.LogLongWait("lighthouse", addr, connectTimeout, func() string { return last.Load().(string) })()
	for tried := 0; ; {
		var c *Client
		if list != nil { // else err says why the file has not been read: a scheduler moves the lighthouse
			c, err = dialOne(ctx, list[tried%len(list)], max(1, min(attemptTimeout, time.Until(end))), with)
			tried++
		}
		if err != nil {
			last.Store(rpc.Message(err))
		}
		invalid := status.Code(err) == codes.InvalidArgument
		switch {
		case err == nil:
			return c, nil
		case ctx.Err() != nil, invalid && tried == 1: // a setting is wrong, so that no attempt can succeed
			return nil, err
		case time.Now().After(end):
			return nil, status.Errorf(codes.Unavailable,
				"could not connect to a lighthouse at %s: timed out after %s: %s",
				addr, connectTimeout, rpc.Message(err))
		case invalid: // a file is being replaced: the first attempt has read all but that of the addresses
			select {
			case <-time.After(rpc.RetryBackoff.Most):
			case <-ctx.Done():
			}
		}
		if now, unread := read(); unread == nil || list == nil {
			list, err = now, unread
		}
	}
}

// dialOne connects to a lighthouse.
func dialOne(
	ctx context.Context, addr string, connectTimeout time.Duration, with rpc.Dialing,
) (*Client, error) {
	return newClient(addr, with, func() (*grpc.ClientConn, error) {
		return rpc.Dial(ctx, with, "lighthouse", addr, connectTimeout)
	})
}

// dialLater returns a client that connects with its first call.
func dialLater(addr string, with rpc.Dialing) (*Client, error) {
	return newClient(addr, with, func() (*grpc.ClientConn, error) {
		return rpc.DialLater(with, "lighthouse", addr)
	})
}

func newClient(addr string, with rpc.Dialing, dial func() (*grpc.ClientConn, error)) (*Client, error) {
	job := cmp.Or(with.Job, os.Getenv(rpc.JobEnv), rpc.DefaultJob)
	if err := rpc.ValidateJob(rpc.JobEnv, job); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	conn, err := dial()
	if err != nil {
		return nil, err
	}
	c := &Client{
		addr: addr,
		peer: "lighthouse at " + addr,
		job:  job,
		conn: conn,
		stub: torchftpb.NewLighthouseServiceClient(conn),
	}
	c.number.Store(uint64(time.Now().UnixNano()))
	return c, nil
}

// Quorum waits for a quorum with m in it. knownQuorumID is the last quorum of the member, 0 if none.
func (c *Client) Quorum(ctx context.Context, m quorum.Member, knownQuorumID int64) (*quorum.Quorum, error) {
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	req := &torchftpb.LighthouseQuorumRequest{
		Requester:     wire.MemberToProto(m),
		KnownQuorumId: knownQuorumID,
		RequestNumber: c.number.Add(1),
		Lighthouses:   uint32(c.of),
	}
	if err := wire.CheckRequest(req, req.GetRequester()); err != nil {
		return nil, rpc.Wrap("quorum", c.peer, err)
	}
	resp, err := c.stub.Quorum(rpc.WithJob(ctx, c.job), req)
	if err != nil {
		return nil, rpc.Wrap("quorum", c.peer, err)
	}
	if resp.GetQuorum() == nil {
		return nil, rpc.Wrap("quorum", c.peer, status.Error(codes.Internal, "the answer has no quorum"))
	}
	return wire.QuorumFromProto(resp.GetQuorum()), nil
}

// Heartbeat sends the lighthouse the heartbeat of a member.
func (c *Client) Heartbeat(ctx context.Context, replicaID string) error {
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	_, err := c.stub.Heartbeat(rpc.WithJob(ctx, c.job),
		&torchftpb.LighthouseHeartbeatRequest{ReplicaId: replicaID})
	return rpc.Wrap("heartbeat", c.peer, err)
}

// Close ends the connection, and every call with it.
func (c *Client) Close() error { return c.conn.Close() }
