package quorum

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// A lighthouse that starts knows nothing, and its members know what it must: the last quorum they were in. So the first
// of them that knows a newer one than the lighthouse is asked for it, and the lighthouse goes on as if it had been there
// all along. Members carry one number to show that; the list travels once, not with every request.

// Voter is a member of a quorum as others remember it.
type Voter struct {
	ReplicaID string
	Address   string // of the group's manager server
}

// Past is a quorum as its members remember it, all that a lighthouse needs to go on after it.
type Past struct {
	ID      int64
	Step    int64   // largest of its members
	Members []Voter // ordered by ReplicaID
	Base    []Voter // as Quorum.Base
}

// Past is what there is to remember of a quorum.
func (q *Quorum) Past() Past {
	p := Past{ID: q.ID, Members: make([]Voter, len(q.Members)), Base: q.Base}
	for i := range q.Members {
		p.Members[i] = q.Members[i].voter()
		p.Step = max(p.Step, q.Members[i].Step)
	}
	return p
}

func (m *Member) voter() Voter { return Voter{m.ReplicaID, m.Address} }

// Validate says why what somebody remembers cannot be true.
func (p Past) Validate() error {
	if p.ID <= 0 || p.ID > maxKnownID {
		return fmt.Errorf("quorum_id is %d: it must be from 1 to %d", p.ID, int64(maxKnownID))
	}
	if len(p.Members) == 0 {
		return fmt.Errorf("quorum %d has no members", p.ID)
	}
	for _, voters := range [][]Voter{p.Members, p.Base} {
		for i, v := range voters {
			if v.ReplicaID == "" || i > 0 && voters[i-1].ReplicaID >= v.ReplicaID {
				return fmt.Errorf("the members of quorum %d are not in order, each once: %q is at place %d", p.ID, v.ReplicaID, i)
			}
		}
	}
	return nil
}

// Past is the latest quorum, formed here or remembered, and the highest id; false before there is one.
func (m *Machine) Past() (p Past, highest int64, known bool) {
	if m.latest == nil {
		return Past{}, m.highest, false
	}
	p = m.latest.Past()
	p.Step = m.step
	return p, m.highest, true
}

// Served reports whether there is a latest quorum, formed here or remembered.
func (m *Machine) Served() bool { return m.latest != nil }

// ReachedStep is the largest step of the latest quorum's members.
func (m *Machine) ReachedStep() int64 { return m.step }

// Alive is how many replicas were, at the last event.
func (m *Machine) Alive() int { return m.roster.counts.healthy }

// recallPause is how long a member that was asked for a quorum may take before another one is.
const recallPause = time.Second

// recall is the search for a quorum that a member knows and the machine does not.
type recall struct {
	id    int64     // the newest such quorum, 0 if there is none
	since time.Time // when it was first heard of
	asked time.Time // when a member was last asked
	whom  string    // which one
	tries int
}

func (m *Machine) latestID() int64 {
	if m.latest == nil {
		return 0
	}
	return m.latest.ID
}

// lookFor notes that a member knows a newer quorum, and asks it, unless another one was asked a moment ago.
func (m *Machine) lookFor(replicaID string, known int64) []Action {
	if known <= max(m.latestID(), m.recall.id) || known > maxKnownID {
		return nil
	}
	if m.recall.id == 0 {
		m.recall.since = m.now
	}
	m.recall.id, m.recall.asked, m.recall.whom = known, m.now, replicaID
	return []Action{Recall{replicaID, known}}
}

// lookAgain asks another member if the one before did not answer. Nobody may be left who knows that quorum.
func (m *Machine) lookAgain() []Action {
	if m.recall.id == 0 {
		return nil
	}
	var newest int64
	var who []*replica
	for e := m.roster.queue.Front(); e != nil; e = e.Next() {
		r := e.Value.(*replica)
		switch q := r.newest(); {
		case !q.tells || q.known < max(newest, m.latestID()+1):
		case q.known > newest:
			newest, who = q.known, []*replica{r}
		default:
			who = append(who, r)
		}
	}
	since := m.now.Sub(m.recall.asked)
	if r := m.roster.replicas[m.recall.whom]; newest == 0 && m.listed() && r != nil && r.alive() && since < m.policy.HeartbeatTimeout {
		return nil // it greeted, and is in the middle of a step
	}
	if newest == m.recall.id && since < recallPause {
		return nil
	}
	if m.recall.id = newest; newest == 0 {
		m.recall.tries = 0
		return nil
	}
	m.recall.tries++
	r := who[m.recall.tries%len(who)]
	m.recall.asked, m.recall.whom = m.now, r.id
	return []Action{Recall{r.id, newest}}
}

