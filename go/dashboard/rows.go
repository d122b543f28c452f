package dashboard

import (
	"slices"
	"time"

	"github.com/torchft/torchft/go/quorum"
)

// State is the state of a member, as shown on the page.
type State string

// The states of a member.
const (
	Training State = "training" // in the quorum
	Waiting  State = "waiting"  // has asked for a quorum
	Joining  State = "joining"  // alive, and in no quorum yet
	Healing  State = "healing"  // in the quorum, and receives the state of a peer
	Suspect  State = "suspect"  // its connection broke a moment ago
	Stalled  State = "stalled"  // it makes no progress while the others wait for it
	Draining State = "draining" // asked to leave
	Standby  State = "standby"  // ready, and held back until a group fails
	Failed   State = "failed"
)

// Row is a member as the page shows it: its status, without what changes at each look.
type Row struct {
	Member
	State State `json:"state"`
	Since int64 `json:"since"` // when the state began, in milliseconds since 1970
	// time of a failed member's last sign of life, in milliseconds since 1970, rounded to seconds; else 0
	HeardOf int64 `json:"heard_of"`
}

// Head is the state of the job as a whole.
type Head struct {
	QuorumID int64 `json:"quorum_id"`
	// when the quorum got this id, in milliseconds since 1970; 0 before the first
	QuorumSince int64 `json:"quorum_since"`
	Groups      int   `json:"groups"` // in the quorum
	Healthy     int   `json:"healthy"`
	Waiting     int   `json:"waiting"`
	MinReplicas int   `json:"min_replicas"`
	Step        int64 `json:"step"`
	// duration of a step of all groups in the quorum; 0: unknown
	StepMicros int64 `json:"step_us"`
	// why there is no next quorum yet; empty unless a group waits for it longer than a step
	Reason  string `json:"reason"`
	Cluster bool   `json:"cluster,omitempty"` // whether GET /cluster describes lighthouses that agree
	// why the latest state is not on the lighthouse's disk; empty: it is, or none is kept
	Unkept  string `json:"unkept"`
	Keepers int    `json:"keepers,omitempty"` // hosts with snapshots, which GET /api/v1/keepers describes
}

// Change is the difference from one look to the next.
type Change struct {
	Head    Head     `json:"head"`
	Rows    []Row    `json:"rows"`
	Removed []string `json:"removed,omitempty"` // ids
	Point   *Point   `json:"point,omitempty"`   // the throughput until this look
}

// leastWait is how long a group must have waited for a quorum before the page shows why. Short steps differ
// by more than their median.
const leastWait = time.Second

// Board keeps the rows of the last look, to find changes. It is not safe for concurrent use.
type Board struct {
	cluster bool
	head    Head
	rows    map[string]Row
	order   []string // ids in the order of the status
}

// Look compares a status with the previous one, and returns the changes.
func (b *Board) Look(status Status, now time.Time) Change {
	before := b.rows
	b.rows = make(map[string]Row, len(status.Members))
	b.order = b.order[:0]
	b.head = headOf(b.head, status, now)
	b.head.Cluster = b.cluster
	change := Change{Head: b.head, Rows: []Row{}}
	for _, m := range status.Members {
		old := before[m.ReplicaID]
		row := follow(old, m, now)
		b.rows[m.ReplicaID] = row
		b.order = append(b.order, m.ReplicaID)
		if row != old {
			change.Rows = append(change.Rows, row)
		}
	}
	for id := range before {
		if _, still := b.rows[id]; !still {
			change.Removed = append(change.Removed, id)
		}
	}
	return change
}

// Whole returns all rows of the last look, for a new viewer.
func (b *Board) Whole() Change {
	whole := Change{Head: b.head, Rows: make([]Row, 0, len(b.order))}
	for _, id := range b.order {
		whole.Rows = append(whole.Rows, b.rows[id])
	}
	return whole
}

func headOf(old Head, s Status, now time.Time) Head {
	h := Head{
		QuorumID: s.QuorumID, Groups: len(s.Quorum), Healthy: s.Healthy, Waiting: s.Candidates,
		MinReplicas: s.MinReplicas, Step: s.MaxStep, StepMicros: s.StepTime.Microseconds(), Reason: s.Reason,
		Unkept: s.Unkept, Keepers: s.Snapshots.Hosts,
	}
	// In a healthy job, the first group that asks for a quorum waits for the others for less than a step.
	long := max(leastWait.Milliseconds(), s.MedianStepMS)
	if s.QuorumID != 0 && !slices.ContainsFunc(s.Members, func(m Member) bool { return m.WaitingMS > long }) {
		h.Reason = ""
	}
	switch s.QuorumID {
	case 0:
	case old.QuorumID:
		h.QuorumSince = old.QuorumSince
	default:
		h.QuorumSince = now.UnixMilli() - s.QuorumAgeMS
	}
	return h
}

func follow(old Row, m Member, now time.Time) Row {
	row := Row{Member: m, State: stateOf(m.MemberStatus), Since: old.Since}
	row.HeartbeatAgeMS, row.WaitingMS, row.PhaseMS, row.OwnMS = 0, 0, 0, 0
	if row.State == Failed {
		beat := now.Add(-time.Duration(m.HeartbeatAgeMS) * time.Millisecond)
		row.HeardOf = beat.Truncate(time.Second).UnixMilli()
	}
	if !m.InQuorum && !m.Waiting {
		row.Step = old.Step // the status has the steps of the latest quorum and of pending requests only
	}
	if old.State != row.State { // also of one that was not there
		row.Since = now.UnixMilli()
	}
	return row
}

func stateOf(m quorum.MemberStatus) State {
	switch {
	case m.Draining != "" && (m.Healthy || m.Out != ""):
		return Draining
	case m.Out == quorum.OnlyBeats:
		return Joining
	case !m.Healthy:
		return Failed
	case m.Suspect:
		return Suspect
	case m.Stalled != "":
		return Stalled
	case m.Healing:
		return Healing
	case m.InQuorum:
		return Training
	case m.Standby:
		return Standby
	case m.Waiting:
		return Waiting
	default:
		return Joining
	}
}
