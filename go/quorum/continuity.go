package quorum

import (
	"fmt"
	"slices"
	"time"
)

// elsewhere is what the machine does about the other lighthouses of a list: it asks succession.go what it may do, looks after
// the ends of its members, and sends on those that may not go on here.
//
// Invariants:
//
//  1. No quorum is formed without the votes for it (torn), but where all of the last one ask and it has no base: then all
//     vote.
//  2. The host of a member that is bound is asked at once when its stream breaks, and until it is known whether it has ended,
//     or of no use: a vote that is learned too late is lost for good.
//  3. Whoever is sent on is let go first.
type elsewhere struct {
	list     succession
	ends     map[string]time.Time // voters that are bound, and whose stream broke: when they were probed
	probedAt time.Time
	outvoted time.Time // since when those who ask may not go on; zero while they may
	away     bool      // all were sent to another lighthouse, and none of the latest quorum has come back
}

// greeted learns of the list, and of the terms of other lighthouses.
func (m *Machine) greeted(e Greeted) []Action {
	others := m.roster.counts.healthy
	if r := m.roster.replicas[e.ReplicaID]; r != nil && r.alive() {
		others--
	}
	if refusal := m.list.sit(e.ReplicaID, e.Seat, others > 0); refusal != "" {
		return []Action{TurnAway{e.ReplicaID, refusal}}
	}
	r := m.roster.beat(e.ReplicaID, m.now)
	r.returned, r.ending, r.finished = true, false, false
	m.list.back(e.ReplicaID)
	if !m.list.listed() {
		return []Action{m.welcome(r)}
	}
	refusal, shows := m.overreaches(e)
	if refusal != "" {
		return []Action{TurnAway{e.ReplicaID, refusal}}
	}
	m.cameBack(e.KnownQuorumID)
	m.list.greets(e.ReplicaID, e.KnownQuorumID, e.told() > m.list.term, m.now)
	if r.claims = 0; shows {
		r.claims = e.told()
		return append([]Action{m.welcome(r)}, m.lookFor(r, e.KnownQuorumID)...) // the term begins when it has shown it
	}
	actions := append(m.begin("replica "+e.ReplicaID, e.told()), m.welcome(r))
	return append(actions, m.lookFor(r, e.KnownQuorumID)...)
}

func (m *Machine) welcome(r *replica) Welcome {
	w := Welcome{ReplicaID: r.id, Term: m.list.term, Draining: r.draining}
	if m.list.listed() {
		w.Bond = BondTime
	}
	return w
}

// begin sees to it that all members are told of a new term: also those that count as failed, since they may speak again on the
// streams that they have.
func (m *Machine) begin(with string, told int64) []Action {
	if !m.list.begin(told, m.highest, m.now) {
		return nil
	}
	m.highest = max(m.highest, m.list.firstID(m.now))
	reason := fmt.Sprintf("term %d begins with %s", m.list.term, with)
	actions := []Action{Renew{reason}}
	m.roster.reachNothing() // they begin other streams
	return append(actions, m.roster.refuse(func(q request) bool { return q.tells }, reason, m.now)...)
}

// torn reports, in words, that the members of a quorum may not go on, because another lighthouse might serve the rest of
// the last one. Those whose votes are missing are returned too.
func (m *Machine) torn(d decision, in []*replica) (reason string, missing []Voter) {
	if !m.list.listed() || d.cause == fastPath && m.latest.Base == nil {
		return "", nil // all of the last quorum vote
	}
	if m.latest == nil {
		switch {
		case m.list.seat.Place == 0 && m.rumour.ReplicaID == "":
			return "", nil
		case m.list.seat.Place == 0:
			return fmt.Sprintf("the job had a quorum, of which replica %s spoke, and nobody here tells who was in it; another lighthouse might serve them",
				m.rumour.ReplicaID), []Voter{m.rumour}
		}
		return fmt.Sprintf("nobody who asks was in a quorum of this job before, and a job begins at the first lighthouse of its list: this is %s",
			m.list.seat), nil
	}
	here := make(map[string]bool, len(in))
	for _, r := range in {
		here[r.id] = true
	}
	for _, short := range m.list.shortfalls(m.latest.Past(), func(id string) bool { return here[id] }) {
		if reason == "" {
			reason = short.describe(m.latest.ID)
		}
		missing = append(missing, short.missing...)
	}
	return reason, missing
}

// heldUp reports that act would change nothing: the last decision was that votes are missing, by the numbers alone they still are,
// whoever asks, and nothing else is due. Without it each request would cost as much as a quorum has members while one is held up.
func (m *Machine) heldUp(t tally) bool {
	if m.outvoted.IsZero() || !m.list.listed() || m.latest == nil || t.candidates == 0 ||
		m.now.Sub(m.outvoted) >= m.policy.HeartbeatTimeout || m.now.Sub(m.probedAt) >= probePause {
		return false
	}
	most, all := t.previousCandidates+len(m.list.ended)+len(m.list.waived), len(m.latest.Members)
	if 2*most == all { // half of them suffice with the first one
		first := m.latest.Members[0].voter()
		r := m.roster.replicas[first.ReplicaID]
		return !m.list.given(first) && (r == nil || !r.waiting())
	}
	return 2*most < all
}

