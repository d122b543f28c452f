package round

import "github.com/torchft/torchft/go/quorum"

// notifiers is how many members notify a member that counts as failed: the next ones after it, a Stride apart, that do not count as
// failed. So each member can decide alone whether it is one of them. One would suffice if nothing else failed.
const notifiers = 3

// Stride returns the distance in a list between members that notify the same one. The groups of a rack are neighbours in the list. If
// the rack is cut off from the lighthouse, they receive no report, and some of them count as failed later than others. So a
// member's notifiers must not be its neighbours.
func Stride(size int) int {
	stride := size * 5 / 8 // no two members in the same third of the list are this far apart
	for gcd(stride, size) > 1 {
		stride++ // coprime to the size: otherwise the strides would not reach all members
	}
	return stride
}

func gcd(a, b int) int {
	for b > 0 {
		a, b = b, a%b
	}
	return a
}

// given is a quorum that was sent to the ranks, with the failures of its members since then.
type given struct {
	quorum *quorum.Quorum // nil: none
	failed []failure      // by place in the quorum, nil: none is known
}

// failure records that a member may have failed.
type failure struct {
	counts   bool // the member counts as failed
	reason   string
	notified bool // this group has notified it
}

func (g *given) is(quorumID int64) bool { return g.quorum != nil && g.quorum.ID == quorumID }

// follow records the quorum that is sent to the ranks now.
func (m *Machine) follow(q *quorum.Quorum) {
	if !m.latest.is(q.ID) {
		m.before = m.latest
	}
	m.latest = given{quorum: q}
}

// memberFailed handles the report that this group, or another one, counts as failed.
//
// The lighthouse reports a failure to all members that it can reach. A group that is evicted because its connection to the
// lighthouse is cut does not receive the report, and would commit its step if its collectives are complete. So other members notify
// it. A notice to a process that has ended has no effect, and a group that has a later quorum ignores it.
//
// If the others have already asked for the next quorum, the failure completes it: the report and the next quorum arrive at the same
// time, by two paths, in any order. So the previous quorum is kept (before): otherwise the failed member would not be notified in
// exactly the case in which the others continue without it.
func (m *Machine) memberFailed(e MemberFailed) []Action {
	own := m.group.ReplicaID
	switch {
	case e.ReplicaID == own && m.latest.quorum != nil && e.QuorumID < m.latest.quorum.ID: // a late notice: it must not replace the fence for the latest quorum
	case e.ReplicaID == own:
		m.evicted = &e
	case m.latest.is(e.QuorumID):
		return m.latest.memberFailed(own, e)
	case m.before.is(e.QuorumID):
		return m.before.memberFailed(own, e)
	}
	return nil
}

// memberFailed records that a member counts as failed, and returns the members that this group has to notify now: that member, if
// this group is one of its notifiers, and failed members of which this group becomes a notifier by this failure.
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
	back := len(members) - Stride(len(members))
	for place, between := (own+back)%len(members), 0; place != own && between < notifiers; place = (place + back) % len(members) {
		f := &g.failed[place]
		if !f.counts {
			between++
		} else if !f.notified || place == failed { // a repeated report is forwarded again: the first notice may have been lost
			f.notified = true
			actions = append(actions, NotifyFailed{members[place].Address, MemberFailed{e.QuorumID, members[place].ReplicaID, f.reason}})
		}
	}
	return actions
}
