package replica

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/torchft/torchft/go/internal/rpc"
)

// A lighthouse's name in Raft has its address and its instance.
func nameOf(address, instance string) string { return address + "#" + instance }

func addressOf[T ~string](name T) string {
	address, _, _ := strings.Cut(string(name), "#")
	return address
}

// layer is the raft.StreamLayer of a node: connections that begin with a handshake.
type layer struct {
	*rpc.Queue // of connections whose handshake has ended
	name       string
	links      Links
	timeout    time.Duration
	cluster    func() string // the id of the node's cluster, empty if it knows none yet
	refused    func(peer string, err error)
	// Nothing is accepted before this time, a lease after the start: until then a leader may rely on what
	// this node confirmed before its restart, of which it knows nothing when another node asks for its vote.
	opens time.Time

	mu    sync.Mutex
	cut   bool // nothing is sent or received any more
	conns map[*layered]struct{}
}

type hello struct {
	Cluster string `json:"cluster"`
	From    string `json:"from"`
	To      string `json:"to"`
}

// maxHello bounds a message of the handshake.
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

// hold makes a connection one of the layer's.
func (l *layer) hold(conn net.Conn) (net.Conn, error) {
	held := &layered{Conn: conn, layer: l}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		_ = conn.Close()
		return nil, errCut
	}
	l.conns[held] = struct{}{}
	return held, nil
}

func (l *layer) isCut() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cut
}

// layered is a connection of a layer.
type layered struct {
	net.Conn
	layer *layer
}

func (c *layered) Write(b []byte) (int, error) {
	if c.layer.isCut() {
		return 0, errCut
	}
	return c.Conn.Write(b)
}

// Read returns io.EOF when this end was closed: Raft logs other errors.
func (c *layered) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if errors.Is(err, io.ErrClosedPipe) {
		err = io.EOF
	}
	return n, err
}

func (c *layered) Close() error {
	c.layer.mu.Lock()
	delete(c.layer.conns, c)
	c.layer.mu.Unlock()
	return c.Conn.Close()
}

// Dial connects to the node with a name.
func (l *layer) Dial(name raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if l.isCut() {
		return nil, errCut
	}
	conn, err := l.links.Dial(ctx, addressOf(name))
	if err != nil {
		return nil, err
	}
	_ = conn.SetDeadline(time.Now().Add(timeout))
	err = write(conn, hello{Cluster: l.cluster(), From: l.name, To: string(name)})
	var refusal string
	if err == nil {
		err = read(conn, &refusal)
	}
	if err == nil && refusal != "" {
		err = errors.New(refusal)
		l.refused(addressOf(name), err)
	}
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("connecting to the lighthouse %s: %w", addressOf(name), err)
	}
	_ = conn.SetDeadline(time.Time{})
	return l.hold(conn)
}

// accept answers the handshake of a connection, and passes it to Accept, or closes it if it is refused.
func (l *layer) accept(conn net.Conn) {
	_ = conn.SetDeadline(time.Now().Add(l.timeout))
	var h hello
	err := read(conn, &h)
	if err == nil {
		select {
		case <-time.After(time.Until(l.opens)):
		case <-l.Closed():
		}
		err = l.check(h)
		answer := ""
		if err != nil {
			answer = err.Error()
			if !errors.Is(err, errCut) { // leave has said why
				l.refused(addressOf(h.From), err)
			}
		}
		err = errors.Join(err, write(conn, answer))
	}
	if err != nil {
		_ = conn.Close()
		return
	}
	_ = conn.SetDeadline(time.Time{})
	if held, err := l.hold(conn); err == nil {
		l.Put(held)
	}
}

func (l *layer) check(h hello) error {
	self, own := addressOf(l.name), l.cluster()
	switch {
	case l.isCut():
		return fmt.Errorf("%s: %w", self, errCut)
	case own == "":
		return fmt.Errorf("%s is in no cluster yet", self)
	case h.Cluster != own:
		return fmt.Errorf("%s is in the cluster %s, and %s in the cluster %s: one of them has the state "+
			"directory of another cluster", self, own, addressOf(h.From), h.Cluster)
	case addressOf(h.To) != self:
		return fmt.Errorf("the address of %s leads to the lighthouse %s: each needs an address of its own",
			addressOf(h.To), self)
	case h.To != l.name:
		return fmt.Errorf("%s has lost its state directory, or is another lighthouse with this address: "+
			"the leader replaces it", self)
	}
	return nil
}

func write(to io.Writer, message any) error {
	text, err := json.Marshal(message)
	if err == nil {
		size := binary.BigEndian.AppendUint16(nil, uint16(len(text))) //nolint:gosec // all messages are short
		_, err = to.Write(append(size, text...))
	}
	return err
}

func read(from io.Reader, message any) error {
	var size [2]byte
	if _, err := io.ReadFull(from, size[:]); err != nil {
		return err
	}
	text := make([]byte, min(binary.BigEndian.Uint16(size[:]), maxHello))
	if _, err := io.ReadFull(from, text); err != nil {
		return err
	}
	return json.Unmarshal(text, message)
}
