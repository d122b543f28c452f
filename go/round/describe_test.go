package round

// Status is the state of a machine, for transcripts and models.
type Status struct {
	ReplicaID     string
	WorldSize     int64
	KnownQuorumID int64  // the largest id answered so far, 0 before the first
	Round         uint64 // requests to the lighthouse so far
	Asking        bool   // the lighthouse has not answered yet
	Quorum        Attendance
	Vote          Attendance
	VoteStep      int64            // of the open vote, 0 if there is none
	Absent        map[int64]string // ranks that no request waits for, and why
	Closed        bool
}

// Attendance lists the ranks with a pending request in a gathering, and the missing ranks. Both are empty if
// there is no gathering.
type Attendance struct {
	Waiting []int64
	Missing []int64
}

// Describe returns the state. It changes nothing.
func (m *Machine) Describe() Status {
	s := Status{
		ReplicaID:     m.group.ReplicaID,
		WorldSize:     m.group.WorldSize,
		KnownQuorumID: m.knownQuorumID,
		Round:         m.round,
		Asking:        m.gathering.round != 0,
		Quorum:        m.attendance(m.gathering.count, m.gathering.has),
		Vote:          m.attendance(m.ballot.count, m.ballot.has),
		Absent:        map[int64]string{},
		Closed:        m.closed != nil,
	}
	if m.ballot.count > 0 {
		s.VoteStep = m.ballot.step
	}
	for r := range m.ranks {
		if f := m.ranks[r].absent; f != nil {
			s.Absent[int64(r)] = f.Reason
		}
	}
	return s
}

func (m *Machine) attendance(count int, present func(rank int) bool) Attendance {
	a := Attendance{Waiting: []int64{}, Missing: []int64{}}
	if count == 0 {
		return a
	}
	for r := range m.ranks {
		if present(r) {
			a.Waiting = append(a.Waiting, int64(r))
		} else {
			a.Missing = append(a.Missing, int64(r))
		}
	}
	return a
}
