package quorum

import (
	"fmt"
	"time"
)

// Several lighthouses may stand ready for one job. Each member asks one at a time, the first of its list that it reaches.
// They know nothing of each other, so what keeps two from serving the job at once is what the members tell:
//
// A new quorum has to outvote the last one: more than half of its members are in the new one, or half of them with the
// first by replica_id. Two such sets share a member, and a member is in one place. (Whose process is certain to be gone
// is not waited for, but it counts: before its end it may have voted for another quorum, at another lighthouse, that
// others still train in. Only if all who are missing are gone does it not matter for whom they voted.)
//
// The answers to a quorum may be lost, so that its members do not know of it, and newcomers do. Newcomers could then
// outvote it alone, while the others form the next one elsewhere. So a quorum's members vote together with those of the
// quorum before, its base, until the base has been outvoted by members that know of the new one: joint consensus, as when
// Raft changes its members.
//
// Who asked one lighthouse and goes to the next does not know for which quorum the first one used its vote. Ids tell
// which of two quorums is the later one, so the second lighthouse has to give out ids above all that the first one may
// give out: each has terms of its own, by its place in the list, ids begin with the term, and members carry the highest
// term that they were told.
//
// This does not keep a whole job in one place. That a member is gone does not say that it was in no later quorum elsewhere: of
// {a, b}, a is in {a, c} at another lighthouse, and ends; b may then go on here, and c there (docs/correctness.md, "Several
// lighthouses"). Policy.MinReplicas above half of all groups keeps both of them waiting.

// Seat is a lighthouse's place in the list that the members of a job have.
type Seat struct {
	Place int // from 0
	Of    int // lighthouses; 0: the member does not say, 1: it knows one
}

// termBits are the bits of a quorum_id below its term: milliseconds since 1970 until the year 2109.
const termBits = 42

func termOf(id int64) int64 { return id >> termBits }

// maxTerm is the largest that leaves room for ids.
const maxTerm = maxKnownID >> termBits

// listed reports whether other lighthouses may serve the job.
func (m *Machine) listed() bool { return m.seat.Of > 1 }

// Term is the one that members are told, 0 where there is no list.
func (m *Machine) Term() int64 { return m.term }

// greeted learns of the list, and of the terms of other lighthouses.
func (m *Machine) greeted(e Greeted) []Action {
	others := m.roster.counts.healthy
	if r := m.roster.replicas[e.ReplicaID]; r != nil && r.alive() {
		others--
	}
	if e.Seat.Of != 0 && m.seat.Of != 0 && e.Seat != m.seat {
		if others > 0 {
			return []Action{TurnAway{e.ReplicaID, fmt.Sprintf(
				"for replica %s this lighthouse is %s, for the others %s: TORCHFT_LIGHTHOUSE must be the same for all groups of a job",
				e.ReplicaID, e.Seat, m.seat)}}
		}
		m.seat = e.Seat
	}
	if m.seat.Of == 0 {
		m.seat = e.Seat
	}
	r := m.roster.beat(e.ReplicaID, m.now)
	r.returned, r.ending = true, false
	delete(m.ended, e.ReplicaID)
	if !m.listed() || e.Term > maxTerm {
		return nil
	}
	return append(m.begin(e), m.lookFor(e.ReplicaID, e.KnownQuorumID)...)
}

// begin sees to it that the term is above all that other lighthouses may have used, and that all members are told of it:
// also those that count as dead, since they may speak again on the streams that they have.
func (m *Machine) begin(e Greeted) []Action {
	least := max(m.term, termOf(m.highest))
	if e.Term > m.term {
		least = max(least, e.Term+1)
	}
	of, place := int64(m.seat.Of), int64(m.seat.Place)
	term := least + (place-least%of+of)%of
	if term == m.term {
		return nil
	}
	m.term = term
	m.highest = max(m.highest, term<<termBits+m.now.UnixMilli())
	reason := fmt.Sprintf("term %d begins with replica %s", term, e.ReplicaID)
	actions := []Action{Renew{reason}}
	m.roster.reachNothing() // they begin other streams
	for e := m.roster.queue.Front(); e != nil; {
		r := e.Value.(*replica)
		e = e.Next() // giving up takes r out of the queue
		for _, q := range r.waiters(func(q request) bool { return q.tells }) {
			m.roster.giveUp(q, m.now)
			actions = append(actions, Refuse{q, Outdated, reason})
		}
	}
	return actions
}

// String says where in the list a lighthouse is.
func (s Seat) String() string {
	if s.Of <= 1 {
		return "the only one"
	}
	return fmt.Sprintf("number %d of %d", s.Place+1, s.Of)
}

// outvotes reports whether some of a set, those that count, outvote the rest.
func outvotes(set []Voter, counts func(Voter) bool) bool {
	n, first := 0, false
	for i, v := range set {
		if counts(v) {
			n++
			first = first || i == 0
		}
	}
	return 2*n > len(set) || 2*n == len(set) && first
}

// supersedes reports whether those who count may go on after a set: they outvote the rest, or the rest is gone.
func supersedes(set []Voter, counts, gone func(Voter) bool) bool {
	if outvotes(set, counts) {
		return true
	}
	for _, v := range set {
		if !counts(v) && !gone(v) {
			return false
		}
	}
	return true
}

