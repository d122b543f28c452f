package lighthouse

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/replica"
)

// cluster is the place of a lighthouse among several that agree by Raft (package replica). Only the one that
// leads has jobs, and answers; the others forward (forward.go). A new leader continues each job from its
// state in the log (saver.go).
//
// Invariants:
//
//  1. A job exists only while this lighthouse leads, and belongs to one term of it: a lighthouse that leads
//     again begins its jobs anew.
//  2. Nothing is answered unless Raft has confirmed within its lease that this lighthouse leads (check). A
//     lighthouse whose process was stopped finds out so that another one leads, before it reads what its
//     members sent meanwhile.
//  3. What a deposed leader has sent all the same is of an older term. Members that have seen the newer one
//     ignore it.
type cluster struct {
	server *Server
	node   *replica.Node
	http   *http.Transport
	term   atomic.Uint64 // in which this lighthouse leads; 0: it does not

	mu     sync.Mutex
	leader *leader // nil while no other lighthouse leads
}

// leader is the way to the lighthouse that leads.
type leader struct {
	address string
	url     *url.URL
	conn    *grpc.ClientConn
	// ends, with the requests that are forwarded, when another lighthouse leads or none does
	ctx context.Context
	end context.CancelFunc
}

func (l *leader) close() {
	if l != nil {
		l.end()
		_ = l.conn.Close() // ends its calls
	}
}

// joinCluster opens the log of the cluster, and begins to take part in it.
func (s *Server) joinCluster() (*cluster, error) {
	protected, err := s.dialing().Security.Open(s.log)
	if err != nil {
		return nil, err
	}
	c := &cluster{server: s, http: rpc.HTTPTransport(s.cfg.Network, protected.Client)}
	cfg := replica.Config{Cluster: s.cfg.Cluster, Self: s.cfg.Advertise, Dir: s.cfg.StateDir,
		Dialing: s.dialing(), Logger: s.log}
	if s.cfg.Recover {
		err = replica.Recover(cfg)
	}
	if err == nil {
		c.node, err = replica.Open(context.Background(), cfg)
	}
	return c, err
}

// follow begins and ends the jobs of this lighthouse as it becomes the leader and ceases to be it, until the
// server ends.
func (c *cluster) follow() {
	look := time.Tick(leaderPoll)
	for {
		select {
		case lead := <-c.node.Leadership():
			c.lead(lead)
		case <-look:
			c.toLeader() // ends the calls and requests that wait for a former leader
		case <-c.server.stop:
			return
		}
	}
}

func (c *cluster) lead(lead replica.Lead) {
	if c.term.Swap(0) != 0 {
		c.server.dropJobs(c.notLeading())
	}
	if !lead.Leads {
		return
	}
	c.server.log.Info("torchft: this lighthouse leads its cluster", "term", lead.Term)
	c.term.Store(lead.Term)
	if j, err := c.server.enter(rpc.DefaultJob); err == nil {
		// it always exists, as without a cluster; the others begin when they are used
		j.done()
	}
}

// term returns the term in which this lighthouse leads; 0: it does not, or there is no cluster.
func (s *Server) term() uint64 {
	if s.cluster == nil {
		return 0
	}
	return s.cluster.term.Load()
}

// check returns an error unless this lighthouse leads at this moment. It waits for Raft's answer if the last
// one is too old.
func (c *cluster) check(ctx context.Context) error {
	if c == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	if term := c.term.Load(); term == 0 || c.node.Verify(ctx, term) != nil {
		return c.notLeading()
	}
	return nil
}

// notLeading is the error with which a lighthouse that does not lead refuses a call. It names the leader,
// also in a detail.
func (c *cluster) notLeading() error {
	leader, _ := c.node.Leader()
	switch leader {
	case "":
		return wire.NotLeader("",
			"no lighthouse of the cluster leads: more than half of "+strings.Join(c.addresses(),
				", ")+" have to reach each other")
	case c.server.address: // Raft has not confirmed it, or the jobs have not begun yet
		return wire.NotLeader("", "this lighthouse is not confirmed as the leader of its cluster")
	}
	return wire.NotLeader(leader, "this lighthouse does not lead its cluster: "+leader+" does")
}

// addresses returns the lighthouses of the cluster; those of the list before the first start of the cluster.
func (c *cluster) addresses() []string {
	var voters []string
	for _, m := range c.node.Status().Members {
		if m.Voter {
			voters = append(voters, m.Address)
		}
	}
	if voters == nil {
		return c.server.cfg.Cluster
	}
	return voters
}

// toLeader returns the way to the lighthouse that leads, nil if no other one does.
func (c *cluster) toLeader() *leader {
	address, _ := c.node.Leader()
	if address == c.server.address {
		address = ""
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leader != nil && c.leader.address == address {
		return c.leader
	}
	c.leader.close()
	c.leader = nil
	if address == "" {
		return nil
	}
	to, err := url.Parse(address)
	var conn *grpc.ClientConn
	if err == nil {
		conn, err = rpc.DialLater(c.server.dialing(), "lighthouse", address)
	}
	if err != nil {
		c.server.log.Warn("torchft: calls are not forwarded to the lighthouse that leads", "leader", address,
			"error", err)
		return nil
	}
	c.leader = &leader{address: address, url: to, conn: conn}
	c.leader.ctx, c.leader.end = context.WithCancel(context.Background())
	return c.leader
}

func (c *cluster) close() {
	c.node.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leader.close()
	c.leader = nil
	c.http.CloseIdleConnections()
}

// quiet drops what the proxy would log: its errors are answered to the client.
var quiet = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)

// dropJobs ends all jobs.
func (s *Server) dropJobs(reason error) {
	s.mu.Lock()
	jobs := s.jobs
	s.jobs = map[string]*job{}
	s.mu.Unlock()
	for _, j := range jobs {
		j.close(reason)
	}
}

// dropJob ends a job whose state did not come into the log. The next call begins it from what is there.
func (s *Server) dropJob(j *job, err error) {
	s.mu.Lock()
	if s.jobs[j.name] == j {
		delete(s.jobs, j.name)
	}
	s.mu.Unlock()
	j.close(status.Error(codes.Unavailable, fmt.Sprintf("the state of the job did not come into the log of "+
		"the cluster: %s", rpc.Message(err))))
}

// confirm returns an error unless this lighthouse may answer now: it serves alone, or leads its cluster.
func (s *Server) confirm() error { return s.cluster.check(context.Background()) }

// Leads reports whether this lighthouse serves: it is alone, or leads its cluster.
func (s *Server) Leads(ctx context.Context) bool { return s.cluster.check(ctx) == nil }
