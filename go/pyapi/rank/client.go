// Package rank is the client of one rank. It keeps the last request and answer, so that a step without a change is cheap.
package rank

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/rankclient"
	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/relay"
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

	relay *relay.Relay // the relay that this rank runs for others; nil if it runs none

	mu   sync.Mutex
	last *recovery.Result // result of the last round
}

// New returns a client that owns its connection and, unless it is nil, its relay.
func New(client *rankclient.Client, own *relay.Relay) *Client {
	return &Client{Client: client, relay: own, Closed: make(chan struct{}), Change: make(chan struct{}, 1)}
}

// Close ends the calls and the waits for a change. It is called once, by the handle's release.
func (c *Client) Close() error {
	close(c.Closed)
	err := c.Client.Close()
	if c.relay != nil {
		err = errors.Join(err, c.relay.Close())
	}
	return err
}

// Address returns the address of this rank's relay; empty if it runs none.
func (c *Client) Address() string {
	if c.relay == nil {
		return ""
	}
	return c.relay.Address()
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