// base is whom the quorum after the next one has to outvote besides the members of the next one.
func (m *Machine) base(in []*replica, changed bool) [][]Voter {
	if !m.list.listed() || m.latest == nil || m.latest.Base == nil && !changed {
		return nil
	}
	knows := make(map[string]bool, len(in))
	for _, r := range in {
		knows[r.id] = r.newest().known >= m.latest.ID
	}
	return m.list.baseAfter(m.latest.Past(), changed, func(id string) bool { return knows[id] })
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

// probePause is how long a host may take to answer a probe before it gets another one.
const probePause = time.Second

// probes asks the hosts of those that are missing, and of which nothing else is known, whether they have ended.
func (m *Machine) probes(missing []Voter) (actions []Action) {
	if len(missing) == 0 || m.now.Sub(m.probedAt) < probePause {
		return nil
	}
	m.probedAt = m.now
	for _, v := range missing {
		if r := m.roster.replicas[v.ReplicaID]; v.Address != "" && r != nil && r.alive() && (r.presumed || r.suspect != nil) {
			actions = append(actions, Probe{v.ReplicaID, v.Address})
		}
	}
	return actions
}

// endPause is how often the host of a member whose stream broke is asked whether it has ended, while it is bound.
const endPause = 200 * time.Millisecond

// broke asks a member's host at once whether it has ended: the bond that makes its end a vote soon runs out.
func (m *Machine) broke(id string) []Action {
	if !m.list.listed() || !m.list.holds(id, m.latestID(), m.now) || !m.votes(id) {
		return nil
	}
	if m.ends == nil {
		m.ends = map[string]time.Time{}
	}
	m.ends[id] = m.now
	return m.probe(id)
}

// probeEnds asks again, until it is known or of no use any more.
func (m *Machine) probeEnds() (actions []Action) {
	for _, id := range sorted(m.ends) {
		r := m.roster.replicas[id]
		_, ended := m.list.ended[id]
		switch {
		case ended, r != nil && r.alive() && r.suspect == nil, !m.list.holds(id, m.latestID(), m.now):
			delete(m.ends, id)
		case m.now.Sub(m.ends[id]) >= endPause:
			m.ends[id] = m.now
			actions = append(actions, m.probe(id)...)
		}
	}
	return actions
}

func (m *Machine) probe(id string) []Action {
	if v, votes := m.voter(id); votes && v.Address != "" {
		return []Action{Probe{v.ReplicaID, v.Address}}
	}
	return nil
}

// over notes that a member has ended, or said that it leaves or ends for good. Where it is bound, its vote is given here. A member
// that waits votes by its request: with both, its vote would count for a quorum, and its request for one that does not come after that.
func (m *Machine) over(id string, bound bool) {
	if r := m.roster.replicas[id]; r != nil && r.waiting() {
		return
	}
	if bound && m.votes(id) {
		m.list.end(id)
	}
}

// tookAddress notes that another process has the address of a member, whose process has ended then. What it sent before may be on its way
// until its stream breaks: its end counts after that, when the other process asks again.
func (m *Machine) tookAddress(by *Member) {
	if !m.list.listed() || m.latest == nil || by.Address == "" || m.votes(by.ReplicaID) {
		return
	}
	p := m.latest.Past()
	for _, v := range slices.Concat(p.sets()...) {
		if r := m.roster.replicas[v.ReplicaID]; v.Address == by.Address && (r == nil || !r.here()) {
			m.over(v.ReplicaID, m.list.holds(v.ReplicaID, p.ID, m.now))
		}
	}
}

// givenUp takes the word of an operator that members have ended, and that nobody trains in a quorum that they were in later.
func (m *Machine) givenUp(e GivenUp) (actions []Action) {
	for _, id := range e.ReplicaIDs {
		if id == m.rumour.ReplicaID { // the job begins anew
			m.rumour = Voter{}
			actions = append(actions, Waived{id, e.By})
		}
		if r := m.roster.replicas[id]; r != nil && r.waiting() || !m.votes(id) {
			continue // it votes, or need not
		}
		m.list.waive(id)
		actions = append(actions, Waived{id, e.By})
	}
	return actions
}

// missing are those without whose votes no quorum forms, whoever of those that are alive asks: nobody where votes are not
// what is missing.
func (m *Machine) missing() (ids []string) {
	_, missing := m.torn(decision{}, m.alive())
	for _, v := range missing {
		ids = append(ids, v.ReplicaID)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// alive are the members of which something was heard.
func (m *Machine) alive() (alive []*replica) {
	for e := m.roster.pulses.Front(); e != nil; e = e.Next() {
		if r := e.Value.(*replica); r.alive() && !r.presumed {
			alive = append(alive, r)
		}
	}
	return alive
}

// stranded sends on those who wait where not even all who are alive could go on, whatever they wait for.
func (m *Machine) stranded() []Action {
	if !m.list.listed() || m.roster.queue.Len() == 0 {
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
			m.list.release(r.id, m.now)
			m.roster.giveUp(w, m.now)
			actions = append(actions, Refuse{w, Outvoted, reason})
		}
	}
	return actions
}
