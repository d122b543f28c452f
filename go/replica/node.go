package replica

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/torchft/torchft/go/internal/clock"
	"github.com/torchft/torchft/go/internal/rpc"
)

const (
	// proposeWithin bounds Propose.
	proposeWithin = 10 * time.Second
	// A snapshot is made after this many entries. It keeps some of them, for a follower that lags. An entry
	// is the state of a job, with up to 200 bytes for each group of it.
	entriesOfSnapshot, entriesKept = 256, 64
)

// Node is a lighthouse in a cluster.
type Node struct {
	cfg     Config
	log     *slog.Logger
	name    string // in Raft
	disk    *disk
	dialer  *dialer
	layer   *layer
	machine *machine
	leads   chan Lead
	ctx     context.Context
	cancel  context.CancelFunc
	tasks   sync.WaitGroup
	// futures of Raft that are waited for: Raft forgets some of them when it shuts down
	calls sync.WaitGroup

	mu       sync.Mutex
	identity Identity
	raft     *raft.Raft // nil until the cluster is known
	stopped  error      // why this node takes no part any more
	closing  bool       // Close was called
	shut     chan struct{}
	lead     Lead // the last one published
	leader   string
	began    time.Time // when the node was made
	since    time.Time // since when leader is the leader
	heard    map[string]answer
	trouble  string // of the last round of questions
	told     string // the trouble that was logged
	warned   map[string]string
	// by address: how many rounds of questions a lighthouse of the cluster has not answered
	silent map[string]int
	leading
}

// Open starts a node, and returns without waiting for the others. It returns an error if the directory cannot
// be used: it belongs to another lighthouse or cluster, to another process, or is damaged. Register has to
// follow.
//
// A node with an empty directory asks the others of the list. If all of them are new, the first of the list
// starts the cluster. If one is in a cluster, this node waits to be added to that cluster.
func Open(ctx context.Context, cfg Config) (*Node, error) {
	n, err := prepare(cfg)
	if err != nil {
		return nil, err
	}
	n.ctx, n.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if n.identity.Cluster != "" {
		err = n.start()
	}
	if err != nil {
		n.Close()
		return nil, err
	}
	rpc.Go(&n.tasks, n.log, "the lighthouses of the cluster", n.askOften)
	rpc.Go(&n.tasks, n.log, "pauses of the process", n.watchPauses)
	return n, nil
}

// prepare opens the directory of a node.
func prepare(cfg Config) (*Node, error) {
	cfg.Cluster = slices.Sorted(slices.Values(cfg.Cluster))
	cfg.Logger = cmp.Or(cfg.Logger, slog.Default())
	n := &Node{
		cfg: cfg, log: cfg.Logger, leads: make(chan Lead, 1), began: time.Now(), since: time.Now(),
		shut: make(chan struct{}), warned: map[string]string{}, silent: map[string]int{},
		leading: leading{last: clock.Now()}, trouble: "it has not asked the other lighthouses yet",
	}
	n.machine = &machine{bad: n.leave, states: map[string][]byte{}}
	n.disk = &disk{broken: n.leave}
	if err := n.openDir(); err != nil {
		return nil, fmt.Errorf("--state_dir is %q: %w", cfg.Dir, err)
	}
	n.name, n.dialer = nameOf(cfg.Self, n.identity.Instance), newDialer(cfg.Dialing)
	n.layer = &layer{
		Queue: rpc.NewQueue(named(n.name)),
		name:  n.name, dialer: n.dialer,
		cluster: func() string { return n.Identity().Cluster }, refused: n.refused,
		conns: map[*conn]struct{}{}, opens: time.Now().Add(leaderLease),
	}
	return n, nil
}

func (n *Node) raftConfig() *raft.Config {
	c := raft.DefaultConfig()
	c.LocalID = raft.ServerID(n.name)
	c.HeartbeatTimeout, c.ElectionTimeout, c.LeaderLeaseTimeout, c.CommitTimeout = electionTimeout,
		electionTimeout, leaderLease, electionTimeout/4
	c.MaxAppendEntries = 16
	c.ShutdownOnRemove = false
	c.SnapshotThreshold, c.TrailingLogs, c.SnapshotInterval = entriesOfSnapshot, entriesKept, 30*time.Second
	c.NoLegacyTelemetry = true
	c.Logger = raftLogger(n.log)
	return c
}

