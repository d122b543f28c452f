package replica

// Store is the disk of a node.
type Store = store

// With replaces the disk of the nodes that are opened with the settings.
func (c Config) With(open func(dir string) (Store, error)) Config {
	c.open = open
	return c
}

// OpenStore opens the disk that nodes have.
func OpenStore(c Config) func(dir string) (Store, error) {
	return func(dir string) (Store, error) { return openStore(dir, c.Logger) }
}

// Snapshot makes a snapshot now, if the node is in a cluster.
func (n *Node) Snapshot() error {
	n.mu.Lock()
	r := n.raft
	n.mu.Unlock()
	if r == nil {
		return nil
	}
	return r.Snapshot().Error()
}
