package replica

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

// A lighthouse's name in Raft has its address and its instance.
func nameOf(address, instance string) string { return address + "#" + instance }

func addressOf[T ~string](name T) string {
	address, _, _ := strings.Cut(string(name), "#")
	return address
}

// layer is the raft.StreamLayer of a node: gRPC streams on the ports of the lighthouses, which begin with a
// handshake.
type layer struct {
	*rpc.Queue // of connections whose handshake has ended
	name       string
	dialer     *dialer
	cluster    func() string // the id of the node's cluster, empty if it knows none yet
	refused    func(peer string, err error)
	// Nothing is accepted before this time, a lease after the start: until then a leader may rely on what
	// this node confirmed before its restart, of which it knows nothing when another node asks for its vote.
	opens time.Time

	mu    sync.Mutex
	cut   bool // nothing is sent or received any more
	conns map[*conn]struct{}
}

// maxHello bounds the handshake of a stream, in bytes: its texts come into the log.
const maxHello = 4 << 10

var errCut = errors.New("this lighthouse takes no part in the cluster any more")

// named is the net.Addr of a lighthouse.
type named string

func (n named) Network() string { return "torchft" }
func (n named) String() string  { return string(n) }

// Close ends all connections, and Accept.
func (l *layer) Close() error {
	l.stop()
	return l.Queue.Close()
}

// stop ends all connections for good. When it returns, nothing is sent any more.
func (l *layer) stop() {
	l.mu.Lock()
	l.cut = true
	conns := l.conns
	l.conns = nil
	l.mu.Unlock()
	for conn := range conns {
		_ = conn.Conn.Close()
	}
}

func (l *layer) isCut() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cut
}

// conn is Raft's end of a stream: a pipe, whose other end carry copies to and from the stream.
type conn struct {
	net.Conn
	layer *layer
	end   func() // ends the stream
}

// open returns a connection over a stream that end ends, and the other end of its pipe.
func (l *layer) open(end func()) (*conn, net.Conn, error) {
	local, remote := net.Pipe()
	c := &conn{local, l, end}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		return nil, nil, errCut
	}
	l.conns[c] = struct{}{}
	return c, remote, nil
}

func (c *conn) Write(b []byte) (int, error) {
	if c.layer.isCut() {
		return 0, errCut
	}
	return c.Conn.Write(b)
}

// Read returns io.EOF when this end was closed: Raft logs other errors.
func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if errors.Is(err, io.ErrClosedPipe) {
		err = io.EOF
	}
	return n, err
}

func (c *conn) Close() error {
	c.layer.mu.Lock()
	delete(c.layer.conns, c)
	c.layer.mu.Unlock()
	c.end()
	return c.Conn.Close()
}

// carry copies the frames of a stream to a pipe, and the bytes of the pipe to the stream, until one of them
// ends. The stream has to be ended after that.
func carry(pipe net.Conn, stream interface {
	Send(*torchftpb.Frame) error
	Recv() (*torchftpb.Frame, error)
},
) {
	defer func() { _ = pipe.Close() }()
	go func() {
		defer func() { _ = pipe.Close() }()
		for {
			frame, err := stream.Recv()
			if err != nil {
				return
			}
			if _, err := pipe.Write(frame.GetData()); err != nil {
				return
			}
		}
	}()
	buffer := make([]byte, 32<<10)
	for {
		n, err := pipe.Read(buffer)
		if err != nil || stream.Send(&torchftpb.Frame{Data: buffer[:n]}) != nil {
			return
		}
	}
}

// Dial connects to the node with a name.
func (l *layer) Dial(name raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if l.isCut() {
		return nil, errCut
	}
	address := addressOf(name)
	stream, end, err := l.dialer.link(ctx, address,
		&torchftpb.Hello{Cluster: l.cluster(), From: l.name, To: string(name)})
	if err != nil {
		if status.Code(err) == codes.FailedPrecondition {
			l.refused(address, errors.New(rpc.Message(err)))
		}
		return nil, fmt.Errorf("connecting to the lighthouse %s: %w", address, err)
	}
	c, pipe, err := l.open(end)
	if err != nil {
		end()
		return nil, err
	}
	go func() {
		carry(pipe, stream)
		end()
	}()
	return c, nil
}

// accept answers the handshake of a stream, and serves it, until one of its ends is closed.
func (l *layer) accept(stream torchftpb.ClusterService_LinkServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	select {
	case <-time.After(time.Until(l.opens)):
	case <-l.Closed():
	case <-stream.Context().Done():
	}
	hello := first.GetHello()
	if size := proto.Size(hello); size > maxHello {
		return status.Errorf(codes.InvalidArgument, "a handshake of %d bytes is longer than %d", size,
			maxHello)
	}
	if err := l.check(hello); err != nil {
		if !errors.Is(err, errCut) { // leave has said why
			l.refused(addressOf(hello.GetFrom()), err)
		}
		return status.Error(codes.FailedPrecondition, err.Error())
	}
	if err := stream.Send(&torchftpb.Frame{}); err != nil {
		return err
	}
	c, pipe, err := l.open(func() {})
	if err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	go l.Put(c)
	carry(pipe, stream)
	return nil
}

func (l *layer) check(h *torchftpb.Hello) error {
	self, own := addressOf(l.name), l.cluster()
	switch to := h.GetTo(); {
	case l.isCut():
		return fmt.Errorf("%s: %w", self, errCut)
	case own == "":
		return fmt.Errorf("%s is in no cluster yet", self)
	case h.GetCluster() != own:
		return fmt.Errorf("%s is in the cluster %s, and %s in the cluster %s: one of them has the state "+
			"directory of another cluster", self, own, addressOf(h.GetFrom()), h.GetCluster())
	case addressOf(to) != self:
		return fmt.Errorf("the address of %s leads to the lighthouse %s: each needs an address of its own",
			addressOf(to), self)
	case to != l.name:
		return fmt.Errorf("%s has lost its state directory, or is another lighthouse with this address: "+
			"the leader replaces it", self)
	}
	return nil
}
