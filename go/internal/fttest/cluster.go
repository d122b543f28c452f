package fttest

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/testlog"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/membership/lighthouses"
	"github.com/torchft/torchft/go/rankclient"
	"github.com/torchft/torchft/go/torchftpb"
)

// LighthouseAddr is the address of a cluster's lighthouse, before and after a restart.
const LighthouseAddr = "http://lighthouse:29510"

// Cluster is a lighthouse and replica groups in one network.
type Cluster struct {
	T   *testing.T
	Net *Network
	Log *Log

	Lighthouse *lighthouse.Server
}

// NewCluster starts a lighthouse with the defaults of the command, except for a join timeout of 10 s and the
// given changes. It is shut down at the end of the test.
func NewCluster(t *testing.T, minReplicas int, change ...func(*lighthouse.Config)) *Cluster {
	c := &Cluster{T: t, Net: NewNetwork(), Log: &Log{}}
	c.StartLighthouse(minReplicas, change...)
	t.Cleanup(func() { c.Lighthouse.Shutdown() })
	return c
}

// StartLighthouse starts a lighthouse at LighthouseAddr. The caller must have shut down the previous one, or
// killed its host.
func (c *Cluster) StartLighthouse(minReplicas int, change ...func(*lighthouse.Config)) {
	c.Lighthouse = c.LighthouseOn("lighthouse", minReplicas, change...)
}

// LighthouseOn starts a lighthouse on a host, at port 29510. The caller shuts it down.
func (c *Cluster) LighthouseOn(
	host string, minReplicas int, change ...func(*lighthouse.Config),
) *lighthouse.Server {
	c.Net.Host(host).Revive()
	cfg := lighthouse.DefaultConfig()
	cfg.MinReplicas = minReplicas
	cfg.JoinTimeout = 10 * time.Second
	cfg.Hostname = host
	cfg.Network = c.Net.Host(host)
	cfg.Logger = slog.New(slog.NewTextHandler(c.Log, nil))
	for _, f := range change {
		f(&cfg)
	}
	server, err := lighthouse.New(cfg)
	require.NoError(c.T, err)
	return server
}

// NewManager joins the lighthouses of a configuration, unless it has a Membership, and starts the manager
// server.
func NewManager(ctx context.Context, cfg manager.ServerConfig) (*manager.Server, error) {
	if cfg.Membership == nil {
		joined, err := Join(ctx, cfg)
		if err != nil {
			return nil, err
		}
		cfg.Membership = joined
	}
	return manager.NewServer(cfg)
}

// Join joins the lighthouses of a configuration.
func Join(ctx context.Context, cfg manager.ServerConfig) (*lighthouses.Member, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return lighthouses.Join(ctx, cfg.LighthouseAddr, cfg.ReplicaID, cfg.ConnectTimeout,
		rpc.Dialing{Network: cfg.Network, Security: cfg.Security, Job: cfg.Job})
}

// NoMembership has the methods of a Membership without effect, for a fake to override.
type NoMembership struct{}

// Attend reaches the lighthouse.
func (NoMembership) Attend(ctx context.Context, _ time.Duration, reached func(), _ membership.Doing) error {
	reached()
	<-ctx.Done()
	return ctx.Err()
}

// Notices has no notice.
func (NoMembership) Notices() <-chan *torchftpb.Notice { return nil }

// Report, Trains, Leave, Finish and Close do nothing.
func (NoMembership) Report(*torchftpb.MemberMessage) {}
func (NoMembership) Trains(int64, int64)             {}
func (NoMembership) Leave(context.Context) error     { return nil }
func (NoMembership) Finish(int64)                    {}
func (NoMembership) Close() error                    { return nil }

// Group is one replica group: its server on the host with the group's name, and one client per rank, each on
// its own host "name/rank".
type Group struct {
	c      *Cluster
	Server *manager.Server
	Ranks  []*rankclient.Client
	name   string

	security auth.Security
}

// ServerConfig returns a valid configuration for a group of this cluster.
func (c *Cluster) ServerConfig(name string, worldSize int64) manager.ServerConfig {
	return manager.ServerConfig{
		ReplicaID:         name,
		LighthouseAddr:    LighthouseAddr,
		Hostname:          name,
		Bind:              "[::]:0",
		StoreAddr:         name + ":1",
		WorldSize:         worldSize,
		HeartbeatInterval: 100 * time.Millisecond,
		ConnectTimeout:    10 * time.Second,
		Logger:            slog.New(slog.NewTextHandler(c.Log, nil)),
		Network:           c.Net.Host(name),
		Exit:              func(int) {}, // the process of the test has other groups
	}
}

