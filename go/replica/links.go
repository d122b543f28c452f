package replica

import (
	"context"
	"net"

	"google.golang.org/grpc"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/rpc"
)

// Dialer are links over gRPC streams to the ports of the other lighthouses, with their TLS and token.
type Dialer struct{}

// NewDialer returns a Dialer. A nil network is TCP.
func NewDialer(security auth.Security, network rpc.Network) *Dialer { return &Dialer{} }

// Dial opens a Link.
func (d *Dialer) Dial(ctx context.Context, address string) (net.Conn, error) { return nil, errSkeleton }

// Identify asks a lighthouse for its identity.
func (d *Dialer) Identify(ctx context.Context, address string) (Identity, error) {
	return Identity{}, errSkeleton
}

// Close closes all connections.
func (d *Dialer) Close() {}

// Register serves a node on a gRPC server.
func Register(g grpc.ServiceRegistrar, n *Node) {}
