package quorum

import (
	"fmt"
	"time"
)

// A member that knows a later quorum than the lighthouse does is asked for it, and nothing is decided before it has shown it, or
// does not count any more (memory.go, invariant 3).

const (
	// recallPause is how long a member that was asked for a quorum may take before another one is, or it once more.
	recallPause = time.Second
	// mostRecalls is how often a member is asked for a quorum that it knows, before what it says of it counts no more.
	mostRecalls = 3
)

// recallPause is shorter where a heartbeat timeout has no room for all the questions.
func (p Policy) recallPause() time.Duration {
	return min(recallPause, p.HeartbeatTimeout/(mostRecalls+2))
}

// claim is what a member knows of a later quorum, as it says, and did not show.
type claim struct {
	recalls int       // how often it was asked for it
	second  time.Time // when it was for the second time
	last    time.Time // and for the last time
	unshown bool      // it has spoken since, and it was asked often enough: it is not believed until it shows it
}

// asked notes that it is asked, unless it was a moment ago.
func (c *claim) asked(now time.Time, pause time.Duration) {
	if now.Sub(c.last) < pause {
		return
	}
	c.last = now
	if c.recalls++; c.recalls == 2 {
		c.second = now
	}
}

// overdue reports that it was asked often enough. A member that is stopped says nothing at all, and may tell when it goes on.
func (c *claim) overdue(spoke, now time.Time, pause time.Duration) bool {
	return c.recalls >= mostRecalls && now.Sub(c.last) >= pause && spoke.After(c.second)
}

// recall is the search for a quorum that a member knows and the machine does not.
type recall struct {
	id    int64     // the newest such quorum, 0 if there is none
	since time.Time // when it was first heard of
	asked time.Time // when a member was last asked
	whom  string    // which one
}

// lookFor notes that a member knows a newer quorum, and asks it, unless another one was asked a moment ago.
func (m *Machine) lookFor(r *replica, known int64) []Action {
	if known <= m.latestID() {
		r.claim = claim{}
		return nil
	}
	switch {
	case known > maxKnownID:
		return nil
	case r.unshown: // nobody waits for it; but if it shows that quorum now, it counts
		return []Action{Recall{r.id, known}}
	case r.overdue(m.now, m.now, m.policy.recallPause()): // it greets again and again, and does not ask
		r.unshown = true
		return []Action{Doubted{r.id, notShown(known)}}
	case known <= m.recall.id:
		return nil
	}
	if m.latest == nil && m.list.listed() {
		m.rumour = Voter{ReplicaID: r.id}
	}
	if m.recall.id == 0 {
		m.recall.since = m.now
	}
	return m.recallOf(r, known)
}

// recallOf asks a member for the quorum that it knows.
func (m *Machine) recallOf(r *replica, known int64) []Action {
	r.asked(m.now, m.policy.recallPause())
	m.recall.id, m.recall.asked, m.recall.whom = known, m.now, r.id
	return []Action{Recall{r.id, known}}
}

// lookAgain asks another member if the one before did not answer, and those that do not answer at all no more. Nobody may be left
// who knows that quorum.
func (m *Machine) lookAgain() (actions []Action, failed []failure) {
	if m.recall.id == 0 && !m.list.listed() {
		return nil, nil
	}
	pause := m.policy.recallPause()
	var newest int64
	var whom *replica
	for e := m.roster.queue.Front(); e != nil; {
		r := e.Value.(*replica)
		e = e.Next() // a refusal takes r out of the queue
		switch q := r.newest(); {
		case !q.tells || q.known <= m.latestID() || r.unshown && !m.list.listed():
		case r.unshown || r.overdue(r.lastBeat, m.now, pause):
			doubted, out := m.disbelieve(r, q.known)
			actions, failed = append(actions, doubted...), append(failed, out...)
		case q.known > newest || q.known == newest && r.recalls < whom.recalls:
			newest, whom = q.known, r
		}
	}
	since := m.now.Sub(m.recall.asked)
	switch r := m.roster.replicas[m.recall.whom]; {
	case newest == 0 && m.list.listed() && r != nil && r.alive() && !r.unshown && since < m.policy.HeartbeatTimeout:
		return actions, failed // it greeted, and is in the middle of a step
	case newest == 0:
		m.recall = recall{}
		return actions, failed
	case newest == m.recall.id && since < pause:
		return actions, failed
	}
	return append(actions, m.recallOf(whom, newest)...), failed
}

// ahead is a quorum that one of some members knows of and this lighthouse of a list does not, 0 if there is none. Such a member gives no
// vote, even when nobody looks for that quorum any more: the search ends with a member that is silent, and its request waits when it
// speaks again.
func (m *Machine) ahead(in []*replica) (id int64) {
	if !m.list.listed() {
		return 0
	}
	for _, r := range in {
		if q := r.newest(); q.tells && q.known > m.latestID() {
			id = max(id, q.known)
		}
	}
	return id
}

// disbelieve leaves aside what a member says it knows, and does not show although it speaks. In a list it must not give a vote
// without it (succession.go, invariant 3): it is refused by name, and sent on, since another lighthouse may know that quorum. So one
// member with a wrong number keeps nobody from going on. Alone, a lighthouse lets it in.
func (m *Machine) disbelieve(r *replica, known int64) (actions []Action, failed []failure) {
	r.unshown = true
	actions = []Action{Doubted{r.id, notShown(known)}}
	if !m.list.listed() {
		return actions, nil
	}
	m.list.release(r.id, m.now) // before it is sent on
	reason := "replica " + r.id + " is not believed: " + notShown(known)
	for _, w := range r.waiters(func(request) bool { return true }) {
		m.roster.giveUp(w, m.now)
		actions = append(actions, Refuse{w, Unshown, reason})
	}
	return actions, m.turnDown(r.id, Unshown, reason)
}

// stillUnshown says why a request is refused of a member that is not believed; empty if it is taken. A member that was asked often
// enough, and asks again after its request had ended, is one from here on: taken in, it would give a vote without what it knows.
func (m *Machine) stillUnshown(e Asked) string {
	r := m.roster.replicas[e.Member.ReplicaID]
	if r == nil || !m.list.listed() || !e.Tells || e.KnownQuorumID <= m.latestID() {
		return ""
	}
	if r.unshown = r.unshown || r.overdue(m.now, m.now, m.policy.recallPause()); !r.unshown {
		return ""
	}
	m.list.release(r.id, m.now)
	return "replica " + r.id + " is not believed: " + notShown(e.KnownQuorumID)
}

func notShown(known int64) string {
	return fmt.Sprintf("it knows of quorum %d, as it says, and did not show it", known)
}

// looking reports whether a decision has to wait until a member has told of its quorum. Alone, a lighthouse goes on in the
// end: nobody else can have done so in the meantime.
func (m *memory) looking(listed bool, p Policy, now time.Time) bool {
	return m.recall.id > m.latestID() && (listed || now.Sub(m.recall.since) < p.HeartbeatTimeout)
}
