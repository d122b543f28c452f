package gossip

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/auth"
)

// mesh is a network in memory that loses packets, and can be cut.
type mesh struct {
	t *testing.T

	mu    sync.Mutex
	rand  *rand.Rand
	loss  float64 // of packets
	ports map[string]*port
	part  map[string]int           // by address: its part of the network
	slow  map[string]time.Duration // by address: how long connecting takes
}

func newMesh(t *testing.T, loss float64) *mesh {
	return &mesh{t: t, rand: rand.New(rand.NewPCG(23, 23)), loss: loss, ports: map[string]*port{},
		part: map[string]int{}, slow: map[string]time.Duration{}}
}

// cut separates nodes from all others.
func (m *mesh) cut(nodes ...*Node) {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.part)
	for _, n := range nodes {
		m.part[n.own] = 1
	}
}

// reach returns the port of an address, nil if it is not reachable.
func (m *mesh) reach(from, to string) *port {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.part[from] != m.part[to] {
		return nil
	}
	return m.ports[to]
}

// config returns the settings of the member with this number; number 1 is the seed.
func (m *mesh) config(number int) (Config, *memberlist.Config, [][]string) {
	cfg := Config{
		Name: fmt.Sprintf("m%03d", number), Incarnation: time.Now().UnixNano(),
		StoreAddress: fmt.Sprintf("host%d:1", number),
		MinMembers:   1, Job: "job", ConnectTimeout: 20 * time.Second, Log: slog.New(slog.DiscardHandler),
		Seeds: []string{at(1)},
	}
	settings := cfg.settings()
	settings.AdvertiseAddr, _, _ = net.SplitHostPort(at(number))
	settings.AdvertisePort = 7946
	return cfg, settings, [][]string{{at(1)}}
}

func at(number int) string { return fmt.Sprintf("10.0.%d.%d:7946", number/250, number%250) }

func (m *mesh) open(number int) *Node {
	m.t.Helper()
	node, err := m.try(m.config(number))
	require.NoError(m.t, err)
	return node
}

func (m *mesh) try(cfg Config, settings *memberlist.Config, seeds [][]string) (*Node, error) {
	address := net.JoinHostPort(settings.AdvertiseAddr, strconv.Itoa(settings.AdvertisePort))
	p := &port{mesh: m, address: address, packets: make(chan *memberlist.Packet, 1024),
		streams: make(chan net.Conn), down: make(chan struct{})}
	m.mu.Lock()
	m.ports[address] = p
	m.mu.Unlock()
	settings.Transport = p
	ctx, cancel := context.WithTimeout(m.t.Context(), cfg.ConnectTimeout)
	defer cancel()
	return open(ctx, cfg, settings, seeds, address)
}

// port is a node's transport.
type port struct {
	mesh    *mesh
	address string
	packets chan *memberlist.Packet
	streams chan net.Conn
	down    chan struct{}
	once    sync.Once
}

func (p *port) FinalAdvertiseAddr(ip string, port int) (net.IP, int, error) {
	return net.ParseIP(ip), port, nil
}

func (p *port) WriteTo(b []byte, to string) (time.Time, error) {
	return p.WriteToAddress(b, memberlist.Address{Addr: to})
}

func (p *port) WriteToAddress(b []byte, to memberlist.Address) (time.Time, error) {
	m, now := p.mesh, time.Now()
	m.mu.Lock()
	lost := m.rand.Float64() < m.loss
	m.mu.Unlock()
	other := m.reach(p.address, to.Addr)
	if len(b) > 1400 {
		return now, errors.New("message too long")
	}
	if lost || other == nil {
		return now, nil
	}
	from, err := net.ResolveUDPAddr("udp", p.address)
	if err != nil {
		return now, err
	}
	select {
	case other.packets <- &memberlist.Packet{Buf: append([]byte(nil), b...), From: from, Timestamp: now}:
	default: // dropped, as by a full UDP buffer
	}
	return now, nil
}

func (p *port) PacketCh() <-chan *memberlist.Packet { return p.packets }

func (p *port) DialTimeout(to string, timeout time.Duration) (net.Conn, error) {
	return p.DialAddressTimeout(memberlist.Address{Addr: to}, timeout)
}

func (p *port) DialAddressTimeout(to memberlist.Address, timeout time.Duration) (net.Conn, error) {
	other, now := p.mesh.reach(p.address, to.Addr), time.Now()
	deadline := time.NewTimer(timeout)
	defer deadline.Stop()
	if other == nil {
		select {
		case <-deadline.C:
		case <-p.down:
		}
		return nil, fmt.Errorf("dial %s: timed out", to.Addr)
	}
	p.mesh.mu.Lock()
	slow := p.mesh.slow[to.Addr]
	p.mesh.mu.Unlock()
	time.Sleep(slow)
	here, there := net.Pipe()
	select {
	case other.streams <- there:
		return here, here.SetDeadline(now.Add(timeout))
	case <-other.down:
	case <-p.down:
	case <-deadline.C:
	}
	return nil, errors.New("connection refused")
}

func (p *port) StreamCh() <-chan net.Conn { return p.streams }

func (p *port) Shutdown() error {
	p.once.Do(func() { close(p.down) })
	p.mesh.mu.Lock()
	defer p.mesh.mu.Unlock()
	if p.mesh.ports[p.address] == p {
		delete(p.mesh.ports, p.address)
	}
	return nil
}

// withTokens sets the token file of a configuration.
func withTokens(cfg Config, path string) Config {
	cfg.Security = auth.Security{TokenFile: path}
	return cfg
}