// torn reports, in words, that the members of a quorum may not go on, because another lighthouse might serve the rest of
// the last one. Those of whom it is not known whether they are gone are returned too.
func (m *Machine) torn(d decision, in []*replica) (reason string, missing []Voter) {
	if !m.listed() || d.cause == fastPath && m.latest.Base == nil {
		return "", nil
	}
	if m.latest == nil {
		if m.seat.Place == 0 {
			return "", nil
		}
		return fmt.Sprintf("nobody who asks was in a quorum of this job before, and a job begins at the first lighthouse of its list: this is %s",
			m.seat), nil
	}
	here := make(map[string]bool, len(in))
	address := make(map[string]bool, len(in))
	for _, r := range in {
		here[r.id] = true
		if r.waiting() {
			address[r.member().Address] = true
		}
	}
	present := func(v Voter) bool { return here[v.ReplicaID] }
	gone := func(v Voter) bool {
		_, ended := m.ended[v.ReplicaID]
		return ended || v.Address != "" && address[v.Address] && !here[v.ReplicaID] // another process has its address
	}
	for i, set := range [][]Voter{m.latest.Past().Members, m.latest.Base} {
		if supersedes(set, present, gone) {
			continue
		}
		n := 0
		for _, v := range set {
			if present(v) {
				n++
			} else if !gone(v) {
				missing = append(missing, v)
			}
		}
		if reason == "" {
			of := fmt.Sprintf("quorum %d", m.latest.ID)
			if i > 0 {
				of = "the quorum before " + of + ", which few of them know of,"
			}
			reason = fmt.Sprintf("%d of %s of %s asked: another lighthouse might serve the others, so more than half are needed, or half with %s",
				n, members(len(set)), of, set[0].ReplicaID)
		}
	}
	return reason, missing
}

// enough reports whether more than half of some are alive.
func enough(of []*replica) bool {
	n := 0
	for _, r := range of {
		if r.alive() {
			n++
		}
	}
	return 2*n > len(of)
}

func members(n int) string {
	if n == 1 {
		return "1 member"
	}
	return fmt.Sprintf("%d members", n)
}

// probePause is how long a host may take to answer a probe before it gets another one.
const probePause = time.Second

// probes asks the hosts of those who are missing whether they are gone.
func (m *Machine) probes(missing []Voter) (actions []Action) {
	if len(missing) == 0 || m.now.Sub(m.probedAt) < probePause {
		return nil
	}
	m.probedAt = m.now
	for _, v := range missing {
		if r := m.roster.replicas[v.ReplicaID]; v.Address != "" && (r == nil || !r.alive() || r.presumed || r.suspect != nil) {
			actions = append(actions, Probe(v))
		}
	}
	return actions
}

// stranded sends on those who wait where not even all who are alive here could go on, whatever they wait for.
func (m *Machine) stranded() []Action {
	if !m.listed() || m.roster.queue.Len() == 0 {
		return nil
	}
	if m.latest != nil && m.latest.Base == nil && enough(m.members) { // as nearly always: there is no need to look further
		m.outvoted = time.Time{}
		return nil
	}
	var alive, wait []*replica
	for e := m.roster.pulses.Front(); e != nil; e = e.Next() {
		if r := e.Value.(*replica); r.alive() {
			alive = append(alive, r)
			if r.waiting() {
				wait = append(wait, r)
			}
		}
	}
	reason, missing := m.torn(decision{}, alive)
	if reason == "" {
		m.outvoted = time.Time{}
		return nil
	}
	return append(m.probes(missing), m.sendOn(reason, wait)...)
}

// sendOn refuses those who may not go on here after a while: at another lighthouse there may be more.
func (m *Machine) sendOn(reason string, in []*replica) (actions []Action) {
	switch {
	case m.outvoted.IsZero():
		m.outvoted = m.now
		return nil
	case m.now.Sub(m.outvoted) < m.policy.HeartbeatTimeout:
		return nil
	}
	m.outvoted = time.Time{}
	for _, r := range in {
		for _, w := range r.waiters(func(q request) bool { return q.tells }) {
			m.roster.giveUp(w, m.now)
			actions = append(actions, Refuse{w, Outvoted, reason})
		}
	}
	return actions
}

// base is whom the quorum after the next one has to outvote besides the members of the next one.
func (m *Machine) base(in []*replica, changed bool) []Voter {
	if !m.listed() || m.latest == nil {
		return nil
	}
	if m.latest.Base == nil && !changed {
		return nil
	}
	knows := make(map[string]bool, len(in))
	for _, r := range in {
		if r.newest().known >= m.latest.ID {
			knows[r.id] = true
		}
	}
	gone := func(v Voter) bool { _, ended := m.ended[v.ReplicaID]; return ended }
	switch {
	case m.latest.Base != nil && !supersedes(m.latest.Base, func(v Voter) bool { return knows[v.ReplicaID] }, gone):
		return m.latest.Base // too few know of the latest quorum
	case !changed:
		return nil
	default:
		return m.latest.Past().Members
	}
}
