// Package fttest runs the production lighthouses, manager servers and clients within one test. They are
// connected in memory, and run on a fake clock if the test is in a bubble of testing/synctest.
package fttest

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/torchft/torchft/go/internal/rpc"
)

// OtherTCP is TCP by another name: a client does not find a server in its own process there.
var OtherTCP rpc.Network = struct{ rpc.Network }{rpc.TCP}

// Network connects hosts in memory. The string keys of its maps are names of hosts, except in listeners
// (addresses) and in paused (names of machines, see machineOf).
type Network struct {
	mu        sync.Mutex
	hosts     map[string]*Host
	listeners map[string]*listener
	killed    map[string]bool    // hosts that cannot dial since Kill
	conns     map[*conn]struct{} // both ends of each connection; an end is removed when it is closed
	blocked   map[[2]string]bool // pairs of hosts between which a dial gets no answer
	refused   map[[2]string]bool // pairs of hosts between which a dial is refused
	// the last port that was assigned to a listener on port 0; the next such listener gets the port after it
	nextPort int

	// The state that the methods in weather.go change: delays, cuts, pauses, and hosts without power.
	pipes  map[*pipe]direction
	cuts   map[direction]int
	paused map[string]int
	silent map[string]bool // hosts without power: a dial to them gets no answer, not even a refusal
	// closed and replaced when a cut ends or a silent host answers again: pending dials then check the
	// network
	healed chan struct{}
	delay  func(from, to string) time.Duration
}

// NewNetwork returns a network without hosts.
func NewNetwork() *Network {
	return &Network{
		hosts: map[string]*Host{}, listeners: map[string]*listener{}, conns: map[*conn]struct{}{},
		blocked: map[[2]string]bool{}, nextPort: 40000,
		pipes: map[*pipe]direction{}, cuts: map[direction]int{}, paused: map[string]int{},
		silent: map[string]bool{},
		healed: make(chan struct{}),
	}
}

// Host is an address in a Network, and stands for the processes that use it. Servers and clients use it as
// their rpc.Network.
type Host struct {
	net  *Network
	name string
}

var _ rpc.Network = (*Host)(nil)

// Host returns the host with a name, and creates it at the first call. Hosts whose names are equal up to the
// first dot are on one machine (machineOf). A client on the host of its server connects over loopback.
func (n *Network) Host(name string) *Host {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.hosts[name] == nil {
		n.hosts[name] = &Host{net: n, name: name}
	}
	return n.hosts[name]
}

// Listen listens at the host's own name and the port of the address. The host in the address is ignored; port
// 0 means a free port.
func (h *Host) Listen(address string) (net.Listener, error) {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	h.net.mu.Lock()
	defer h.net.mu.Unlock()
	if port == "0" {
		h.net.nextPort++
		port = strconv.Itoa(h.net.nextPort)
	}
	addr := memAddr(net.JoinHostPort(h.name, port))
	if h.net.listeners[string(addr)] != nil {
		return nil, fmt.Errorf("listen %s: %w", addr, syscall.EADDRINUSE)
	}
	l := &listener{host: h, addr: addr, incoming: make(chan net.Conn, 1024), done: make(chan struct{})}
	h.net.listeners[string(addr)] = l
	return l, nil
}

// Serve starts a gRPC server that has the services that register adds to it: without any it answers pings of
// HTTP/2, and no call.
func (h *Host) Serve(t testing.TB, address string, register ...func(*grpc.Server)) (stop func()) {
	t.Helper()
	lis, err := h.Listen(address)
	require.NoError(t, err)
	server := grpc.NewServer()
	for _, add := range register {
		add(server)
	}
	go func() { _ = server.Serve(lis) }()
	return server.Stop
}

