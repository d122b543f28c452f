package heal

// Role is what a source is for a target.
type Role int

const (
	// Assigned is the source that the quorum names: its state is the one that is fetched.
	Assigned Role = iota
	// Additional sources give only blocks that have the checksum that the assigned one announces.
	Additional

	roles
)
