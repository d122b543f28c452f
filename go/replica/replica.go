package replica

import (
	"errors"
	"log/slog"
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
)

// Config are the settings of a node.
type Config struct {
	Cluster []string    // the addresses of all lighthouses, from ParseCluster
	Self    string      // which of them is this one
	Dir     string      // for the log, snapshots and the identity; required, and only for this node
	Dialing rpc.Dialing // of connections to the others
	Logger  *slog.Logger

	open func(dir string) (store, error) // the disk; tests replace it
}

// The timeouts of a cluster: all of its lighthouses must have the same.
const (
	// electionTimeout is how long a follower does not hear of the leader before it asks the others whether
	// they would elect it; the actual time is between one and two times this. With 300 ms, nine of ten killed
	// leaders are replaced within 0.8 s.
	electionTimeout = 300 * time.Millisecond
	// leaderLease is how long a leader goes on that does not hear of a majority: less than electionTimeout.
	leaderLease = 200 * time.Millisecond
	// callTimeout bounds each call to another lighthouse.
	callTimeout = time.Second
	// diskTimeout bounds each operation on the disk. One that does not answer in this time counts as failed.
	diskTimeout = 2 * time.Second
)

// Identity is what a lighthouse tells about itself.
type Identity struct {
	Cluster  string   `json:"cluster"`  // the id of its cluster; empty before the first start of the cluster
	Self     string   `json:"self"`     // its address
	Instance string   `json:"instance"` // a random id that is kept in its state directory
	List     []string `json:"list"`     // the addresses that it was started with
}

// Lead tells whether a node leads.
type Lead struct {
	Leads bool
	Term  uint64 // of the leader; it is larger than all terms before
}

// Status describes a node and its cluster, for people.
type Status struct {
	Self    string   `json:"self"`
	Leader  string   `json:"leader"`   // empty: none is known
	SinceMS int64    `json:"since_ms"` // for how long this leader, or none, has been known
	Term    uint64   `json:"term"`
	Members []Member `json:"members"` // ordered by address
	Trouble string   `json:"trouble"` // why this node takes no part; empty if it does
}

// Member is a lighthouse of the cluster.
type Member struct {
	Address string `json:"address"`
	Leads   bool   `json:"leads"`
	Voter   bool   `json:"voter"`   // false: it is in the list of this node, but not in the cluster
	Reached bool   `json:"reached"` // it answered this node within the last seconds
}

var (
	// ErrNotLeading is the error of Verify, Propose, Add and Remove if this node does not lead, or no longer
	// in the given term.
	ErrNotLeading = errors.New("this lighthouse does not lead the cluster")
	// ErrUnknown is the error of Propose if the leadership was lost, or the deadline passed, before the
	// outcome was known: the state may be kept or not. If it is kept, every later leader has it.
	ErrUnknown = errors.New("the outcome of the proposal is unknown")
)
