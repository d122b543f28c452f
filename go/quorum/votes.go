package quorum

import (
	"fmt"
	"slices"
	"time"
)

// votes decides whether this lighthouse of a list may go on: it counts votes by the rule of succession.go, and sends on members
// that may not go on here. Alone, it allows everything.
//
// Invariants:
//
//  1. No quorum is formed without the votes for it (lacking), but where all of the last one ask and it has no base: then all
//     vote.
//  2. A member that is sent on is released from its bond first (bond.go, invariant 2).
//  3. Requests that lack votes do not wait for ever: after heartbeat_timeout_ms they are sent on, since the votes may be at another
//     lighthouse.
type votes struct {
	*core
	past   *memory
	list   *succession
	ends   *ends
	lacked time.Time // since when the waiting members may not go on; zero while they may
}

// lacking reports, in words, that the members of a quorum may not go on, because another lighthouse might serve the rest of
// the last one. Those whose votes are missing are returned too.
func (v *votes) lacking(d decision, in []*replica) (reason string, missing []Voter) {
	latest := v.past.latest
	if !v.list.listed() || d.cause == fastPath && latest.Base == nil {
		return "", nil // nobody else serves the job, or all of the last quorum vote
	}
	if latest == nil { // a job begins at one lighthouse of the list, and where nobody has spoken of a quorum: else it would begin twice
		switch rumor := v.past.rumor; {
		case v.list.seat.Place == 0 && rumor.ReplicaID == "":
			return "", nil
		case v.list.seat.Place == 0:
			return fmt.Sprintf("the job had a quorum, of which replica %s spoke, and nobody here knows who was in it; another lighthouse might serve them",
				rumor.ReplicaID), []Voter{rumor}
		}
		return fmt.Sprintf("nobody who asks was in a quorum of this job before, and a job begins at the first lighthouse of its list: this is %s",
			v.list.seat), nil
	}
	here := make(map[string]bool, len(in))
	for _, r := range in {
		here[r.id] = true
	}
	for _, short := range v.list.shortfalls(latest.Past(), func(id string) bool { return here[id] }) {
		if reason == "" {
			reason = short.describe(latest.ID)
		}
		missing = append(missing, short.missing...)
	}
	return reason, missing
}

// base holds the sets that the quorum after the next one has to outvote besides the members of the next one.
func (v *votes) base(in []*replica, changed bool) [][]Voter {
	latest := v.past.latest
	if !v.list.listed() || latest == nil || latest.Base == nil && !changed {
		return nil
	}
	knows := make(map[string]bool, len(in))
	for _, r := range in {
		knows[r.id] = r.newest().known >= latest.ID
	}
	return v.list.baseAfter(latest.Past(), changed, func(id string) bool { return knows[id] })
}

// stillLacking reports that a decision would change nothing: the last one was that votes are missing, by the numbers alone they still
// are, and nothing else is due. Without it each request would cost as much as a quorum has members while one is held up.
func (v *votes) stillLacking(t tally) bool {
	if v.lacked.IsZero() || !v.list.listed() || v.past.latest == nil || t.candidates == 0 ||
		v.now.Sub(v.lacked) >= v.policy.HeartbeatTimeout || v.now.Sub(v.ends.asked) >= probePause {
		return false
	}
	most, all := t.previousCandidates+len(v.list.ended)+len(v.list.waived), len(v.past.latest.Members)
	if 2*most == all { // half of them suffice with the first one
		first := v.past.latest.Members[0].voter()
		r := v.roster.replicas[first.ReplicaID]
		return !v.list.given(first) && (r == nil || !r.waiting())
	}
	return 2*most < all
}

// decided does what is due after a decision. At a tick, those that wait for something else (time, or other members) are looked at too:
// if not even all that are alive have the votes, that wait is in vain.
func (v *votes) decided(d decision, tick bool) {
	switch {
	case d.cause == lacksVotes:
		v.lack(d.detail, d.missing, d.in)
	case tick && !d.ready() && d.cause != forbidden:
		v.stranded()
	}
	if d.ready() || d.cause == nobodyWaits {
		v.lacked = time.Time{}
	}
}

// stranded sends on the waiting members if not even all members that are alive could go on, whatever they wait for.
func (v *votes) stranded() {
	if !v.list.listed() || v.roster.queue.Len() == 0 {
		return
	}
	if v.past.latest != nil && v.past.latest.Base == nil && moreThanHalfAlive(v.past.members) { // as nearly always: there is no need to look further
		v.lacked = time.Time{}
		return
	}
	alive := v.roster.alive()
	reason, missing := v.lacking(decision{}, alive)
	if reason == "" {
		v.lacked = time.Time{}
		return
	}
	v.lack(reason, missing, slices.DeleteFunc(alive, func(r *replica) bool { return !r.waiting() }))
}

// lack asks the hosts of the missing members, and refuses the members that may not go on here after a while: at another lighthouse there may
// be more. Without that they might wait here for ever.
func (v *votes) lack(reason string, missing []Voter, in []*replica) {
	v.ends.probeMissing(missing)
	switch {
	case v.lacked.IsZero():
		v.lacked = v.now
		return
	case v.now.Sub(v.lacked) < v.policy.HeartbeatTimeout:
		return
	}
	v.lacked = time.Time{}
	for _, r := range in {
		for _, w := range r.waiters(func(q request) bool { return q.recallable }) { // one that makes calls has one lighthouse
			v.list.release(r.id, v.now)
			v.refuse(w, Outvoted, reason)
		}
	}
}

// missing are the members without whose votes no quorum forms even if all that are alive ask; none if a quorum lacks something
// else.
func (v *votes) missing() (ids []string) {
	heard := slices.DeleteFunc(v.roster.alive(), func(r *replica) bool { return r.presumed })
	_, missing := v.lacking(decision{}, heard)
	for _, voter := range missing {
		ids = append(ids, voter.ReplicaID)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// moreThanHalfAlive reports whether more than half of some are alive.
func moreThanHalfAlive(of []*replica) bool {
	n := 0
	for _, r := range of {
		if r.alive() {
			n++
		}
	}
	return 2*n > len(of)
}