// StartGroup starts a group, in a bubble of testing/synctest. It is shut down at the end of the test.
func (c *Cluster) StartGroup(name string, worldSize int64, change ...func(*manager.ServerConfig)) *Group {
	c.Net.Host(name).Revive()
	cfg := c.ServerConfig(name, worldSize)
	for _, f := range change {
		f(&cfg)
	}
	server, err := NewManager(context.Background(), cfg)
	require.NoError(c.T, err)
	c.T.Cleanup(server.Shutdown)
	g := &Group{c: c, name: name, Server: server, security: cfg.Security}
	for rank := range worldSize {
		g.Ranks = append(g.Ranks, g.Dial(fmt.Sprintf("%s/%d", name, rank)))
	}
	synctest.Wait() // until the lighthouse has the first heartbeat
	return g
}

// Dial returns another client of the group's server, on a host.
func (g *Group) Dial(host string) *rankclient.Client {
	g.c.Net.Host(host).Revive()
	client, err := rankclient.Dial(context.Background(), g.Server.Address(), 10*time.Second,
		rpc.Dialing{Network: g.c.Net.Host(host), Security: g.security})
	require.NoError(g.c.T, err)
	g.c.T.Cleanup(func() { _ = client.Close() })
	return client
}

// Host returns the host of one rank; for rank -1, that of the server.
func (g *Group) Host(rank int) *Host {
	if rank < 0 {
		return g.c.Net.Host(g.name)
	}
	return g.c.Net.Host(fmt.Sprintf("%s/%d", g.name, rank))
}

// Request and Result are those of a rank's quorum.
type (
	Request = torchftpb.ManagerQuorumRequest
	Result  = torchftpb.ManagerQuorumResponse
)

// Answer is the result of a call, and its duration.
type Answer[T any] struct {
	Value T
	Err   error
	Took  time.Duration
}

// Start runs a call on a new goroutine. The channel receives its answer.
func Start[T any](call func() (T, error)) <-chan Answer[T] {
	answer := make(chan Answer[T], 1)
	go func() {
		start := time.Now()
		value, err := call()
		answer <- Answer[T]{value, err, time.Since(start)}
	}()
	return answer
}

// Quorum requests a quorum for one rank.
func (g *Group) Quorum(rank int, step int64, timeout time.Duration) <-chan Answer[*Result] {
	return g.QuorumWith(&Request{GroupRank: int64(rank), Step: step}, timeout)
}

// QuorumWith requests a quorum with a given request, for the rank that it names.
func (g *Group) QuorumWith(req *Request, timeout time.Duration) <-chan Answer[*Result] {
	return g.QuorumBelow("", req, timeout)
}

// QuorumBelow is QuorumWith as a child of the span with this W3C trace context.
func (g *Group) QuorumBelow(
	traceparent string, req *Request, timeout time.Duration,
) <-chan Answer[*Result] {
	req.CheckpointMetadata = fmt.Sprintf("http://%s/%d", net.JoinHostPort(g.name, "1"), req.GetGroupRank())
	client := g.Ranks[req.GetGroupRank()]
	client.Trace.Store(&traceparent)
	return Start(func() (*Result, error) {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		return client.Quorum(ctx, req)
	})
}

// QuorumOfAll requests a quorum for every rank.
func (g *Group) QuorumOfAll(step int64, timeout time.Duration) []<-chan Answer[*Result] {
	var answers []<-chan Answer[*Result]
	for rank := range g.Ranks {
		answers = append(answers, g.Quorum(rank, step, timeout))
	}
	return answers
}

// Vote votes for one rank.
func (g *Group) Vote(rank int, step int64, vote bool, timeout time.Duration) <-chan Answer[bool] {
	return Start(func() (bool, error) {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		return Commits(g.Ranks[rank].ShouldCommit(ctx, int64(rank), step, vote))
	})
}

// Commits returns the decision of a vote.
func Commits(d *torchftpb.ShouldCommitResponse, err error) (bool, error) {
	return d.GetShouldCommit(), err
}

// Log collects the log of servers for tests.
type Log = testlog.Log
