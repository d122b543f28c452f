// Package rankclient is the client that a rank uses to call its group's manager server. A rank in the
// server's own process calls it directly (package local). Other ranks keep a stream open, their session.
package rankclient

import (
	"context"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/local"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

// Client is one rank's connection to a manager server. To a server in the same process it is direct, without
// a network. Calls may run at the same time. Each ends at its context's deadline.
type Client struct {
	peer string
	local.Calls

	// Trace is the trace context of the step, from its quorum on; nil unless the rank traces.
	Trace atomic.Pointer[string]

	closed context.Context
	end    context.CancelFunc
}

func newClient(peer string, calls local.Calls) *Client {
	c := &Client{peer: peer, Calls: calls}
	c.closed, c.end = context.WithCancel(context.Background())
	return c
}

// Dial connects to the manager server at addr, and retries until connectTimeout is over.
func Dial(ctx context.Context, addr string, connectTimeout time.Duration, with rpc.Dialing) (*Client, error) {
	peer := "manager at " + addr
	if calls := local.Connect(with.Network, addr); calls != nil {
		return newClient(peer, calls), nil
	}
	conn, err := rpc.Dial(ctx, with, "manager", addr, connectTimeout)
	if err != nil {
		return nil, err
	}
	return newClient(peer, newSession(conn)), nil
}

// Quorum waits until every rank of the group has asked and the lighthouse has answered.
func (c *Client) Quorum(
	ctx context.Context, req *torchftpb.ManagerQuorumRequest,
) (*torchftpb.ManagerQuorumResponse, error) {
	req.Traceparent = c.traceparent()
	return call(ctx, c, "quorum", c.Calls.Quorum, req)
}

// CheckpointMetadata returns the checkpoint address that a rank of the server's group announced last.
func (c *Client) CheckpointMetadata(ctx context.Context, groupRank int64) (string, error) {
	resp, err := call(ctx, c, "checkpoint_metadata", c.Calls.CheckpointMetadata,
		&torchftpb.CheckpointMetadataRequest{Rank: groupRank})
	return resp.GetCheckpointMetadata(), err
}

// ShouldCommit waits until every rank of the group has voted on the step.
func (c *Client) ShouldCommit(
	ctx context.Context, groupRank, step int64, vote bool,
) (*torchftpb.ShouldCommitResponse, error) {
	return call(ctx, c, "should_commit", c.Calls.ShouldCommit, &torchftpb.ShouldCommitRequest{
		GroupRank: groupRank, Step: step, ShouldCommit: vote, Traceparent: c.traceparent(),
	})
}

// Leave announces that the group has completed its last step, and waits until no peer needs its data.
func (c *Client) Leave(ctx context.Context) error {
	_, err := call(ctx, c, "leave", c.Calls.Leave, &torchftpb.LeaveRequest{})
	return err
}

// call makes a call, and names it in its error.
func call[Q, A any](
	ctx context.Context, c *Client, name string, do func(context.Context, *Q) (*A, error), request *Q,
) (*A, error) {
	if c.closed.Err() != nil {
		return nil, rpc.Wrap(name, c.peer, status.Error(codes.Canceled, "the client is closed"))
	}
	answer, err := do(ctx, request)
	return answer, rpc.Wrap(name, c.peer, err)
}

// Close ends the connection, with every call.
func (c *Client) Close() error {
	c.end()
	return c.Calls.Close()
}

// Closed returns a channel that is closed by Close.
func (c *Client) Closed() <-chan struct{} { return c.closed.Done() }

// traceparent returns the trace context of the step; empty if it is not traced.
func (c *Client) traceparent() string {
	if trace := c.Trace.Load(); trace != nil {
		return *trace
	}
	return ""
}
