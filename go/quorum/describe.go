package quorum

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Status is the state of a lighthouse for people and for dashboards. Durations are in milliseconds.
type Status struct {
	QuorumID    int64     `json:"quorum_id"` // of the latest quorum, 0 before the first
	Quorum      []string  `json:"quorum"`    // replica_ids of its members, in order
	QuorumAgeMS int64     `json:"quorum_age_ms"`
	Created     time.Time `json:"quorum_created,omitzero"`
	MaxStep     int64     `json:"max_step"`          // largest step of its members
	Stopped     string    `json:"stopped,omitempty"` // why the job stops, and is refused
	Ended       string    `json:"ended,omitempty"`   // the run whose training is complete
	Reason      string    `json:"reason"`            // why there is no next quorum yet
	Healthy     int       `json:"healthy"`
	Candidates  int       `json:"candidates"` // healthy members with a pending request
	Waiters     int       `json:"waiters"`    // pending requests
	// all that are alive, have a pending request, or are in the latest quorum
	Members []MemberStatus `json:"members"`

	MinReplicas        int   `json:"min_replicas"`
	MaxReplicas        int   `json:"max_replicas"` // 0: no limit
	JoinTimeoutMS      int64 `json:"join_timeout_ms"`
	HeartbeatTimeoutMS int64 `json:"heartbeat_timeout_ms"`

	MedianStepMS int64 `json:"median_step_ms"` // of the last steps, 0 before the second
	// the same, and 0 if the present step takes much longer
	StepTime time.Duration `json:"-"`
	// how long a step may take before a member without progress is reported
	StalledAfterMS int64 `json:"stalled_after_ms"`
	// how long a member may be in each phase while others wait for it, before it is evicted; missing:
	// it is not
	EjectAfterMS map[string]int64 `json:"eject_after_ms"`
}

// MemberStatus is one replica group in Status.
type MemberStatus struct {
	ReplicaID      string `json:"replica_id"`
	HeartbeatAgeMS int64  `json:"heartbeat_age_ms"`
	Healthy        bool   `json:"healthy"`
	InQuorum       bool   `json:"in_quorum"`
	Waiting        bool   `json:"waiting"`
	WaitingMS      int64  `json:"waiting_ms"` // since it became a candidate for the next quorum
	// Of its pending request or, without one, of its record in the latest quorum.
	Address        string  `json:"address,omitempty"`
	StoreAddress   string  `json:"store_address,omitempty"`
	Step           int64   `json:"step"`
	WorldSize      uint64  `json:"world_size"`
	CommitFailures int64   `json:"commit_failures"`
	ShrinkOnly     bool    `json:"shrink_only"`
	Stalled        string  `json:"stalled,omitempty"`   // its activity while the others wait for it
	Straggler      string  `json:"straggler,omitempty"` // by how much it is slower than the others
	OwnMS          float64 `json:"own_ms,omitempty"`    // of its work in a step
	Speed          int64   `json:"speed,omitempty"`     // by which the batch is cut; 0: equal ones
	Out            string  `json:"out,omitempty"`       // why it counts as failed until it asks again
	Suspect        bool    `json:"suspect,omitempty"`   // its connection broke a moment ago
	Standby        bool    `json:"standby,omitempty"`   // it asks, and is held back until a group fails
	// it is behind the others of its quorum, and receives their state
	Healing  bool   `json:"healing,omitempty"`
	Draining string `json:"draining,omitempty"` // who requested that it leaves
	// Its phase, and for how long; empty if it is not known: it waits for a quorum, or does not report it.
	Phase   string `json:"phase,omitempty"`
	PhaseMS int64  `json:"phase_ms,omitempty"`
}

