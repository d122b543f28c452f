// Package local lets the ranks in the process of their group's manager server call it without a network.
// Group rank 0 is one of them.
package local

import (
	"cmp"
	"context"
	"sync"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

// Calls are the operations of a rank at its group's manager server, over the network or within the process.
type Calls interface {
	Quorum(context.Context, *torchftpb.ManagerQuorumRequest) (*torchftpb.ManagerQuorumResponse, error)
	ShouldCommit(context.Context, *torchftpb.ShouldCommitRequest) (*torchftpb.ShouldCommitResponse, error)
	CheckpointMetadata(
		context.Context, *torchftpb.CheckpointMetadataRequest,
	) (*torchftpb.CheckpointMetadataResponse, error)
	// Leave announces that the group has completed its last step, and waits until its peers no longer need
	// its data. Each rank calls it.
	Leave(context.Context, *torchftpb.LeaveRequest) (*torchftpb.LeaveResponse, error)
	// Report sends a report, which is not answered. It does not block.
	Report(report *torchftpb.RankRequest)
	// Notices returns the channel of the notices that the server forwards from the lighthouse. It is nil if
	// the server forwards none.
	Notices() <-chan *torchftpb.Notice
	Close() error
}

// servers has the servers of this process: *func() Calls by place.
var servers sync.Map

// place is an announced address in a network. Tests have several networks in one process.
type place struct {
	network rpc.Network
	address string
}

func at(network rpc.Network, address string) place {
	return place{cmp.Or(network, rpc.TCP), address}
}

// Register lets clients in this process call the server at an address directly, until unregister is called.
// connect returns the Calls for one client. Of two servers at one place, the first stays: two servers can
// announce the same address if they listen on different interfaces; the address is ambiguous in the network,
// too.
func Register(network rpc.Network, address string, connect func() Calls) (unregister func()) {
	servers.LoadOrStore(at(network, address), &connect)
	return func() { servers.CompareAndDelete(at(network, address), &connect) }
}

// Connect returns the Calls of the server at an address, nil if no server of this process has it.
func Connect(network rpc.Network, address string) Calls {
	connect, found := servers.Load(at(network, address))
	if !found {
		return nil
	}
	return (*connect.(*func() Calls))()
}