// start starts Raft from the directory.
func (n *Node) start() error {
	c := n.raftConfig()
	transport := raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{Stream: n.layer, MaxPool: 3,
		Timeout: callTimeout, Logger: c.Logger.Named(transportName)})
	r, err := newRaft(c, n.machine, n.disk, transport)
	if err != nil {
		_ = transport.Close()
		return fmt.Errorf("--state_dir is %q: %w", n.cfg.Dir, err)
	}
	n.mu.Lock()
	err = n.stopped
	if err == nil {
		n.raft = r // leave shuts it down from now on
	}
	n.mu.Unlock()
	if err != nil {
		_ = r.Shutdown().Error()
		return fmt.Errorf("--state_dir is %q: %w", n.cfg.Dir, err)
	}
	others, common := 0, 0
	for _, address := range n.members() {
		if address != n.cfg.Self {
			others++
			if slices.Contains(n.cfg.Cluster, address) {
				common++
			}
		}
	}
	if others > 0 && common == 0 {
		return fmt.Errorf("--state_dir is %q, which belongs to the cluster of %s: --cluster %s has none of "+
			"them; name lighthouses of the cluster, or another directory",
			n.cfg.Dir, strings.Join(n.members(), ","), strings.Join(n.cfg.Cluster, ","))
	}
	rpc.Go(&n.tasks, n.log, "the leader of the cluster", func() { n.watch(r) })
	return nil
}

// newRaft is raft.NewRaft, which panics if the log does not follow the snapshots.
func newRaft(c *raft.Config, m *machine, d *disk, via raft.Transport) (r *raft.Raft, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("the log is damaged: %v", r)
		}
	}()
	return raft.NewRaft(c, m, d, d, d, via)
}

// members returns the addresses of the cluster, as far as this node knows them.
func (n *Node) members() (addresses []string) {
	for _, s := range n.servers() {
		addresses = append(addresses, addressOf(s.ID))
	}
	return addresses
}

func (n *Node) servers() []raft.Server {
	n.mu.Lock()
	r := n.raft
	n.mu.Unlock()
	if r == nil {
		return nil
	}
	return r.GetConfiguration().Configuration().Servers
}

// Identity returns what this node tells about itself.
func (n *Node) Identity() Identity {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.identity
}

// leave ends the node's part in the cluster, for good: nothing is sent after it returns. Close still has to
// be called.
func (n *Node) leave(why error) {
	n.mu.Lock()
	if n.stopped != nil {
		n.mu.Unlock()
		return
	}
	n.stopped = why
	r := n.raft
	n.publish(Lead{})
	n.mu.Unlock()
	if n.layer != nil { // else Open returns the error
		n.layer.stop()
		if !errors.Is(why, errClosed) {
			n.log.Error("torchft: this lighthouse left the cluster", "reason", why)
		}
	}
	// A goroutine of its own, since Raft may be the caller. A leader that is cut off answers all calls within
	// the lease, a disk within its limit.
	go func() {
		defer close(n.shut)
		if !within(diskTimeout+2*leaderLease, n.calls.Wait) {
			n.log.Warn("torchft: a request to Raft was not answered")
		}
		if r == nil {
			return
		}
		if !within(diskTimeout+time.Second, func() { _ = r.Shutdown().Error() }) {
			n.log.Warn("torchft: Raft has not ended: the disk does not answer", "dir", n.cfg.Dir)
		}
	}()
}

// within runs f, and reports whether it ended in the time.
func within(limit time.Duration, f func()) bool {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
		return true
	case <-time.After(limit):
		return false
	}
}

var errClosed = errors.New("it is shutting down")

// Close stops the node. A leader hands over to another lighthouse first.
func (n *Node) Close() {
	n.mu.Lock()
	r := n.raft
	n.closing = true
	leads := n.stopped == nil && r != nil && r.State() == raft.Leader
	if leads {
		n.publish(Lead{}) // Verify and Propose fail from now on
		n.calls.Add(1)
	}
	n.mu.Unlock()
	if leads {
		within(2*electionTimeout, func() {
			defer n.calls.Done()
			_ = r.LeadershipTransfer().Error()
		})
	}
	n.leave(errClosed)
	n.cancel()
	<-n.shut
	n.tasks.Wait()
	_ = n.layer.Close()
	n.dialer.close()
	if err := n.disk.Close(); err != nil {
		n.log.Warn("torchft: the state directory was not closed", "dir", n.cfg.Dir, "error", err)
	}
}

