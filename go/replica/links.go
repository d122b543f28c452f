package replica

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

// Dialer are links over gRPC streams to the ports of the other lighthouses, with their TLS and token.
type Dialer struct {
	with rpc.Dialing

	mu    sync.Mutex
	conns map[string]*grpc.ClientConn // by address; nil after Close
}

func NewDialer(with rpc.Dialing) *Dialer {
	return &Dialer{with: with, conns: map[string]*grpc.ClientConn{}}
}

func (d *Dialer) client(address string) (torchftpb.ClusterServiceClient, error) {
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

// Dial opens a Link.
func (d *Dialer) Dial(ctx context.Context, address string) (net.Conn, error) {
	client, err := d.client(address)
	if err != nil {
		return nil, err
	}
	stream, cancel, err := rpc.OpenStream(ctx, context.WithoutCancel(ctx), client.Link)
	if err != nil {
		return nil, err
	}
	local, remote := net.Pipe()
	link := &link{Conn: local, cancel: cancel}
	go func() {
		err := receive(remote, stream)
		link.err.Store(&err)
		_ = remote.Close()
	}()
	go func() {
		send(remote, stream)
		cancel()
	}()
	return link, nil
}

// link is the local end of a stream.
type link struct {
	net.Conn
	cancel context.CancelFunc
	err    atomic.Pointer[error] // why the stream ended
}

func (l *link) Read(b []byte) (int, error) {
	n, err := l.Conn.Read(b)
	if errors.Is(err, io.EOF) {
		if why := l.err.Load(); why != nil && *why != nil {
			return n, *why
		}
	}
	return n, err
}

func (l *link) Close() error {
	l.cancel()
	return l.Conn.Close()
}

// receive copies the frames of a stream to a pipe until one of them ends.
func receive(to net.Conn, from interface {
	Recv() (*torchftpb.Frame, error)
},
) error {
	for {
		frame, err := from.Recv()
		if err != nil {
			return err
		}
		if _, err := to.Write(frame.GetData()); err != nil {
			return nil //nolint:nilerr // the local end was closed
		}
	}
}

// send copies the bytes of a pipe to a stream until one of them ends.
func send(from net.Conn, to interface{ Send(*torchftpb.Frame) error }) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil || to.Send(&torchftpb.Frame{Data: buffer[:n]}) != nil {
			return
		}
	}
}

// Identify asks a lighthouse for its identity. Without an answer the connection is closed, with its links:
// the next one does not wait until TCP sends the unacknowledged bytes again.
func (d *Dialer) Identify(ctx context.Context, address string) (Identity, error) {
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

func (d *Dialer) Close() {
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
	local, remote := net.Pipe()
	go s.node.Accept(local)
	go func() {
		_ = receive(remote, stream)
		_ = remote.Close()
	}()
	send(remote, stream)
	_ = remote.Close()
	return nil
}
