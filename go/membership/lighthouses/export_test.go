package lighthouses

import (
	"context"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
)

// There returns which of the given lighthouses answer, over connections that remain until the end of the test.
func There(ctx context.Context, network rpc.Network, addresses ...string) (there func(places ...int) quorum.Places, end func() error) {
	l := &lighthouses{addresses: addresses, options: []DialOption{WithNetwork(network)}, clients: make([]*Client, len(addresses))}
	return func(places ...int) quorum.Places { return l.there(ctx, places) }, l.close
}
