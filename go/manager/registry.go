package manager

import (
	"sync"

	"github.com/torchft/torchft/go/internal/rpc"
)

// local finds the servers of this process by their announced address, so that group rank 0, which lives in
// the same process as its server, needs no network.
var local registry

type registry struct {
	mu      sync.Mutex
	servers map[place]*Server
}

// place is an address in a network: tests run many networks in one process.
type place struct {
	network rpc.Network
	address string
}

func at(network rpc.Network, address string) place {
	if network == nil {
		network = rpc.TCP
	}
	return place{network, address}
}

func (r *registry) add(s *Server) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.servers == nil {
		r.servers = map[place]*Server{}
	}
	// Two servers can announce one address when they listen on different interfaces. The network knows which
	// is meant as little as we do; the first one stays.
	if key := at(s.cfg.Network, s.address); r.servers[key] == nil {
		r.servers[key] = s
	}
}

func (r *registry) remove(s *Server) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if key := at(s.cfg.Network, s.address); r.servers[key] == s {
		delete(r.servers, key)
	}
}

func (r *registry) find(network rpc.Network, address string) *Server {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.servers[at(network, address)]
}