// Dial connects to name:port of any host. The connection is refused if nothing listens there, if this host is
// killed, or during an Interrupt. During a Sever between the machines of the two hosts, or while the other
// host is silent (Vanish), Dial waits, as for a lost SYN, and continues afterwards. If the hosts were blocked
// (Block) when Dial was called, it waits until its deadline and fails, even if Unblock is called before.
func (h *Host) Dial(ctx context.Context, address string) (net.Conn, error) {
	to, _, _ := net.SplitHostPort(address)
	if h.net.isBlocked(h.name, to) {
		<-ctx.Done()
		return nil, fmt.Errorf("dial %s: %w", address, ctx.Err())
	}
	if err := h.net.handshake(ctx, h.name, to); err != nil {
		return nil, fmt.Errorf("dial %s: %w", address, err)
	}
	h.net.mu.Lock()
	defer h.net.mu.Unlock()
	l := h.net.listeners[address]
	if l == nil || h.net.killed[h.name] || h.net.refused[[2]string{h.name, l.host.name}] {
		return nil, fmt.Errorf("dial %s: %w", address, syscall.ECONNREFUSED)
	}
	there, here := h.net.pipe(h.name, to), h.net.pipe(to, h.name)
	there.back, here.back = here, there
	from := h.name + ":0"
	if h.name == l.host.name { // servers accept some calls without a token if they arrive over loopback
		from = "127.0.0.1:0"
	}
	client := &conn{host: h, local: memAddr(from), remote: l.addr, in: here, out: there}
	server := &conn{host: l.host, local: l.addr, remote: client.local, in: there, out: here}
	select {
	case l.incoming <- server:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	h.net.conns[client], h.net.conns[server] = struct{}{}, struct{}{}
	return client, nil
}

// Kill simulates SIGKILL of all processes of the host: its connections break, on both ends, and its listeners
// close. Goroutines of these processes still run in the test. They cannot connect until the Cluster starts a
// server or a client on the host (Revive). The host is marked as killed first, so that it cannot dial while
// its connections are being closed.
func (h *Host) Kill() {
	h.net.mu.Lock()
	if h.net.killed == nil {
		h.net.killed = map[string]bool{}
	}
	h.net.killed[h.name] = true
	h.net.mu.Unlock()
	for _, l := range h.net.listenersOf(h.name) {
		_ = l.Close()
	}
	h.Cut()
}

// Revive lets a killed or vanished host connect again.
func (h *Host) Revive() {
	h.net.mu.Lock()
	defer h.net.mu.Unlock()
	delete(h.net.killed, h.name)
	h.net.answer(h.name)
}

// Cut breaks the open connections of the host. New connections succeed.
func (h *Host) Cut() {
	for _, c := range h.net.connsOf(h.name) {
		_ = c.Close()
	}
}

// Interrupt cuts two hosts from each other for a time: their connections break, and new ones are refused.
// Interruptions of the same hosts must not overlap, since the end of the first one ends both.
func (n *Network) Interrupt(a, b string, lasts time.Duration) {
	n.mu.Lock()
	if n.refused == nil {
		n.refused = map[[2]string]bool{}
	}
	n.refused[[2]string{a, b}], n.refused[[2]string{b, a}] = true, true
	n.mu.Unlock()
	n.breakBetween(a, b)
	time.AfterFunc(lasts, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.refused, [2]string{a, b})
		delete(n.refused, [2]string{b, a})
	})
}

// Block cuts two hosts from each other, until Unblock: their connections break, and new ones get no answer.
func (n *Network) Block(a, b string) {
	n.mu.Lock()
	n.blocked[[2]string{a, b}], n.blocked[[2]string{b, a}] = true, true
	n.mu.Unlock()
	n.breakBetween(a, b)
}

func (n *Network) breakBetween(a, b string) {
	for _, c := range n.connsOf(a) {
		if from, _, _ := net.SplitHostPort(c.remote.String()); from == b {
			_ = c.Close()
		}
	}
	for _, c := range n.connsOf(b) {
		if from, _, _ := net.SplitHostPort(c.remote.String()); from == a {
			_ = c.Close()
		}
	}
}

// Unblock ends a Block.
func (n *Network) Unblock(a, b string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.blocked, [2]string{a, b})
	delete(n.blocked, [2]string{b, a})
}

func (n *Network) isBlocked(a, b string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.blocked[[2]string{a, b}]
}

// Freeze drops all data on the open connections of the host, in both directions. They stay open, so its peers
// have to notice the silence, as after a power failure. Unlike after Vanish, new connections succeed, and a
// peer learns if the host closes a connection.
func (h *Host) Freeze() {
	for _, c := range h.net.connsOf(h.name) {
		c.in.freeze()
		c.out.freeze()
	}
}

// Hold drops all data on the open connections between two hosts. New connections succeed, and if one side
// closes a connection, the other side learns of the end.
func (n *Network) Hold(a, b string) {
	for _, c := range n.connsOf(a) {
		if to, _, _ := net.SplitHostPort(c.remote.String()); to == b {
			c.in.freeze()
			c.out.freeze()
		}
	}
}

func (n *Network) listenersOf(host string) (found []*listener) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, l := range n.listeners {
		if l.host.name == host {
			found = append(found, l)
		}
	}
	return found
}

func (n *Network) connsOf(host string) (found []*conn) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for c := range n.conns {
		if c.host.name == host {
			found = append(found, c)
		}
	}
	return found
}

type memAddr string

func (memAddr) Network() string  { return "memory" }
func (a memAddr) String() string { return string(a) }

type listener struct {
	host     *Host
	addr     memAddr
	incoming chan net.Conn
	done     chan struct{}
	once     sync.Once
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.incoming:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.once.Do(func() {
		l.host.net.mu.Lock()
		delete(l.host.net.listeners, string(l.addr))
		l.host.net.mu.Unlock()
		close(l.done)
	})
	return nil
}

func (l *listener) Addr() net.Addr { return l.addr }
