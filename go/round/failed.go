package round

// notifiers is how many members notify one that counts as failed: the first that follow it in the list and do not count as failed
// themselves. So each member decides alone whether it is one of them, and none has to notify many. One would do if nothing else failed.
const notifiers = 3

// memberFailed notes that this group counts as failed, or that another one does.
//
// The lighthouse reports a failure to all members that it reaches. A group that it evicts because their connection is cut does not
// learn of it, and would commit its step if its collectives are complete. So the members that are reached notify it. A process that has
// ended does not answer, and a group that has a later quorum ignores the notice.
func (m *Machine) memberFailed(e MemberFailed) []Action {
	if e.ReplicaID == m.group.ReplicaID {
		m.evicted = &e
		return nil
	}
	if m.quorum == nil || m.quorum.ID != e.QuorumID {
		return nil
	}
	members := m.quorum.Members
	own, in := m.quorum.Place(m.group.ReplicaID)
	failed, known := m.quorum.Place(e.ReplicaID)
	if !in || !known {
		return nil
	}
	if m.failed == nil {
		m.failed = make([]failure, len(members))
	}
	if !m.failed[failed].counts {
		m.failed[failed] = failure{counts: true, reason: e.Reason}
	}
	var actions []Action
	for place, between := before(own, len(members)), 0; place != own && between < notifiers; place = before(place, len(members)) {
		f := &m.failed[place]
		if !f.counts {
			between++
		} else if !f.notified {
			f.notified = true
			actions = append(actions, NotifyFailed{members[place].Address, MemberFailed{e.QuorumID, members[place].ReplicaID, f.reason}})
		}
	}
	return actions
}

// failure is what this group knows of a member that may have failed in the last quorum.
type failure struct {
	counts   bool // the member counts as failed
	reason   string
	notified bool // by this group
}

// before is the place before one of a list that is a circle.
func before(place, size int) int { return (place + size - 1) % size }