// Describe returns the state at a time. It changes nothing: a member whose heartbeat has become too old since
// the last event counts as failed from the next tick on.
//
// Describe, InUse, Knows and StandsBy are the only queries; all other results of the machine are actions. The
// status is a query, since its ages depend on the time of the query, and since its cost grows with the number
// of groups. The shell only displays it.
func (m *Machine) Describe(now time.Time) Status {
	now = m.own(now)
	t := m.roster.tally(now)
	d := m.decide(t, now)
	s := Status{
		Quorum:             []string{},
		Stopped:            m.poison.verdict,
		Ended:              m.past.end.Run,
		Reason:             m.roster.explain(d),
		Healthy:            t.healthy,
		Candidates:         t.candidates,
		Members:            make([]MemberStatus, 0, len(m.roster.members)),
		MinReplicas:        m.policy.MinReplicas,
		MaxReplicas:        m.policy.MaxReplicas,
		JoinTimeoutMS:      m.policy.JoinTimeout.Milliseconds(),
		HeartbeatTimeoutMS: m.policy.HeartbeatTimeout.Milliseconds(),
		MedianStepMS:       m.watch.median().Milliseconds(),
		StepTime:           m.watch.usual(now),
		StalledAfterMS:     m.watch.timeout().Milliseconds(),
		EjectAfterMS:       map[string]int64{},
	}
	for _, p := range Phases() {
		if limit := m.policy.limit(p, &m.watch.learned); limit != never {
			s.EjectAfterMS[p.String()] = limit.Milliseconds()
		}
	}
	if d.cause == noRequest {
		if stands := m.standing.String(); stands != "" {
			s.Reason = stands
		}
	}
	last, speeds := map[string]Member{}, map[string]int64{}
	if q := m.past.latest; q != nil {
		s.QuorumID, s.Created, s.QuorumAgeMS = q.ID, q.Created, m.clock(now).Sub(q.Created).Milliseconds()
		cuts := q.HasSpeeds()
		for i, member := range q.Members {
			if cuts {
				speeds[member.ReplicaID] = q.Speeds[i]
			}
			s.Quorum = append(s.Quorum, member.ReplicaID)
			if r := m.roster.members[member.ReplicaID]; r != nil && m.standing.holds(r) {
				member.Step = max(member.Step, r.step)
			}
			s.MaxStep = max(s.MaxStep, member.Step)
			last[member.ReplicaID] = member
		}
	}
	for _, r := range m.roster.members {
		member := last[r.id]
		if r.waiting() {
			s.Waiters++
			member = *r.member()
		}
		ms := MemberStatus{
			ReplicaID:      r.id,
			HeartbeatAgeMS: now.Sub(r.lastBeat).Milliseconds(),
			Healthy:        r.alive(),
			InQuorum:       r.previous,
			Waiting:        r.waiting(),
			Address:        member.Address,
			StoreAddress:   member.StoreAddress,
			Step:           member.Step,
			WorldSize:      member.WorldSize,
			CommitFailures: member.CommitFailures,
			ShrinkOnly:     member.ShrinkOnly,
			Stalled:        m.watch.stalled[r.id],
			Straggler:      m.stragglers.slow[r.id],
			OwnMS:          float64(r.pace.Own) / 1e6,
			Speed:          speeds[r.id],
			Out:            r.out,
			Draining:       r.draining,
			Suspect:        r.suspect != nil,
			Standby:        r.held && r.waiting(),
			Healing: r.previous && !r.waiting() && r.alive() && !m.standing.holds(r) &&
				member.Step < s.MaxStep,
		}
		if r.candidate() {
			ms.WaitingMS = now.Sub(r.joined).Milliseconds()
		} else if is := r.occupation; r.alive() && is.Phase != Unsaid {
			ms.Phase, ms.PhaseMS = is.String(), (is.lasted + now.Sub(is.at)).Milliseconds()
		}
		s.Members = append(s.Members, ms)
	}
	slices.SortFunc(s.Members,
		func(a, b MemberStatus) int { return strings.Compare(a.ReplicaID, b.ReplicaID) })
	return s
}

// InUse reports whether a member counts as alive, and whether there has been a quorum, formed here or
// remembered.
func (m *Machine) InUse() (alive, served bool) {
	return m.roster.counts.healthy > 0, m.past.latest != nil
}

// Knows reports whether a member has a record: it is alive, asks, or is in the latest quorum.
func (m *Machine) Knows(replicaID string) bool { return m.roster.members[replicaID] != nil }

// explain returns the reason of a decision in words, with the names of the members that are missing.
func (s *roster) explain(d decision) string {
	var missing []string
	if !d.ready() && d.cause != noRequest && d.detail == "" {
		for _, r := range s.members {
			if !r.candidate() && !r.held {
				missing = append(missing, r.id)
			}
		}
	}
	if len(missing) == 0 {
		return d.String()
	}
	slices.Sort(missing)
	return fmt.Sprintf("%s; missing: %s", d, names(missing))
}

// names lists at most the first eight members: thousands may be missing.
func names(ids []string) string {
	const most = 8
	if n := len(ids) - most; n > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(ids[:most], ", "), n)
	}
	return strings.Join(ids, ", ")
}
