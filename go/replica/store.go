package replica

// store is the disk of a node.
type store interface{}
