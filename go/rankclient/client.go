// Package rankclient is the client that a rank uses to call its group's manager server. A rank in the
// server's own process calls it directly (package local). Other ranks keep a stream open, their session.
package rankclient

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/torchft/torchft/go/internal/local"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/round"
)

// Request is a rank's request for the next quorum, Decision the outcome of a vote.
type (
	Request  = round.Request
	Decision = local.Decision
)

// Client is one rank's connection to a manager server. To a server in the same process it is direct, without
// a network. Calls may run at the same time. Each ends at its context's deadline.
type Client struct {
	peer string
	local.Calls

	// Change contains a value while a changed quorum has not been read (Notify).
	Change chan struct{}
	// Trace is the trace context of the step, from its quorum on; nil unless the rank traces.
	Trace atomic.Pointer[string]

	closed context.Context
	end    context.CancelFunc

	mu   sync.Mutex
	last *recovery.Result // result of the last round
}

func newClient(peer string, calls local.Calls) *Client {
	c := &Client{peer: peer, Calls: calls, Change: make(chan struct{}, 1)}
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
func (c *Client) Quorum(ctx context.Context, req Request) (recovery.Result, error) {
	r, err := c.Calls.Quorum(c.below(ctx), req)
	return r, rpc.Wrap("quorum", c.peer, err)
}

// CheckpointMetadata returns the checkpoint address that a rank of the server's group announced last.
func (c *Client) CheckpointMetadata(ctx context.Context, groupRank int64) (string, error) {
	metadata, err := c.Calls.CheckpointMetadata(ctx, groupRank)
	return metadata, rpc.Wrap("checkpoint_metadata", c.peer, err)
}

// ShouldCommit waits until every rank of the group has voted on the step: true if all votes are.
func (c *Client) ShouldCommit(ctx context.Context, groupRank, step int64, vote bool) (bool, error) {
	d, err := c.Vote(ctx, groupRank, step, vote)
	return d.Commit, err
}

// Vote does the same as ShouldCommit, and returns more.
func (c *Client) Vote(ctx context.Context, groupRank, step int64, vote bool) (Decision, error) {
	d, err := c.Calls.Vote(c.below(ctx), groupRank, step, vote)
	return d, rpc.Wrap("should_commit", c.peer, err)
}

// Leave announces that the group has completed its last step, and waits until no peer needs its data.
func (c *Client) Leave(ctx context.Context) error {
	return rpc.Wrap("leave", c.peer, c.Calls.Leave(ctx))
}

// Close ends the connection, with every call and every wait for Change.
func (c *Client) Close() error {
	c.end()
	return c.Calls.Close()
}

// Closed returns a channel that is closed by Close.
func (c *Client) Closed() <-chan struct{} { return c.closed.Done() }

// Notify puts a value into Change, unless there is one.
func (c *Client) Notify() {
	select {
	case c.Change <- struct{}{}:
	default:
	}
}

// Changed records a round's result, and reports whether it differs from the previous one in more than the
// step, or the group takes part in a heal.
func (c *Client) Changed(r recovery.Result) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.last
	c.last = &r
	return before == nil || r.Heal || len(r.RecoverDstReplicaRank) > 0 || len(r.HelpDstReplicaRank) > 0 ||
		!before.SameButStep(&r)
}

// below makes the spans of a call children of the step's span, if the step is traced.
func (c *Client) below(ctx context.Context) context.Context {
	if parent := c.Trace.Load(); parent != nil {
		return tracing.Below(ctx, *parent)
	}
	return ctx
}
