package round

import "github.com/torchft/torchft/go/quorum"

// notifiers is how many members notify one that counts as failed: the first that follow it in the list and do not count as failed
// themselves. So each member decides alone whether it is one of them. One would do if nothing else failed.
const notifiers = 3

// given is a quorum that the ranks were given, and what is known of its members since.
type given struct {
	quorum *quorum.Quorum // nil: none
	failed []failure      // by place in the quorum, nil: nobody has
}

// failure is what this group knows of a member that may have failed.
type failure struct {
	counts   bool // the member counts as failed
	reason   string
	notified bool // by this group
}

func (g *given) is(quorumID int64) bool { return g.quorum != nil && g.quorum.ID == quorumID }

// follow notes a quorum that the ranks are given.
func (m *Machine) follow(q *quorum.Quorum) {
	if !m.latest.is(q.ID) {
		m.before = m.latest
	}
	m.latest = given{quorum: q}
}

// memberFailed notes that this group counts as failed, or that another one does.
//
// The lighthouse reports a failure to all members that it reaches. A group that it evicts because their connection is cut does not
// learn of it, and would commit its step if its collectives are complete. So the members that are reached notify it. A process that has
// ended does not answer, and a group that has a later quorum ignores the notice.
//
// Where the others already wait, a failure completes the quorum without that member: the report of it and the next quorum come at once,
// on two ways, in any order. Without before, nobody would notify the member in just that case, in which the step is made without it.
func (m *Machine) memberFailed(e MemberFailed) []Action {
	own := m.group.ReplicaID
	switch {
	case e.ReplicaID == own && m.latest.quorum != nil && e.QuorumID < m.latest.quorum.ID: // late: it must not lift the fence of the latest quorum
	case e.ReplicaID == own:
		m.evicted = &e
	case m.latest.is(e.QuorumID):
		return m.latest.memberFailed(own, e)
	case m.before.is(e.QuorumID):
		return m.before.memberFailed(own, e)
	}
	return nil
}

// memberFailed notes that a member counts as failed, and returns which ones this group notifies for it: that one, or those between it and
// this group, since one notifier less is left for them.
func (g *given) memberFailed(id string, e MemberFailed) []Action {
	members := g.quorum.Members
	own, in := g.quorum.Place(id)
	failed, known := g.quorum.Place(e.ReplicaID)
	if !in || !known {
		return nil
	}
	if g.failed == nil {
		g.failed = make([]failure, len(members))
	}
	if !g.failed[failed].counts {
		g.failed[failed] = failure{counts: true, reason: e.Reason}
	}
	var actions []Action
	for place, between := before(own, len(members)), 0; place != own && between < notifiers; place = before(place, len(members)) {
		f := &g.failed[place]
		if !f.counts {
			between++
		} else if !f.notified || place == failed { // again: the first notice may have been lost
			f.notified = true
			actions = append(actions, NotifyFailed{members[place].Address, MemberFailed{e.QuorumID, members[place].ReplicaID, f.reason}})
		}
	}
	return actions
}

// before is the place before one of a list that is a circle.
func before(place, size int) int { return (place + size - 1) % size }
