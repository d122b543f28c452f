package round

import "github.com/torchft/torchft/go/quorum"

// notifiers is the number of members that notify a member that counts as failed. Starting at the failed member, the list is walked in
// steps of one Stride: the first members found that do not count as failed are its notifiers. So each member can decide alone whether
// it is one of them. There are several because a notifier may fail, too, before it has sent the notice.
const notifiers = 3

// Stride returns the number of places that one step of the walk to the notifiers advances in a list of this size. The list is a ring:
// its first member follows its last one.
//
// The notifiers of a member must not be its neighbours. The groups of a rack are neighbours in the list. If a rack is cut off from the
// lighthouse, its groups receive no reports, and they count as failed one after another. A neighbour in the rack that does not count as
// failed yet would be chosen as a notifier, although it cannot know of the failure.
func Stride(size int) int {
	// 5/8 of the list in one direction is 3/8 in the other, and both are more than a third. So two groups of a rack that has at most a
	// third of the members are never this far apart, except in lists of 6, 15, 24 and 42 members, in which the next number that is
	// coprime to the size is too large.
	stride := size * 5 / 8
	for gcd(stride, size) > 1 {
		stride++ // must be coprime to the size: otherwise the strides would not reach all members
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
	quorum *quorum.Quorum // nil: none was sent
	failed []failure      // by place in the quorum; nil: no failure is known
}

// failure is the record of one member of a quorum. It is zero unless the member counts as failed.
type failure struct {
	counts   bool // the member counts as failed
	reason   string
	notified bool // this group has notified it
}

func (g *given) is(quorumID int64) bool { return g.quorum != nil && g.quorum.ID == quorumID }

// follow records the quorum that is sent to the ranks now.
//
// If its id is that of the latest quorum, its members are the same, in the same order, and the failures that are known stay: the
// lighthouse reported them after it had sent this quorum, since after a report it gives the next quorum a new id (reconnect in package
// quorum). The report and the quorum arrive by two paths, in any order. Without these failures, this group would count a failed member
// as a notifier, and a member that fails later could have too few. m.before remains the last quorum with another id.
func (m *Machine) follow(q *quorum.Quorum) {
	failed := m.latest.failed
	if !m.latest.is(q.ID) {
		m.before, failed = m.latest, nil
	}
	if len(failed) != len(q.Members) {
		failed = nil // places of other members: an upstream lighthouse need not keep the rule above
	}
	m.latest = given{q, failed}
}

// memberFailed handles the report that this group, or another one, counts as failed.
//
// The lighthouse reports a failure to all members that it can reach. A group that is evicted because its connection to the
// lighthouse is cut does not receive the report, and would commit its step if its collectives are complete. So other members notify
// it. A notice to a process that has ended has no effect, and a group that has a later quorum ignores it.
//
// If the other members have already asked for the next quorum, the failure completes it. Then the report and the next quorum arrive at
// the same time, by two paths, in any order. So the previous quorum is kept (before): without it, a report that arrives after the next
// quorum would be ignored, and the failed member, without which the others continue, would not be notified.
func (m *Machine) memberFailed(e MemberFailed) []Action {
	own := m.group.ReplicaID
	switch {
	case e.ReplicaID == own && m.latest.quorum != nil && e.QuorumID < m.latest.quorum.ID:
		// A late notice, of an earlier quorum. Ignoring it is safe: no vote of that quorum is pending, since the first request for
		// the next quorum ended them all (abandonedBy). If the notice were stored, it could replace the fence for the latest quorum,
		// and an evicted group could commit.
	case e.ReplicaID == own:
		m.evicted = &e // the quorum may be one that this group has not received yet: then the fence holds from its arrival
	case m.latest.is(e.QuorumID):
		return m.latest.memberFailed(own, e)
	case m.before.is(e.QuorumID):
		return m.before.memberFailed(own, e)
	}
	return nil
}

// memberFailed records that a member counts as failed, and returns the notices that this group, whose replica id is given, has to send
// now: to that member, if this group is one of its notifiers, and to members that failed earlier and of which this group becomes a
// notifier by this failure.
func (g *given) memberFailed(id string, e MemberFailed) []Action {
	members := g.quorum.Members
	own, in := g.quorum.Place(id)
	failed, known := g.quorum.Place(e.ReplicaID)
	if !in || !known {
		return nil // only members of the quorum train in it: no other group can commit its steps, or is a notifier
	}
	if g.failed == nil {
		g.failed = make([]failure, len(members))
	}
	if !g.failed[failed].counts { // a repeated report must not reset notified
		g.failed[failed] = failure{counts: true, reason: e.Reason}
	}
	var actions []Action
	// Walk back from this group, one Stride at a time. The variable between is the number of members passed that do not count as
	// failed. This group is a notifier of each failed member that is reached while between is less than notifiers. A failed member
	// further back has enough notifiers that are closer to it. If one of those fails later, the report of that failure makes this group
	// walk again.
	back := len(members) - Stride(len(members))
	for place, between := (own+back)%len(members), 0; place != own && between < notifiers; place = (place + back) % len(members) {
		f := &g.failed[place]
		if !f.counts {
			between++
		} else if !f.notified || place == failed { // a repeated report is forwarded again, since the first notice may have been lost
			f.notified = true
			actions = append(actions, NotifyFailed{members[place].Address, MemberFailed{e.QuorumID, members[place].ReplicaID, f.reason}})
		}
	}
	return actions
}
