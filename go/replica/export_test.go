package replica

import (
	"context"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

// Dialer has the connections of a node.
type Dialer struct{ dialer *dialer }

func NewDialer(with rpc.Dialing) Dialer { return Dialer{newDialer(with)} }

func (d Dialer) Identify(ctx context.Context, address string) (Identity, error) {
	return d.dialer.identify(ctx, address)
}

// Link returns the result of a handshake.
func (d Dialer) Link(ctx context.Context, address string, hello *torchftpb.Hello) error {
	_, end, err := d.dialer.link(ctx, address, hello)
	if err == nil {
		end()
	}
	return err
}

func (d Dialer) Close() { d.dialer.close() }

// Store is the disk of a node.
type Store = store

// With replaces the disk of the nodes that are opened with the settings.
func (c Config) With(open func(dir string) (Store, error)) Config {
	c.open = open
	return c
}

// OpenStore opens the disk that nodes have.
func OpenStore(c Config) func(dir string) (Store, error) {
	return func(dir string) (Store, error) { return openStore(dir, c.Logger) }
}

// Snapshot makes a snapshot now, if the node is in a cluster.
func (n *Node) Snapshot() error {
	n.mu.Lock()
	r := n.raft
	n.mu.Unlock()
	if r == nil {
		return nil
	}
	return r.Snapshot().Error()
}
