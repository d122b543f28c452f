package replica

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/torchft/torchft/go/internal/rpc"
)

const (
	askFirst   = 200 * time.Millisecond // between two rounds of questions, until the node takes part
	askLater   = time.Second            // from then on
	leaderless = 5 * time.Second        // after this time without a leader, that is a trouble
	// the lighthouses of a cluster start within this time: no trouble is logged before
	starting = 5 * time.Second
)

// identityKey is where the Identity is among the votes of Raft.
var identityKey = []byte("TorchftIdentity")

func newID() string { return rand.Text()[:12] }

// openDir opens the disk of the node, and reads its identity there. A new node gets an instance.
func (n *Node) openDir() error {
	opened, err := get(n.disk, "opening it", func() (store, error) {
		if err := os.MkdirAll(n.cfg.Dir, 0o700); err != nil {
			return nil, err
		}
		if n.cfg.open != nil {
			return n.cfg.open(n.cfg.Dir)
		}
		return openStore(n.cfg.Dir, n.log)
	})
	if err != nil {
		return err
	}
	n.disk.store = opened
	if err = n.readIdentity(); err != nil {
		_ = n.disk.Close()
	}
	return err
}

func (n *Node) readIdentity() error {
	id := Identity{Self: n.cfg.Self, Instance: newID()}
	text, err := n.disk.Get(identityKey)
	switch {
	case err == nil:
		err = json.Unmarshal(text, &id)
	case isNotFound(err):
		var used bool
		if used, err = raft.HasExistingState(n.disk, n.disk, n.disk); used {
			err = errors.New("it has a log or snapshots, but not the identity of this lighthouse: use an " +
				"empty directory, remove this lighthouse from the cluster, and add it again")
		}
	}
	if err == nil && id.Self != n.cfg.Self {
		err = fmt.Errorf("it belongs to the lighthouse %s, and this one is %s: each needs a directory of "+
			"its own", id.Self, n.cfg.Self)
	}
	if err != nil {
		return err
	}
	id.List = n.cfg.Cluster
	n.identity = id
	if text == nil {
		return n.enter("") // the instance is on disk before others learn it
	}
	return nil
}

// enter makes the node one of a cluster, on disk.
func (n *Node) enter(cluster string) error {
	id := n.Identity()
	id.Cluster = cluster
	text, err := json.Marshal(id)
	if err == nil {
		err = n.disk.Set(identityKey, text)
	}
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.identity = id
	return nil
}

// answer is what a lighthouse answered to the last question for its identity.
type answer struct {
	Identity
	err error
}

