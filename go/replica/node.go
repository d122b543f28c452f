package replica

import (
	"context"
	"errors"
	"net"
	"time"
)

// Node is a lighthouse in a cluster.
type Node struct{ leads chan Lead }

var errSkeleton = errors.New("not built yet")

// Open starts a node, and returns without waiting for the others. It returns an error if the directory cannot be used: it belongs to
// another lighthouse or cluster, to another process, or is damaged. Serve Identity and Accept from then on (Register does).
//
// A node with an empty directory asks the others of the list. If all of them are new, the first of the list starts the cluster. If one is
// in a cluster, this node waits to be added to that cluster.
func Open(ctx context.Context, cfg Config) (*Node, error) { return nil, errSkeleton }

// Identity returns what this node tells about itself.
func (n *Node) Identity() Identity { return Identity{} }

// Accept takes a connection of another node, and returns when the handshake has ended. The node closes the connection.
func (n *Node) Accept(conn net.Conn) {}

// Leadership returns a channel with the newest Lead, if it was not received yet. States is complete when Lead.Leads is true. A new term may
// follow without a Lead that ends the one before.
func (n *Node) Leadership() <-chan Lead { return n.leads }

// Leader returns the address of the leader, empty if none is known, and since when.
func (n *Node) Leader() (address string, since time.Time) { return "", time.Time{} }

// Verify returns nil if this node leads in the term at this moment: a majority has confirmed it within Timing.Lease, measured by a clock
// that goes on while the host is suspended. Otherwise it asks the others. The error is ErrNotLeading or that of ctx.
func (n *Node) Verify(ctx context.Context, term uint64) error { return errSkeleton }

// Propose replaces the state of a job on all nodes, or removes it if the state is empty. It returns nil when a majority has it on disk,
// ErrNotLeading if no node has it or ever will, and ErrUnknown otherwise. It ends within 10 s.
func (n *Node) Propose(term uint64, job string, state []byte) error { return errSkeleton }

// States returns the states of all jobs that are not removed. Do not change them.
func (n *Node) States() map[string][]byte { return nil }

// Add adds the lighthouse at an address to the cluster, as a voter. It must run, with an empty state directory and a list that has a
// lighthouse of this cluster.
func (n *Node) Add(ctx context.Context, address string) error { return errSkeleton }

// Remove removes the lighthouse at an address from the cluster.
func (n *Node) Remove(ctx context.Context, address string) error { return errSkeleton }

// Status describes the node and its cluster.
func (n *Node) Status() Status { return Status{} }

// Close stops the node.
func (n *Node) Close() {}

// Recover makes the lighthouse of cfg the only one of a new cluster with the states of its directory, which no other process may use. The
// others have to be added with empty state directories. It is for a cluster whose majority is lost for good: what only the lost ones had is
// lost, and what was proposed but not yet kept may be kept now.
func Recover(cfg Config) error { return errSkeleton }
