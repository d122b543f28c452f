package replica

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"

	"google.golang.org/grpc"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

// dialer has the connections to the ports of the other lighthouses, with their TLS and token.
type dialer struct {
	with rpc.Dialing

	mu    sync.Mutex
	conns map[string]*grpc.ClientConn // by address; nil after close
}

func newDialer(with rpc.Dialing) *dialer {
	return &dialer{with: with, conns: map[string]*grpc.ClientConn{}}
}

func (d *dialer) client(address string) (torchftpb.ClusterServiceClient, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.conns == nil {
		return nil, net.ErrClosed
	}
	conn := d.conns[address]
	if conn == nil {
		var err error
		if conn, err = rpc.DialLater(d.with, "lighthouse", address); err != nil {
			return nil, err
		}
		d.conns[address] = conn
	}
	return torchftpb.NewClusterServiceClient(conn), nil
}

// link opens a stream with a lighthouse that accepts the handshake. The caller ends it with end.
func (d *dialer) link(ctx context.Context, address string, hello *torchftpb.Hello) (
	stream torchftpb.ClusterService_LinkClient, end context.CancelFunc, err error,
) {
	client, err := d.client(address)
	if err != nil {
		return nil, nil, err
	}
	stream, end, err = rpc.OpenStream(ctx, context.WithoutCancel(ctx), client.Link)
	if err != nil {
		return nil, nil, err
	}
	inTime := context.AfterFunc(ctx, end)
	err = stream.Send(&torchftpb.Frame{Hello: hello})
	if err == nil || errors.Is(err, io.EOF) { // Recv returns why it has ended
		_, err = stream.Recv()
	}
	if !inTime() {
		err = errors.Join(err, ctx.Err())
	}
	if err != nil {
		end()
		return nil, nil, err
	}
	return stream, end, nil
}

// identify asks a lighthouse for its identity. Without an answer the connection is closed, with its links:
// the next one does not wait until TCP sends the unacknowledged bytes again.
func (d *dialer) identify(ctx context.Context, address string) (Identity, error) {
	client, err := d.client(address)
	if err != nil {
		return Identity{}, err
	}
	a, err := client.Identify(ctx, &torchftpb.IdentifyRequest{})
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		d.mu.Lock()
		defer d.mu.Unlock()
		if conn := d.conns[address]; conn != nil {
			delete(d.conns, address)
			_ = conn.Close()
		}
	}
	return Identity{Cluster: a.GetCluster(), Self: a.GetSelf(), Instance: a.GetInstance(), List: a.GetList()},
		err
}

func (d *dialer) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, conn := range d.conns {
		_ = conn.Close()
	}
	d.conns = nil
}

// Register serves a node on a gRPC server.
func Register(g grpc.ServiceRegistrar, n *Node) {
	torchftpb.RegisterClusterServiceServer(g, service{node: n})
}

type service struct {
	torchftpb.UnimplementedClusterServiceServer
	node *Node
}

func (s service) Identify(context.Context, *torchftpb.IdentifyRequest) (*torchftpb.IdentifyResponse, error) {
	id := s.node.Identity()
	return &torchftpb.IdentifyResponse{Cluster: id.Cluster, Self: id.Self, Instance: id.Instance,
		List: id.List}, nil
}

func (s service) Link(stream torchftpb.ClusterService_LinkServer) error {
	return s.node.layer.accept(stream)
}