// askOften asks all lighthouses for their identity, again and again: to find the cluster, then for Status.
func (n *Node) askOften() {
	for {
		heard := n.ask()
		n.mu.Lock()
		n.heard = heard
		started := n.raft != nil
		n.mu.Unlock()
		look, pause := n.find, askFirst
		if started {
			look = n.judge
			n.noteSilent(heard)
			n.replaceLost(heard)
		}
		trouble := look(heard)
		n.note(trouble)
		if started && trouble == "" {
			pause = askLater
		}
		select {
		case <-n.ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// ask returns the answers of the lighthouses in the list and in the cluster.
func (n *Node) ask() map[string]answer {
	addresses := append(slices.Clone(n.cfg.Cluster), n.members()...)
	slices.Sort(addresses)
	heard := map[string]answer{}
	var mu sync.Mutex
	var all sync.WaitGroup
	ctx, cancel := context.WithTimeout(n.ctx, callTimeout)
	defer cancel()
	for _, address := range slices.Compact(addresses) {
		rpc.Go(&all, n.log, "an identity", func() {
			id, err := n.dialer.identify(ctx, address)
			mu.Lock()
			defer mu.Unlock()
			heard[address] = answer{id, err}
		})
	}
	all.Wait()
	return heard
}

// sharesAddress returns why the answer under this node's own address cannot be its own.
func (n *Node) sharesAddress(heard map[string]answer) string {
	if own := heard[n.cfg.Self]; own.err == nil && own.Instance != n.Identity().Instance {
		return fmt.Sprintf("another lighthouse, %s (instance %s), answers at the address of this one, %s: "+
			"each needs an address of its own", own.Self, own.Instance, n.cfg.Self)
	}
	return ""
}

// find looks for the cluster of a new node, and starts Raft when it is known. It returns what prevents that.
func (n *Node) find(heard map[string]answer) (trouble string) {
	if shared := n.sharesAddress(heard); shared != "" {
		return shared
	}
	heard = maps.Clone(heard)
	heard[n.cfg.Self] = answer{Identity: n.Identity()} // it need not reach itself
	found, from, silent := "", "", []string{}
	for _, address := range n.cfg.Cluster {
		a := heard[address]
		switch {
		case a.err != nil:
			silent = append(silent, fmt.Sprintf("%s (%s)", address, rpc.Message(a.err)))
		case a.Cluster != "" && found != "" && a.Cluster != found:
			return fmt.Sprintf("%s and %s are in different clusters, %s and %s: --cluster must name one",
				from, address, found, a.Cluster)
		case a.Cluster != "":
			found, from = a.Cluster, address
		}
	}
	if found != "" {
		return n.join(found, nil)
	}
	for _, address := range n.cfg.Cluster {
		if a := heard[address]; a.err == nil && !slices.Equal(a.List, n.cfg.Cluster) {
			return fmt.Sprintf("%s was started with --cluster %s, and this lighthouse with --cluster %s: "+
				"all must have the same", address,
				strings.Join(a.List, ","), strings.Join(n.cfg.Cluster, ","))
		}
	}
	switch {
	case len(silent) > 0:
		return "a new cluster waits for all its lighthouses; missing: " + strings.Join(silent, "; ")
	case n.cfg.Self != n.cfg.Cluster[0]:
		return "a new cluster waits for its first lighthouse, " + n.cfg.Cluster[0]
	}
	var members []raft.Server
	for _, address := range n.cfg.Cluster {
		name := nameOf(address, heard[address].Instance)
		members = append(members, raft.Server{ID: raft.ServerID(name), Address: raft.ServerAddress(name)})
	}
	return n.join(newID(), members)
}

// join starts Raft in a cluster, which is new if there are members.
func (n *Node) join(cluster string, members []raft.Server) (trouble string) {
	if members != nil {
		_, transport := raft.NewInmemTransport(raft.ServerAddress(n.name))
		// Before the identity is written: others wait for this node until it has a cluster.
		err := raft.BootstrapCluster(n.raftConfig(), n.disk, n.disk, n.disk, transport,
			raft.Configuration{Servers: members})
		if err != nil && !errors.Is(err, raft.ErrCantBootstrap) { // it was interrupted before
			return err.Error()
		}
	}
	err := n.enter(cluster)
	if err == nil {
		err = n.start()
	}
	if err != nil {
		n.leave(err)
		return err.Error()
	}
	n.mu.Lock()
	n.trouble, n.told = "", "" // the next line says that it has ended
	n.mu.Unlock()
	n.log.Info("torchft: this lighthouse is in a cluster", "cluster", cluster, "new", members != nil,
		"self", n.cfg.Self)
	if members == nil {
		return "it does not know the members of the cluster yet" // it may be none
	}
	return ""
}

// judge returns why a node takes no part in its cluster.
func (n *Node) judge(heard map[string]answer) (trouble string) {
	if shared := n.sharesAddress(heard); shared != "" {
		return shared
	}
	own, elsewhere, other := n.Identity().Cluster, 0, ""
	for address, a := range heard {
		if a.err == nil && a.Cluster != "" && a.Cluster != own && slices.Contains(n.cfg.Cluster, address) {
			elsewhere, other = elsewhere+1, a.Cluster
		}
	}
	if 2*elsewhere > len(n.cfg.Cluster) {
		return fmt.Sprintf("--state_dir is %q, which belongs to the cluster %s: most lighthouses of "+
			"--cluster are in %s", n.cfg.Dir, own, other)
	}
	for _, s := range n.servers() {
		switch {
		case string(s.ID) == n.name && s.Suffrage == raft.Nonvoter:
			return "it takes over the log, and has no vote yet" // until then none of the others may end
		case string(s.ID) == n.name:
			return n.lacksLeader(heard)
		case addressOf(s.ID) == n.cfg.Self:
			return "the cluster knows this lighthouse with a state directory that it has lost, until its " +
				"leader has replaced it"
		}
	}
	return fmt.Sprintf("this lighthouse is not in the cluster: it waits for its leader, which replaces one "+
		"that has lost its state directory, or for `torchft cluster add %s`", n.cfg.Self)
}

// replaceLost makes, on the leader, the next change for a lighthouse that has lost its directory.
func (n *Node) replaceLost(heard map[string]answer) {
	what, lost := nextChange(n.servers(), n.Identity().Cluster, heard)
	n.mu.Lock()
	leads := n.lead.Leads
	n.mu.Unlock()
	if what == "" || !leads {
		return
	}
	ctx, cancel := context.WithTimeout(n.ctx, callTimeout)
	defer cancel()
	err := n.change(ctx, what, func(r *raft.Raft) raft.Future {
		id, address := lost.ID, raft.ServerAddress(lost.ID)
		switch what {
		case "learn":
			return r.AddNonvoter(id, address, 0, callTimeout)
		case "remove":
			return r.RemoveServer(id, 0, callTimeout)
		}
		return r.AddVoter(id, address, 0, callTimeout)
	})
	n.log.Warn("torchft: a lighthouse that has lost its state directory is replaced",
		"lighthouse", addressOf(lost.ID), "change", what, "server", lost.ID, "error", err)
}

// nextChange returns the next change of the members for a lighthouse that answers at its address, in this
// cluster, as another instance than the one that votes there: its directory is lost. The new instance becomes
// a member without a vote, the lost one is removed, and the new one gets the vote. Each change follows from
// the members alone, so that a later leader goes on. At no time does a majority need more lighthouses than
// before, nor the new one before it has the log. A lighthouse that was removed on request stays removed.
func nextChange(servers []raft.Server, cluster string, heard map[string]answer) (what string, s raft.Server) {
	for _, lost := range servers {
		address := addressOf(lost.ID)
		a := heard[address]
		if a.err != nil || a.Cluster != cluster || a.Self != address {
			continue
		}
		now := raft.ServerID(nameOf(address, a.Instance))
		at := slices.IndexFunc(servers, func(s raft.Server) bool { return s.ID == now })
		switch {
		case lost.ID != now && at < 0:
			return "learn", raft.Server{ID: now}
		case lost.ID != now:
			return "remove", lost
		case lost.Suffrage == raft.Nonvoter && !slices.ContainsFunc(servers, func(s raft.Server) bool {
			return s.ID != now && addressOf(s.ID) == address
		}):
			return "vote", lost
		}
	}
	return "", raft.Server{}
}

// lacksLeader returns why a member of the cluster has had no leader for long.
func (n *Node) lacksLeader(heard map[string]answer) (trouble string) {
	if leader, since := n.Leader(); leader != "" || time.Since(since) < leaderless {
		return ""
	}
	var silent []string
	for _, address := range n.members() {
		if heard[address].err != nil && address != n.cfg.Self {
			silent = append(silent, address)
		}
	}
	if len(silent) == 0 {
		return fmt.Sprintf("no leader is known, though all lighthouses answer: this one was removed from "+
			"the cluster (`torchft cluster add %s` adds it again), or the connections between them fail",
			n.cfg.Self)
	}
	return "no leader is known; these lighthouses do not answer: " + strings.Join(silent, ", ")
}

// note keeps the trouble of a round, and logs it when two rounds have found it and the node no longer starts.
func (n *Node) note(trouble string) {
	n.mu.Lock()
	same := trouble == n.trouble && trouble != n.told && n.stopped == nil && time.Since(n.began) >= starting
	n.trouble = trouble
	if same {
		n.told = trouble
	}
	n.mu.Unlock()
	switch {
	case !same:
	case trouble == "":
		n.log.Info("torchft: this lighthouse takes part in the cluster", "self", n.cfg.Self)
	default:
		n.log.Warn("torchft: this lighthouse takes no part in a cluster", "self", n.cfg.Self,
			"reason", trouble)
	}
}

// noteSilent logs once that a lighthouse of the cluster has not answered two rounds of questions, and once
// that it answers again.
func (n *Node) noteSilent(heard map[string]answer) {
	members := n.members()
	n.mu.Lock()
	defer n.mu.Unlock()
	maps.DeleteFunc(n.silent, func(address string, _ int) bool { return !slices.Contains(members, address) })
	for _, address := range members {
		a, asked := heard[address]
		switch {
		case !asked || address == n.cfg.Self || n.stopped != nil:
		case a.err != nil:
			if n.silent[address]++; n.silent[address] == 2 {
				n.log.Warn("torchft: a lighthouse of the cluster does not answer", "lighthouse", address,
					"error", rpc.Message(a.err))
			}
		default:
			if n.silent[address] >= 2 {
				n.log.Info("torchft: a lighthouse of the cluster answers again", "lighthouse", address)
			}
			delete(n.silent, address)
		}
	}
}

// refused logs a connection between this node and a peer that one of them refused, once for each reason.
func (n *Node) refused(peer string, err error) {
	n.mu.Lock()
	known := n.warned[peer] == err.Error()
	if len(n.warned) < 100 { // an unauthenticated peer may send any name
		n.warned[peer] = err.Error()
	}
	n.mu.Unlock()
	if !known {
		n.log.Warn("torchft: a connection between lighthouses was refused", "peer", peer, "reason", err)
	}
}

// Status describes the node and its cluster.
func (n *Node) Status() Status {
	servers := n.servers()
	leader, since := n.Leader()
	n.mu.Lock()
	defer n.mu.Unlock()
	s := Status{Self: n.cfg.Self, Leader: leader, SinceMS: time.Since(since).Milliseconds(),
		Trouble: n.trouble}
	if n.stopped != nil {
		s.Trouble = n.stopped.Error()
	}
	if n.raft != nil {
		s.Term = n.raft.CurrentTerm()
	}
	add := func(address, instance string, voter bool) {
		a, asked := n.heard[address]
		reached := asked && a.err == nil && (instance == "" || a.Instance == instance)
		s.Members = append(s.Members, Member{Address: address, Leads: voter && address == leader,
			Voter: voter, Reached: reached || address == n.cfg.Self})
	}
	var named []string
	for _, server := range servers {
		address, instance, _ := strings.Cut(string(server.ID), "#")
		named = append(named, address)
		add(address, instance, server.Suffrage == raft.Voter)
	}
	for _, address := range n.cfg.Cluster {
		if !slices.Contains(named, address) {
			add(address, "", false)
		}
	}
	slices.SortFunc(s.Members, func(a, b Member) int { return strings.Compare(a.Address, b.Address) })
	return s
}

// Add adds the lighthouse at an address to the cluster, as a voter. It must run, with an empty state
// directory and a list that has a lighthouse of this cluster.
func (n *Node) Add(ctx context.Context, address string) error {
	if _, err := rpc.ParseAddress("the address", address); err != nil {
		return err
	}
	own := n.Identity().Cluster
	id, err := n.dialer.identify(ctx, address)
	for err == nil && id.Cluster == "" { // a new lighthouse learns the id of the cluster soon
		select {
		case <-time.After(askFirst):
			id, err = n.dialer.identify(ctx, address)
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err != nil {
			return fmt.Errorf("adding %s: it does not know this cluster yet: its --cluster must name a "+
				"lighthouse of it, and not others: %s", address, rpc.Message(err))
		}
	}
	if err != nil {
		return fmt.Errorf("adding %s: it does not answer: %s", address, rpc.Message(err))
	}
	switch {
	case id.Self != address:
		return fmt.Errorf("adding %s: the lighthouse at this address is %s: add that one", address, id.Self)
	case id.Cluster != own:
		return fmt.Errorf("adding %s: it is in the cluster %s, and this one is %s: start it with an empty "+
			"state directory", address, id.Cluster, own)
	}
	name := nameOf(address, id.Instance)
	for _, s := range n.servers() {
		switch {
		case string(s.ID) == name:
			return nil
		case addressOf(s.ID) == address:
			return fmt.Errorf("adding %s: it has lost its state directory, and the leader replaces it by "+
				"itself", address)
		}
	}
	return n.change(ctx, "adding "+address, func(r *raft.Raft) raft.Future {
		return r.AddVoter(raft.ServerID(name), raft.ServerAddress(name), 0, callTimeout)
	})
}

// Remove removes the lighthouse at an address from the cluster.
func (n *Node) Remove(ctx context.Context, address string) error {
	servers := n.servers()
	i := slices.IndexFunc(servers, func(s raft.Server) bool { return addressOf(s.ID) == address })
	switch {
	case i < 0:
		return fmt.Errorf("removing %s: it is not in the cluster, which has %s", address,
			strings.Join(n.members(), ", "))
	case len(servers) == 1:
		return fmt.Errorf("removing %s: it is the only lighthouse of the cluster", address)
	}
	return n.change(ctx, "removing "+address, func(r *raft.Raft) raft.Future {
		return r.RemoveServer(servers[i].ID, 0, callTimeout)
	})
}

// change changes the members of the cluster, on the leader.
func (n *Node) change(ctx context.Context, what string, how func(*raft.Raft) raft.Future) error {
	r, done, err := n.call(0)
	if err == nil {
		err = await(ctx, done, how(r))
	}
	if errors.Is(err, raft.ErrNotLeader) || errors.Is(err, raft.ErrLeadershipLost) {
		err = ErrNotLeading
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}
