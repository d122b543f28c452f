package heal

// Role determines which blocks a target takes from a source.
type Role int

const (
	// Assigned is the source that the quorum assigns to the target, which takes over its state.
	Assigned Role = iota
	// Additional is any other source. The target takes a block from it only if the block has the checksum
	// that the assigned source has announced.
	Additional

	roles
)
