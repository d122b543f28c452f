// Package rank is the client of one rank. It remembers the last request and answer, so that a step that changes nothing is
// cheap.
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
	// Change holds a value while a changed quorum has not been read.
	Change chan struct{}

	// Trace is the trace context of the step, from its quorum on; nil unless the rank traces.
	Trace atomic.Pointer[string]

	relay *relay.Relay // of other ranks; nil if this rank is none

	mu   sync.Mutex
	last *recovery.Result // of the last round
}

// New returns a client over a connection, which it owns, and owns the relay, nil if there is none.
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

// Address is that of this rank as a relay; empty if it is none.
func (c *Client) Address() string {
	if c.relay == nil {
		return ""
	}
	return c.relay.Address()
}

// Notify ends a wait of Change, with a value.
func (c *Client) Notify() {
	select {
	case c.Change <- struct{}{}:
	default: // one is waiting already
	}
}

// Below lets a call go on below the step, if that is traced.
func (c *Client) Below(ctx context.Context) context.Context {
	if parent := c.Trace.Load(); parent != nil {
		return tracing.Below(ctx, *parent)
	}
	return ctx
}

// Changed remembers a round's result and reports whether it asks for more than one more step.
func (c *Client) Changed(r recovery.Result) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.last
	c.last = &r
	return before == nil || r.Heal || len(r.RecoverDstReplicaRank) > 0 || len(r.HelpDstReplicaRank) > 0 || !before.SameButStep(&r)
}
