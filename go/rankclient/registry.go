package rankclient

import (
	"sync"

	"github.com/torchft/torchft/go/internal/rpc"
)

// local has the servers of this process by their announced address, so that group rank 0, which runs in the same process as its server,
// needs no network.
var local registry

type registry struct {
	mu      sync.Mutex
	servers map[place]*shortcut
}

// place is an address in a network. Tests have several networks in one process.
type place struct {
	network rpc.Network
	address string
}

type shortcut struct{ connect func() Calls }

func at(network rpc.Network, address string) place {
	if network == nil {
		network = rpc.TCP
	}
	return place{network, address}
}

// Register lets clients in this process call the server at an address directly, until unregister is called. connect returns the
// Calls for one client.
func Register(network rpc.Network, address string, connect func() Calls) (unregister func()) {
	return local.add(at(network, address), &shortcut{connect})
}

// add keeps the first of two servers at one place. Two servers can announce the same address if they listen on different
// interfaces; the address is ambiguous in the network, too.
func (r *registry) add(key place, server *shortcut) (remove func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.servers == nil {
		r.servers = map[place]*shortcut{}
	}
	if r.servers[key] == nil {
		r.servers[key] = server
	}
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.servers[key] == server {
			delete(r.servers, key)
		}
	}
}

// connect returns nil if no server of this process has the address.
func (r *registry) connect(network rpc.Network, address string) Calls {
	r.mu.Lock()
	server := r.servers[at(network, address)]
	r.mu.Unlock()
	if server == nil {
		return nil
	}
	return server.connect()
}
