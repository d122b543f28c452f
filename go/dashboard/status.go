package dashboard

import "github.com/torchft/torchft/go/quorum"

// Status is the state of a job: that of its machine, and what else the lighthouse knows.
type Status struct {
	quorum.Status
	Members []Member `json:"members"` // instead of those of the machine, which is nil

	// Why the latest state is not on the lighthouse's disk, and for how long. Empty if the state is on the
	// disk, or if no state is kept.
	Unkept   string `json:"unkept,omitempty"`
	UnkeptMS int64  `json:"unkept_ms,omitempty"`

	Snapshots Snapshots `json:"snapshots"`

	// The newest event of each kind that neither members nor the other fields show (History.Notices).
	Notices []Event `json:"notices,omitempty"`
}

// Snapshots says what the keepers of a job's hosts hold.
type Snapshots struct {
	Hosts      int    `json:"hosts"`          // whose keepers have told within the last ten seconds
	Step       *int64 `json:"step,omitempty"` // newest with all ranks; nil: there is none
	Bytes      int64  `json:"bytes"`          // of all slots
	Incomplete int    `json:"incomplete"`     // slots that hold nothing to restore
	// Newest complete checkpoint on disk that a writer knows; nil: there is none.
	Checkpoint *int64 `json:"checkpoint,omitempty"`
	// Why a host writes no checkpoint, and for how long; empty: each that is due gets on. If several have a
	// problem, it is that of the host that has had one for longest.
	Problem   string `json:"problem,omitempty"`
	ProblemMS int64  `json:"problem_ms,omitempty"`
}

// Member is one replica group in Status.
type Member struct {
	quorum.MemberStatus
	// Received and total bytes of the state that it heals from, if the group reports them.
	HealReceived int64 `json:"heal_received,omitempty"`
	HealTotal    int64 `json:"heal_total,omitempty"`
}
