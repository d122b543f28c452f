package gossip

import (
	"encoding/json"

	"github.com/hashicorp/memberlist"

	"github.com/torchft/torchft/go/gossip/agree"
	"github.com/torchft/torchft/go/internal/rpc"
)

// encoded returns the JSON of a value of strings and numbers only, so that encoding cannot fail.
func encoded(v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return text
}

// delegate implements memberlist.Delegate. Its methods neither block nor panic, since they run on
// memberlist's goroutines.
type delegate struct{ n *Node }

func (d delegate) NodeMeta(int) []byte {
	var err error // set by a panic, and logged then
	defer rpc.Recovered(d.n.log, "gossip metadata", &err)
	d.n.mu.Lock()
	defer d.n.mu.Unlock()
	return metadata(d.n.id, d.n.machine.Note())
}

func (delegate) NotifyMsg([]byte) {}

func (delegate) GetBroadcasts(int, int) [][]byte { return nil }

func (d delegate) LocalState(bool) []byte {
	var err error // set by a panic, and logged then
	defer rpc.Recovered(d.n.log, "gossip state", &err)
	d.n.mu.Lock()
	defer d.n.mu.Unlock()
	return encoded(d.n.machine.Known())
}

func (d delegate) MergeRemoteState(text []byte, _ bool) {
	var err error // set by a panic, and logged then
	defer rpc.Recovered(d.n.log, "gossip state", &err)
	var known agree.Known
	if err := json.Unmarshal(text, &known); err != nil {
		d.n.log.Debug("torchft: gossip received an unknown state", "error", err)
		return
	}
	d.n.step(func(m *agree.Machine) { m.Learn(known) })
}

// events implements memberlist.EventDelegate: memberlist reports changes of other nodes, and of this node,
// while it holds a lock.
type events struct{ n *Node }

func (e events) NotifyJoin(node *memberlist.Node)   { e.handle(node, true) }
func (e events) NotifyUpdate(node *memberlist.Node) { e.handle(node, true) }
func (e events) NotifyLeave(node *memberlist.Node)  { e.handle(node, false) }

func (e events) handle(node *memberlist.Node, alive bool) {
	n := e.n
	var err error // set by a panic, and logged then
	defer rpc.Recovered(n.log, "gossip event", &err)
	var s nodeMetadata
	if node.Name == n.name || json.Unmarshal(node.Meta, &s) != nil {
		return // this node itself, or a node that is no member
	}
	n.step(func(machine *agree.Machine) {
		if delete(n.failed, node.Address()); alive {
			n.peers[node.Name] = peer{s.ID, agree.Peer{Note: s.Note, At: node.Address()}}
		} else if delete(n.peers, node.Name); !s.Left {
			for address := range n.failed {
				if len(n.failed) < mostFailed {
					break
				}
				delete(n.failed, address) // any: each member of the other side is enough to heal a partition
			}
			n.failed[node.Address()] = true
		}
		seen := make(map[agree.ID]agree.Peer, len(n.peers))
		for _, p := range n.peers {
			seen[p.ID] = p.Peer
		}
		machine.See(seen)
	})
}
