// Package rank is the client of one rank. It keeps the last request and answer, so that a step without a change is cheap.
package rank

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/rankclient"
	"github.com/torchft/torchft/go/recovery"
)

// Client is a rank's client, with its state between quorum rounds.
type Client struct {
	*rankclient.Client
	// Closed is closed by Close.
	Closed chan struct{}
	// Change contains a value while a changed quorum has not been read.
	Change chan struct{}

	// Trace is the trace context of the step, from its quorum on; nil unless the rank traces.
	Trace atomic.Pointer[string]

	mu   sync.Mutex
	last *recovery.Result // result of the last round
}

// New returns a client that owns its connection.
func New(client *rankclient.Client) *Client {
	return &Client{Client: client, Closed: make(chan struct{}), Change: make(chan struct{}, 1)}
}

// Close ends the calls and the waits for a change. It is called once, by the handle's release.
func (c *Client) Close() error {
	close(c.Closed)
	return c.Client.Close()
}

// Notify puts a value into Change, unless there is one.
func (c *Client) Notify() {
	select {
	case c.Change <- struct{}{}:
	default:
	}
}

// Below makes the spans of a call children of the step's span, if the step is traced.
func (c *Client) Below(ctx context.Context) context.Context {
	if parent := c.Trace.Load(); parent != nil {
		return tracing.Below(ctx, *parent)
	}
	return ctx
}

// Changed records a round's result, and reports whether it differs from the previous one in more than the step, or the group takes part
// in a heal.
func (c *Client) Changed(r recovery.Result) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.last
	c.last = &r
	return before == nil || r.Heal || len(r.RecoverDstReplicaRank) > 0 || len(r.HelpDstReplicaRank) > 0 || !before.SameButStep(&r)
}