// call counts a future of Raft, for the leader of a term. The caller calls done when it has the outcome.
func (n *Node) call(term uint64) (r *raft.Raft, done func(), err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.stopped != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrNotLeading, n.stopped)
	}
	if n.raft == nil || !n.lead.Leads || term != 0 && n.lead.Term != term || !leads(n.raft, n.lead.Term) {
		return nil, nil, ErrNotLeading
	}
	n.calls.Add(1)
	return n.raft, n.calls.Done, nil
}

func leads(r *raft.Raft, term uint64) bool {
	return r.State() == raft.Leader && r.CurrentTerm() == term && r.State() == raft.Leader
}

// await waits for a future of call, on a goroutine that may outlast it.
func await(ctx context.Context, done func(), f raft.Future) error {
	outcome := make(chan error, 1)
	go func() {
		defer done()
		outcome <- f.Error()
	}()
	select {
	case err := <-outcome:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Propose replaces the state of a job on all nodes, or removes it if the state is empty. It returns nil when
// a majority has it on disk, ErrNotLeading if no node has it or ever will, and ErrUnknown otherwise. It ends
// within 10 s.
func (n *Node) Propose(term uint64, job string, state []byte) error {
	r, done, err := n.call(term)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), proposeWithin)
	defer cancel()
	f := r.Apply(entry(term, job, state), callTimeout)
	err = await(ctx, done, f)
	switch {
	case err == nil:
		err, _ = f.Response().(error)
		return err
	case errors.Is(err, raft.ErrNotLeader), errors.Is(err, raft.ErrEnqueueTimeout),
		errors.Is(err, raft.ErrLeadershipTransferInProgress):
		return fmt.Errorf("%w: %w", ErrNotLeading, err)
	}
	return fmt.Errorf("%w: %w", ErrUnknown, err)
}

// States returns the states of all jobs that are not removed. Do not change them.
func (n *Node) States() map[string][]byte { return n.machine.copy() }

// Recover makes the lighthouse of cfg the only one of a new cluster with the states of its directory, which
// no other process may use. The others have to be added with empty state directories. It is for a cluster
// whose majority is lost for good: what only the lost ones had is lost, and what was proposed but not yet
// kept may be kept now. It returns an error if a majority answers: two clusters would serve the jobs.
func Recover(cfg Config) error {
	n, err := prepare(cfg)
	if err != nil {
		return err
	}
	defer func() { _ = n.disk.Close() }()
	defer n.dialer.close()
	if n.identity.Cluster == "" {
		return fmt.Errorf("--state_dir is %q: it has no cluster that could be recovered", cfg.Dir)
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	defer n.cancel()
	var alive []string
	for address, a := range n.ask() {
		if a.err == nil && a.Cluster == n.identity.Cluster && address != cfg.Self {
			alive = append(alive, address)
		}
	}
	if 2*(1+len(alive)) > len(cfg.Cluster) {
		slices.Sort(alive)
		return fmt.Errorf("--recover is set, but the cluster is not lost: this lighthouse and %s, which "+
			"run, are most of %s: start without --recover",
			strings.Join(alive, ", "), strings.Join(cfg.Cluster, ","))
	}
	self := raft.Configuration{Servers: []raft.Server{{ID: raft.ServerID(n.name),
		Address: raft.ServerAddress(n.name)}}}
	_, transport := raft.NewInmemTransport(raft.ServerAddress(n.name))
	if err := raft.RecoverCluster(n.raftConfig(), n.machine, n.disk, n.disk, n.disk, transport,
		self); err != nil {
		return fmt.Errorf("--state_dir is %q: %w", cfg.Dir, err)
	}
	if err := n.enter(newID()); err != nil { // the others must not connect with the logs that they still have
		return err
	}
	n.log.Warn("torchft: the cluster begins anew with this lighthouse alone: start the others with empty "+
		"state directories, and add each with `torchft cluster add`",
		"self", cfg.Self, "cluster", n.identity.Cluster)
	return nil
}
