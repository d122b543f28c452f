package quorum

import (
	"fmt"
	"slices"
	"time"
)

// votes decides whether this lighthouse of a list may form the next quorum: it counts votes by the rule of succession.go. If there
// are too few votes here, it sends the members to the next lighthouse. A lighthouse without a list needs no votes.
//
// Invariants:
//
//  1. No quorum is formed without the votes for it (lacking). They need not be counted if all members of the latest quorum ask and
//     it has no base: then all votes are there.
//  2. The bond of a member is released before the member is sent to the next lighthouse (bond.go, invariant 2).
//  3. Requests that lack votes do not stay pending for ever: after heartbeat_timeout_ms they are refused, and their members ask the next
//     lighthouse, where the votes may be.
type votes struct {
	*core
	past   *memory
	list   *succession
	ends   *ends
	lacked time.Time // since when votes are missing for the pending requests; zero while they are not
}

// lacking returns the reason why these members may not form a quorum, and the members whose votes are missing: another lighthouse
// might serve those. The reason is empty if these members may form a quorum.
func (v *votes) lacking(d decision, in []*record) (reason string, missing []Voter) {
	latest := v.past.latest
	if !v.list.listed() || d.cause == fastPath && latest.Base == nil {
		return "", nil // no other lighthouse serves the job, or all members of the latest quorum vote
	}
	if latest == nil { // A job begins at the first lighthouse of the list, and only if no member claims an earlier quorum: it must not begin twice.
		switch rumor := v.past.rumor; {
		case v.list.seat.Place == 0 && rumor.ReplicaID == "":
			return "", nil
		case v.list.seat.Place == 0:
			return fmt.Sprintf("the job had a quorum, of which member %s knows the id, and no member here can show it; another lighthouse might serve them",
				rumor.ReplicaID), []Voter{rumor}
		}
		return fmt.Sprintf("none of the members that ask was in a quorum of this job before, and a job begins at the first lighthouse of its list: this is %s",
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

// forgive extends the wait for missing votes by a time in which the lighthouse itself was stopped.
func (v *votes) forgive(span time.Duration) { v.lacked = later(v.lacked, span) }

// base returns the base of the quorum that is formed now (succession.baseAfter).
func (v *votes) base(in []*record, changed bool) [][]Voter {
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

// stillLacking reports whether a decision is needless: votes were missing at the last decision, the counts alone show that they
// still are, and neither a refusal nor a probe is due. Without this shortcut, each request would cost as much as the quorum has
// members while votes are missing.
func (v *votes) stillLacking(t tally) bool {
	if v.lacked.IsZero() || !v.list.listed() || v.past.latest == nil || t.candidates == 0 ||
		v.now.Sub(v.lacked) >= v.policy.HeartbeatTimeout || v.now.Sub(v.ends.asked) >= probePause {
		return false
	}
	most, all := t.previousCandidates+len(v.list.ended)+len(v.list.waived), len(v.past.latest.Members)
	if 2*most == all { // half of them suffice if they include the first one
		first := v.past.latest.Members[0].voter()
		r := v.roster.members[first.ReplicaID]
		return !v.list.given(first) && (r == nil || !r.waiting())
	}
	return 2*most < all
}

// decided handles missing votes after a decision. At a tick, it also looks at requests that wait for something else (time, or other
// members): if the members that are alive lack votes even together, that wait is useless.
func (v *votes) decided(d decision, tick bool) {
	switch {
	case d.cause == lacksVotes:
		v.lack(d.detail, d.missing, d.in)
	case tick && !d.ready() && d.cause != forbidden:
		v.stranded()
	}
	if d.ready() || d.cause == noRequest {
		v.lacked = time.Time{}
	}
}

// stranded refuses the pending requests after heartbeat_timeout_ms if all live members together lack votes, whatever else the
// quorum waits for.
func (v *votes) stranded() {
	if !v.list.listed() || v.roster.queue.Len() == 0 {
		return
	}
	if v.past.latest != nil && v.past.latest.Base == nil && moreThanHalfAlive(v.past.members) { // the usual case, without the cost of lacking
		v.lacked = time.Time{}
		return
	}
	alive := v.roster.alive()
	reason, missing := v.lacking(decision{}, alive)
	if reason == "" {
		v.lacked = time.Time{}
		return
	}
	v.lack(reason, missing, slices.DeleteFunc(alive, func(r *record) bool { return !r.waiting() }))
}

// lack probes the hosts of the members whose votes are missing. After heartbeat_timeout_ms it refuses the requests, so that their members
// ask the next lighthouse (invariant 3).
func (v *votes) lack(reason string, missing []Voter, in []*record) {
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
		for _, w := range r.waiters(func(q request) bool { return q.recallable }) { // a member that makes calls has no other lighthouse
			v.list.release(r.id, v.now)
			v.refuse(w, Outvoted, reason)
		}
	}
}

// missing returns the members whose votes would be missing even if all members with evidence of life asked.
func (v *votes) missing() (ids []string) {
	live := slices.DeleteFunc(v.roster.alive(), func(r *record) bool { return r.presumed })
	_, missing := v.lacking(decision{}, live)
	for _, voter := range missing {
		ids = append(ids, voter.ReplicaID)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// moreThanHalfAlive reports whether more than half of these members are alive.
func moreThanHalfAlive(of []*record) bool {
	n := 0
	for _, r := range of {
		if r.alive() {
			n++
		}
	}
	return 2*n > len(of)
}
