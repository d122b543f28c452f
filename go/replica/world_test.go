package replica_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/replica"
)

// world are the hosts of a cluster, connected in memory.
type world struct {
	t       *testing.T
	network *fttest.Network
	list    []string
	hosts   []*host
}

// host has one lighthouse at most.
type host struct {
	world   *world
	name    string
	address string
	list    []string
	dir     string
	memory  *memory
	bolt    bool // the disk is the real one, in dir
	log     *fttest.Log
	node    *replica.Node
	disk    *handle
	stop    func()
}

func newWorld(t *testing.T, names ...string) *world {
	w := &world{t: t, network: fttest.NewNetwork()}
	for _, name := range names {
		w.list = append(w.list, url(name))
	}
	for _, name := range names {
		w.add(name)
	}
	t.Cleanup(w.close)
	return w
}

func url(name string) string { return "http://" + name + ":1" }

func (w *world) add(name string) *host {
	h := &host{world: w, name: name, address: url(name), list: w.list, dir: w.t.TempDir(),
		memory: newMemory(), log: &fttest.Log{}}
	if !slices.Contains(h.list, h.address) {
		h.list = slices.Sorted(slices.Values(append(slices.Clone(h.list), h.address)))
	}
	w.hosts = append(w.hosts, h)
	return h
}

// started starts all hosts, and returns when one leads.
func (w *world) started() (leader *host, term uint64) {
	w.t.Helper()
	for _, h := range w.hosts {
		h.start()
	}
	return w.leads(nil)
}

// leads returns when a host except one leads, in a term after that of the last leader.
func (w *world) leads(except *host) (leader *host, term uint64) {
	w.t.Helper()
	began := time.Now()
	for time.Since(began) < time.Minute {
		for _, h := range w.hosts {
			if h == except || h.node == nil {
				continue
			}
			select {
			case l := <-h.node.Leadership():
				if l.Leads {
					return h, l.Term
				}
			default:
			}
		}
		time.Sleep(time.Millisecond)
	}
	for _, h := range w.hosts {
		if h.node != nil {
			w.t.Logf("%s: %+v\n%s", h.name, h.node.Status(), h.log)
		}
	}
	w.t.Fatal("nobody leads")
	return nil, 0
}

func (w *world) close() {
	for _, h := range w.hosts {
		h.close()
	}
}

func (h *host) config() replica.Config {
	return replica.Config{
		Cluster: h.list, Self: h.address, Dir: h.dir, Dialing: rpc.Dialing{Network: h.network()},
		Logger: slog.New(slog.NewTextHandler(h.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
}

func (h *host) start() *replica.Node {
	h.world.t.Helper()
	n, err := h.open()
	require.NoError(h.world.t, err)
	return n
}

func (h *host) open() (*replica.Node, error) {
	h.network().Revive()
	disk := &handle{Store: h.memory, until: make(chan struct{})}
	n, err := replica.Open(context.Background(),
		h.config().With(func(dir string) (_ replica.Store, err error) {
			if h.bolt {
				disk.Store, err = replica.OpenStore(h.config())(dir)
			}
			return disk, err
		}))
	if err != nil {
		return nil, err
	}
	lis, err := h.network().Listen(":1")
	require.NoError(h.world.t, err)
	gate, err := rpc.NewGate(auth.Security{}, rpc.Limits{}, h.config().Logger)
	require.NoError(h.world.t, err)
	g := rpc.NewGRPC(gate, h.config().Logger)
	replica.Register(g, n)
	h.node, h.disk, h.stop = n, disk, rpc.Serve(lis, gate, g, nil, h.config().Logger).Stop
	return n, nil
}

func (h *host) network() *fttest.Host { return h.world.network.Host(h.name) }

// close ends the lighthouse as SIGTERM does.
func (h *host) close() {
	if h.node != nil {
		h.node.Close()
		h.stop()
		h.network().Cut()
		h.node = nil
	}
}

// kill ends the lighthouse as SIGKILL does.
func (h *host) kill() { h.end(h.network().Kill) }

// end ends the lighthouse after something has cut it off.
func (h *host) end(cut func()) {
	h.disk.fail("", errors.New("killed"))
	cut()
	n := h.node
	h.node = nil
	n.Close()
	h.stop()
}

// memory is the content of a disk.
type memory struct {
	*raft.InmemStore
	*raft.InmemSnapshotStore
}

func (m *memory) Close() error { return nil }

func newMemory() *memory { return &memory{raft.NewInmemStore(), raft.NewInmemSnapshotStore()} }

// handle is a disk as one process sees it. It fails on request.
type handle struct {
	replica.Store
	fault atomic.Pointer[fault]
	until chan struct{} // operations that hang continue when it is closed
}

// fault is what the operations of a disk do whose names contain the text: return the error, or hang if it is
// nil.
type fault struct {
	of  string
	err error
}

func (h *handle) fail(of string, err error) { h.fault.Store(&fault{of, err}) }

func (h *handle) check(operation string) error {
	f := h.fault.Load()
	if f == nil || !strings.Contains(operation, f.of) {
		return nil
	}
	if f.err == nil {
		<-h.until
	}
	return f.err
}

func (h *handle) StoreLogs(logs []*raft.Log) error {
	if err := h.check("StoreLogs"); err != nil {
		return err
	}
	copies := make([]*raft.Log, len(logs))
	for i, l := range logs {
		one := *l
		one.Data = slices.Clone(l.Data)
		copies[i] = &one
	}
	return h.Store.StoreLogs(copies)
}

func (h *handle) GetLog(index uint64, to *raft.Log) error {
	if err := h.check("GetLog"); err != nil {
		return err
	}
	return h.Store.GetLog(index, to)
}

func (h *handle) DeleteRange(from, to uint64) error {
	if err := h.check("DeleteRange"); err != nil {
		return err
	}
	return h.Store.DeleteRange(from, to)
}

func (h *handle) Set(key, value []byte) error {
	if err := h.check("Set"); err != nil {
		return err
	}
	return h.Store.Set(key, value)
}

func (h *handle) SetUint64(key []byte, value uint64) error {
	if err := h.check("SetUint64 " + string(key)); err != nil {
		return err
	}
	return h.Store.SetUint64(key, value)
}

func (h *handle) Create(
	v raft.SnapshotVersion, index, term uint64, c raft.Configuration, ci uint64, via raft.Transport,
) (raft.SnapshotSink, error) {
	if err := h.check("Create"); err != nil {
		return nil, err
	}
	return h.Store.Create(v, index, term, c, ci, via)
}

// settle waits until a condition holds.
func settle(t *testing.T, what string, holds func() bool) {
	t.Helper()
	began := time.Now()
	for !holds() {
		if time.Since(began) > time.Minute {
			t.Fatal("not within a minute: " + what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// agree waits until all hosts have a state of a job.
func (w *world) agree(job, state string) {
	w.t.Helper()
	settle(w.t, fmt.Sprintf("all have %s=%s", job, state), func() bool {
		for _, h := range w.hosts {
			if h.node != nil && string(h.node.States()[job]) != state {
				return false
			}
		}
		return true
	})
}