// looking reports whether a decision has to wait until a member has told of its quorum. Alone, a lighthouse goes on in the
// end: nobody else can have done so in the meantime.
func (m *Machine) looking(now time.Time) bool {
	return m.recall.id > m.latestID() && (m.listed() || now.Sub(m.recall.since) < m.policy.HeartbeatTimeout)
}

// recalled goes on after a quorum that was formed elsewhere, or before the start. Its members are taken for alive until
// they had the time to come, but for those whose hosts say that they are gone.
func (m *Machine) recalled(e Recalled) (actions []Action) {
	p := e.Past
	if p.Validate() != nil || m.listed() && termOf(p.ID) > m.term {
		return nil
	}
	m.highest = max(m.highest, p.ID, min(e.Highest, maxKnownID))
	if p.ID <= m.latestID() {
		return nil
	}
	for _, r := range m.members {
		m.roster.setPrevious(r, false, m.now)
	}
	q := &Quorum{ID: p.ID, Members: make([]Member, len(p.Members)), Base: p.Base, Created: m.now}
	m.members = make([]*replica, len(p.Members))
	for i, v := range p.Members {
		q.Members[i] = Member{ReplicaID: v.ReplicaID, Address: v.Address, Step: p.Step}
		r := m.roster.presume(v.ReplicaID, m.now)
		if r.address == "" {
			r.address = v.Address
		}
		m.roster.setPrevious(r, true, m.now)
		m.members[i] = r
		if r.presumed && v.Address != "" {
			actions = append(actions, Probe(v))
		}
	}
	m.latest, m.step, m.broken, m.ended = q, p.Step, "", nil
	m.watch.next(m.now, false)
	if m.recall.id <= p.ID {
		m.recall = recall{}
	}
	return actions
}

// processGone notes that a member's host says so, unless the member itself said something since.
func (m *Machine) processGone(id string) (dead []death) {
	r := m.roster.replicas[id]
	if r != nil && (r.waiting() || r.alive() && !r.presumed && r.suspect == nil) {
		return nil
	}
	if m.votes(id) {
		if m.ended == nil {
			m.ended = map[string]struct{}{}
		}
		m.ended[id] = struct{}{}
	}
	if r != nil && r.alive() {
		m.roster.die(r, m.now)
		dead = []death{{r, Gone, "its process is gone"}}
	}
	return dead
}

// votes reports whether a replica is a member of the latest quorum, or of its base.
func (m *Machine) votes(id string) bool {
	if r := m.roster.replicas[id]; r != nil && r.previous {
		return true
	}
	if m.latest == nil {
		return false
	}
	_, in := slices.BinarySearchFunc(m.latest.Base, id, func(v Voter, id string) int { return strings.Compare(v.ReplicaID, id) })
	return in
}

// regress reports, in words, that the members of a quorum would go on below the step that the job had reached, while
// others of the last quorum are not there, and whether any of those may still come.
func (m *Machine) regress(in []*replica) (reason string, mayCome bool) {
	if m.latest == nil {
		return "", false
	}
	step := int64(-1)
	for _, r := range in {
		step = max(step, r.member().Step)
	}
	if step >= m.step {
		return "", false
	}
	var absent []string
	for _, r := range m.members {
		if !r.candidate() {
			absent = append(absent, r.id)
			mayCome = mayCome || r.alive()
		}
	}
	if len(absent) == 0 {
		return "", false
	}
	return fmt.Sprintf("the job had reached step %d in quorum %d, whoever asks is at step %d at most; missing of that quorum: %s",
		m.step, m.latest.ID, step, names(absent)), mayCome
}
