package gossip

import (
	"encoding/json"
	"maps"
	"slices"
	"sync"

	"github.com/hashicorp/memberlist"

	"github.com/torchft/torchft/go/gossip/agree"
	"github.com/torchft/torchft/go/internal/rpc"
)

// message is any message between members except a note. It has Left alone, or any of Proposal and Lives.
type message struct {
	Proposal *agree.Proposal  `json:"proposal,omitempty"`
	Left     *nodeMetadata    `json:"left,omitempty"`
	Lives    map[string]int64 `json:"lives,omitempty"` // sent to a joining member, and by it
}

// encoded returns the JSON of a value that consists of strings and numbers only, so that encoding cannot fail.
func encoded(v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return text
}

// send sends a message to several nodes concurrently. The returned channel is closed when each of them has received it or could not
// be reached.
func (n *Node) send(m message, to []memberlist.Node) (done <-chan struct{}) {
	text := encoded(m)
	sent := make(chan struct{})
	var group sync.WaitGroup
	for i := range to {
		rpc.Go(&group, n.log, "gossip send", func() {
			if err := n.list.SendReliable(&to[i], text); err != nil {
				n.log.Debug("torchft: gossip could not send", "to", to[i].Name, "error", err)
			}
		})
	}
	rpc.Go(&n.tasks, n.log, "gossip sent", func() {
		group.Wait()
		close(sent)
	})
	return sent
}

// nodes returns the nodes of these members; nil: of all members.
func (n *Node) nodes(of []agree.ID) (found []memberlist.Node) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, p := range n.peers {
		if of == nil || slices.Contains(of, p.id) {
			found = append(found, p.node)
		}
	}
	return found
}

func (n *Node) receive(text []byte) {
	var err error // set by a panic, and logged then
	defer rpc.Recovered(n.log, "gossip message", &err)
	var m message
	if err := json.Unmarshal(text, &m); err != nil {
		n.log.Debug("torchft: gossip received an unknown message", "error", err)
		return
	}
	n.step(func(machine *agree.Machine) {
		machine.Learn(m.Lives)
		if m.Proposal != nil && !machine.Hear(*m.Proposal) {
			n.log.Debug("torchft: gossip received an invalid proposal", "number", m.Proposal.View.Number)
		}
		if m.Left != nil {
			machine.MemberLeft(m.Left.ID, m.Left.Note)
		}
	})
}

// delegate implements memberlist.Delegate. Its methods neither block nor panic, since they run on memberlist's goroutines.
type delegate struct{ n *Node }

func (d delegate) NodeMeta(int) []byte {
	var err error // set by a panic, and logged then
	defer rpc.Recovered(d.n.log, "gossip metadata", &err)
	d.n.mu.Lock()
	defer d.n.mu.Unlock()
	return metadata(d.n.id, d.n.machine.Note())
}

func (d delegate) NotifyMsg(text []byte) {
	d.n.receive(text)
}

func (delegate) GetBroadcasts(int, int) [][]byte { return nil }

func (d delegate) LocalState(join bool) []byte {
	var err error // set by a panic, and logged then
	defer rpc.Recovered(d.n.log, "gossip state", &err)
	d.n.mu.Lock()
	defer d.n.mu.Unlock()
	var m message
	if join {
		m.Lives = d.n.machine.Lives()
	}
	if proposal, found := d.n.machine.Proposal(); found {
		m.Proposal = &proposal
	}
	return encoded(m)
}

func (d delegate) MergeRemoteState(text []byte, _ bool) {
	d.n.receive(text)
}

// events implements memberlist.EventDelegate: memberlist reports changes of other nodes, and of this node, while it holds a lock.
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
		p := peer{agree.Peer{Note: s.Note, At: node.Address()}, s.ID, *node}
		if delete(n.failed, node.Name); alive {
			n.peers[node.Name] = p
			maps.DeleteFunc(n.failed, p.replaces)
		} else if delete(n.peers, node.Name); !s.Left {
			for name := range n.failed {
				if len(n.failed) < mostFailed {
					break
				}
				delete(n.failed, name) // any entry: each member of the other side is enough to heal a partition
			}
			n.failed[node.Name] = p
		}
		seen := make(map[agree.ID]agree.Peer, len(n.peers))
		for _, p := range n.peers {
			seen[p.id] = p.Peer
		}
		machine.See(seen)
	})
}
