package quorum

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// model is a slow and obvious version of the machine: it keeps every message, and looks at all of
// them after each event.
type model struct {
	policy Policy
	beats  map[string]time.Time // last signs of life, if they are not too old
	// of the members in beats, of those with a request, and of those in the latest quorum
	facts     map[string]*facts
	anyFailed bool                 // a member failed in this call of step
	fresh     map[string]Cause     // members of the latest quorum that failed in this call of step
	failed    map[string]Cause     // those of them whose failure is reported
	broken    bool                 // a member of the latest quorum has failed since it was formed
	reported  bool                 // the value of broken before this call of step
	rejoined  bool                 // a member that left asks again
	waiting   []Asked              // pending requests, in their order
	joined    map[string]time.Time // since when each candidate is one
	latest    *Quorum
	adopted   bool      // the latest quorum was formed elsewhere
	whole     bool      // and is known with the records of its members
	wanted    Claim     // the latest claimed round that was not shown
	since     time.Time // since when there is one
	floor     int64     // new ids are above it
	highest   int64     // the largest id that was used, or that a member knows
	shrunk    bool      // the latest quorum left candidates out
	// since when a quorum is delayed because it would be below the latest one's step
	behind  time.Time
	copies  []Copies // that were told of since the first quorum
	leavers []string // of the latest quorum
	// members of the latest quorum that were sent with a smaller step than their own
	lowered map[string]bool

	reports map[string]string // in the latest quorum: the suspect of each reporting member
	checked map[string]bool

	steps      []time.Duration // durations of steps after which the members stayed the same
	began      time.Time       // when the latest quorum was formed
	askedAt    time.Time
	answers    map[string]Progressed
	answeredAt map[string]time.Time
	named      map[string]bool
	busy       bool // a member has reported another phase than that of a step

	did []string // in this call of step: the actions other than quorums and failures, in words
}

// facts are what a lighthouse knows of a member besides its signs of life and its requests.
type facts struct {
	broke    time.Time // when the stream of a suspect broke
	out      bool      // it counts as failed until it asks
	presumed bool      // it has sent nothing yet
	returned bool      // it has begun a stream since its last answer
	draining bool
	ending   bool
	claim    Claim // the latest round that it has claimed
	unshown  bool  // it did not show what it claimed in time
}

func newModel(p Policy, start time.Time) *model {
	return &model{
		policy: p, beats: map[string]time.Time{}, facts: map[string]*facts{}, joined: map[string]time.Time{},
		floor: start.UnixMilli(),
	}
}

func (m *model) does(what string, about ...any) { m.did = append(m.did, what+" "+fmt.Sprint(about...)) }

// step returns the quorum that the event leads to, nil if none, and the waiters that are answered.
func (m *model) step(e Event, now time.Time) (*Quorum, []WaiterID) {
	m.reported = m.broken
	m.anyFailed, m.fresh, m.did = false, map[string]Cause{}, nil
	if slept, ok := e.(Slept); ok {
		m.slept(slept.For)
	}
	m.look(now)
	decide := m.take(e, now)
	m.look(now)
	m.fail()
	if decide || m.anyFailed {
		return m.evaluate(now)
	}
	return nil, nil
}

// take records an event, and reports whether it may lead to a quorum even if no member fails by it.
func (m *model) take(e Event, now time.Time) bool {
	switch e := e.(type) {
	case Asked:
		return m.asked(e, now)
	case Withdrawn:
		m.waiting = slices.DeleteFunc(m.waiting, func(a Asked) bool { return a.Waiter == e.Waiter })
	case Beat:
		m.beat(e.ReplicaID, now)
		m.occupied(e.ReplicaID, e.Phase)
	case Greeted:
		if e.Term > 0 {
			m.does("refuse stream", e.ReplicaID)
			return false
		}
		m.beat(e.ReplicaID, now)
		m.facts[e.ReplicaID].returned, m.facts[e.ReplicaID].ending = true, false
		m.claimed(e.ReplicaID, e.Known, now)
	case Disconnected:
		f := m.facts[e.ReplicaID]
		if f != nil && f.draining && f.out && m.beating(e.ReplicaID, now) {
			delete(m.beats, e.ReplicaID) // it has left: it is no suspect
		} else if m.healthy(e.ReplicaID, now) && f.broke.IsZero() {
			f.broke = now
		}
	case Incomplete:
		if m.healthy(e.ReplicaID, now) && !m.waits(e.ReplicaID) {
			m.markFailed(e.ReplicaID, RankFailed)
		}
	case Copied:
		// otherwise it is of a history that the job has given up, or of another job
		if m.latest != nil && (e.Quorum >= m.latest.ID || e.Quorum > 0 && e.Step <= m.latest.Past().Step) {
			m.copies = append(m.copies, e.Copies)
		}
	case Suspected:
		m.suspected(e, now)
	case Checked:
		if m.latest != nil && e.QuorumID == m.latest.ID && !e.Reached && m.member(e.ReplicaID) &&
			m.silent(e.ReplicaID, now) {
			m.markFailed(e.ReplicaID, Unreachable)
		}
	case Progressed:
		if m.answers != nil {
			m.answers[e.ReplicaID], m.answeredAt[e.ReplicaID] = e, now
			m.occupied(e.ReplicaID, e.Progress.Phase)
		}
	case Raised:
		m.does("judge", e.ReplicaID)
	case Drained:
		if m.healthy(e.ReplicaID, now) {
			m.facts[e.ReplicaID].draining = true
			m.does("drain", e.ReplicaID)
		}
	case Leaving:
		m.leaves(e.ReplicaID, now)
		return true
	case ShuttingDown:
		if f := m.facts[e.ReplicaID]; f != nil {
			f.ending = true
		}
		m.does("release", e.ReplicaID)
	case Recalled:
		m.recalled(e, now)
		m.redeliverPending(now)
		return true
	case Tick:
		if m.wanted != (Claim{}) {
			m.search(now)
		}
		m.redeliverPending(now)
		m.tooLong(now)
		if !slices.ContainsFunc(m.members(), func(id string) bool {
			return m.healthy(id, now) &&
				!m.waits(id)
		}) {
			m.release()
		}
		return true
	}
	return false
}

func (m *model) asked(e Asked, now time.Time) bool {
	id := e.Member.ReplicaID
	plausible := e.KnownQuorumID <= max(m.floor, m.highest, now.Add(time.Hour).UnixMilli())
	if !plausible && (!e.Recallable || e.KnownQuorumID > maxKnownID) {
		// the member would have to show that quorum
		m.does("refuse", e.Waiter)
		return false
	}
	if plausible {
		m.highest = max(m.highest, e.KnownQuorumID)
	}
	if m.lostAnswer(e, now) {
		m.beat(id, now)
		m.facts[id].returned = false
		m.does("redeliver", e.Waiter)
		return false
	}
	if at := slices.Index(m.leavers, id); at >= 0 {
		m.leavers = slices.Delete(m.leavers, at, at+1)
		m.rejoined = true
	}
	m.beat(id, now)
	m.facts[id].out, m.facts[id].ending = false, false
	for _, a := range m.waiting {
		if a.Member.ReplicaID == id {
			m.does("refuse", a.Waiter) // a newer request came
		}
	}
	m.waiting = slices.DeleteFunc(m.waiting, func(a Asked) bool { return a.Member.ReplicaID == id })
	m.waiting = append(m.waiting, e)
	if m.latest == nil || e.Member.Step >= max(m.latest.Past().Step, m.newestCopy().Step) {
		m.behind = time.Time{}
	}
	if e.Recallable {
		m.claimed(id, Claim{e.KnownQuorumID, math.MinInt64}, now)
	}
	return true
}

// lostAnswer reports whether the request repeats the one that the latest quorum answered, on a stream that
// the member has begun since, and nothing else has happened.
func (m *model) lostAnswer(e Asked, now time.Time) bool {
	asks := slices.ContainsFunc(m.members(), func(id string) bool {
		return m.waits(id) &&
			m.healthy(id, now)
	})
	return m.inForce() && !asks && !m.waits(e.Member.ReplicaID) && m.missed(e.Member, now)
}

// inForce reports whether nothing has happened since the latest quorum.
func (m *model) inForce() bool {
	return m.latest != nil && (!m.adopted || m.whole) && !m.wanted.Newer(m.round()) &&
		m.latest.ID == m.highest &&
		!m.reported && !m.rejoined && len(m.leavers) == 0
}

// missed reports whether the request of a member repeats the one that the latest quorum answered, on a stream
// that it has begun since.
func (m *model) missed(member Member, now time.Time) bool {
	id := member.ReplicaID
	f := m.facts[id]
	if !m.member(id) || !f.returned || !m.healthy(id, now) || f.claim == m.latest.Round() {
		return false
	}
	then := m.latest.Members[slices.Index(m.members(), id)]
	if m.lowered[id] {
		then.Step++
	}
	return fmt.Sprint(then) == fmt.Sprint(member)
}

// redeliverPending answers all members of an adopted quorum that have requests, if each of them repeats its
// request of that quorum.
func (m *model) redeliverPending(now time.Time) {
	if !m.adopted || !m.inForce() {
		return
	}
	asks := slices.DeleteFunc(m.members(), func(id string) bool {
		return !m.waits(id) ||
			!m.healthy(id, now)
	})
	if slices.ContainsFunc(asks, func(id string) bool { return !m.missed(m.newest(id).Member, now) }) {
		return
	}
	for _, id := range asks {
		for _, a := range m.waiting {
			if a.Member.ReplicaID == id {
				m.does("redeliver", a.Waiter)
			}
		}
		m.waiting = slices.DeleteFunc(m.waiting, func(a Asked) bool { return a.Member.ReplicaID == id })
		m.facts[id].returned = false
	}
}

func (m *model) beat(id string, now time.Time) {
	m.beats[id] = now
	if m.facts[id] == nil {
		m.facts[id] = &facts{}
	}
	m.facts[id].broke, m.facts[id].presumed = time.Time{}, false
}

func (m *model) markFailed(id string, cause Cause) {
	m.facts[id].out, m.facts[id].broke = true, time.Time{}
	m.ends(id, cause)
}

// ends records the failure of a live member. It is reported only if the member is in the latest quorum.
func (m *model) ends(id string, cause Cause) {
	m.anyFailed = true
	if m.member(id) || m.waits(id) {
		m.fresh[id] = cause
	}
	m.broken = m.broken || m.member(id)
}

// fail sets the failures that are reported: those of members of the latest quorum. A member that has
// announced its end counts as shut down.
func (m *model) fail() {
	m.failed = map[string]Cause{}
	for id, cause := range m.fresh {
		switch {
		case !m.member(id):
		case m.facts[id].ending:
			m.failed[id] = ShutDown
		default:
			m.failed[id] = cause
		}
	}
}

func (m *model) leaves(id string, now time.Time) {
	if m.facts[id] == nil {
		m.does("release", id)
		return
	}
	for _, a := range m.waiting {
		if a.Member.ReplicaID == id {
			m.does("refuse", a.Waiter)
		}
	}
	m.waiting = slices.DeleteFunc(m.waiting, func(a Asked) bool { return a.Member.ReplicaID == id })
	if m.healthy(id, now) {
		m.facts[id].out, m.facts[id].broke = true, time.Time{}
	}
	switch {
	case !m.member(id):
		m.does("release", id)
	case !slices.Contains(m.leavers, id):
		m.leavers = append(m.leavers, id)
	}
}

func (m *model) release() {
	for _, id := range m.leavers {
		m.does("release", id)
	}
	m.leavers = nil
}

func (m *model) recalled(e Recalled, now time.Time) {
	p := e.Past
	if e.From != "" {
		p = e.Quorum.Past()
	}
	if p.Validate() != nil {
		return
	}
	if in := slices.ContainsFunc(p.Members,
		func(v Voter) bool { return v.ReplicaID == e.From }); e.From != "" && !in {
		m.does("doubted", e.From)
		return
	}
	if f := m.facts[e.From]; f != nil {
		f.unshown, f.claim = false, e.Quorum.Round()
	}
	m.highest, m.floor = max(m.highest, p.ID), max(m.floor, min(e.Highest, maxKnownID))
	if m.latest != nil && p.ID <= m.latest.ID {
		if e.From == "" || !(Claim{p.ID, p.Step}).Newer(m.round()) {
			return
		}
		if fmt.Sprint(p.Members) != fmt.Sprint(m.latest.Past().Members) {
			m.does("doubted", e.From)
			return
		}
		m.latest, m.whole = e.Quorum, true
	} else {
		m.adopt(e, p, now)
	}
	if !m.wanted.Newer(m.round()) {
		m.wanted, m.since = Claim{}, time.Time{}
	}
	m.search(now)
}

func (m *model) adopt(e Recalled, p Past, now time.Time) {
	m.latest, m.lowered = &Quorum{ID: p.ID, Created: now}, nil
	m.adopted, m.whole = true, e.From != ""
	for _, v := range p.Members {
		m.latest.Members = append(m.latest.Members, Member{ReplicaID: v.ReplicaID, Step: p.Step})
		if !m.healthy(v.ReplicaID, now) {
			m.beat(v.ReplicaID, now)
			m.facts[v.ReplicaID].presumed = true
		}
	}
	if m.whole {
		m.latest = e.Quorum
	}
	m.anyFailed, m.broken, m.reported = m.anyFailed || len(m.fresh) > 0, false, false
	clear(m.fresh) // failures of the previous quorum: the members of this one are presumed alive
	m.next(now, false)
}

// round returns the latest known round.
func (m *model) round() Claim {
	switch {
	case m.latest == nil:
		return Claim{}
	case !m.adopted:
		return Claim{m.latest.ID, math.MaxInt64}
	case !m.whole:
		return Claim{m.latest.ID, m.latest.Past().Step - 1}
	}
	return m.latest.Round()
}

// claims reports whether a member claims a later round, which it may know.
func (m *model) claims(id string) bool {
	c := m.facts[id].claim
	return c.QuorumID <= maxKnownID && c.Newer(m.round()) && (m.member(id) || c.QuorumID > m.round().QuorumID)
}

func (m *model) claimed(id string, c Claim, now time.Time) {
	f := m.facts[id]
	if c.QuorumID != f.claim.QuorumID || c.Step != math.MinInt64 {
		f.claim = c
	}
	if m.claims(id) && !f.unshown && f.claim.Newer(m.wanted) {
		m.want(f.claim, now)
	}
}

func (m *model) want(c Claim, now time.Time) {
	if m.wanted == (Claim{}) {
		m.since = now
	}
	m.wanted = c
}

// claimants returns the members that claim a later round, and for which decisions wait: each asks, or is in
// the adopted quorum.
func (m *model) claimants(now time.Time) (ids []string) {
	for id, f := range m.facts {
		if m.healthy(id, now) && (m.waits(id) || m.adopted && m.member(id)) && !f.unshown && m.claims(id) {
			ids = append(ids, id)
		}
	}
	return ids
}

// search makes the latest round that is claimed the wanted one.
func (m *model) search(now time.Time) {
	var newest Claim
	for _, id := range m.claimants(now) {
		if c := m.facts[id].claim; c.Newer(newest) {
			newest = c
		}
	}
	if newest == (Claim{}) {
		m.wanted, m.since = newest, time.Time{}
		return
	}
	m.want(newest, now)
}

// next begins a quorum.
func (m *model) next(now time.Time, sameMembers bool) {
	if sameMembers && !m.busy {
		m.steps = append(m.steps, now.Sub(m.began))
	}
	m.began, m.askedAt, m.busy = now, time.Time{}, false
	m.answers, m.answeredAt, m.named = nil, nil, map[string]bool{}
	m.reports, m.checked = map[string]string{}, map[string]bool{}
}

func (m *model) slept(span time.Duration) {
	for id, beat := range m.beats {
		m.beats[id] = beat.Add(span)
		if f := m.facts[id]; !f.broke.IsZero() {
			f.broke = f.broke.Add(span)
		}
	}
	for id, joined := range m.joined {
		m.joined[id] = joined.Add(span)
	}
	for id, answered := range m.answeredAt {
		m.answeredAt[id] = answered.Add(span)
	}
	if !m.behind.IsZero() {
		m.behind = m.behind.Add(span)
	}
	if !m.since.IsZero() {
		m.since = m.since.Add(span)
	}
	if !m.askedAt.IsZero() {
		m.askedAt = m.askedAt.Add(span)
	}
	m.began = m.began.Add(span)
}

func (m *model) members() (ids []string) {
	if m.latest != nil {
		for _, member := range m.latest.Members {
			ids = append(ids, member.ReplicaID)
		}
	}
	return ids
}

func (m *model) member(id string) bool { return slices.Contains(m.members(), id) }

func (m *model) waits(id string) bool {
	return slices.ContainsFunc(m.waiting, func(a Asked) bool { return a.Member.ReplicaID == id })
}

func (m *model) newest(id string) (newest Asked) {
	for _, a := range m.waiting {
		if a.Member.ReplicaID == id {
			newest = a
		}
	}
	return newest
}

func (m *model) healthy(id string, now time.Time) bool {
	return m.beating(id, now) && !m.facts[id].out
}

func (m *model) beating(id string, now time.Time) bool {
	beat, ok := m.beats[id]
	return ok && now.Sub(beat) < m.policy.HeartbeatTimeout && !m.graceOver(id, now)
}

func (m *model) graceOver(id string, now time.Time) bool {
	f := m.facts[id]
	return !f.broke.IsZero() && now.Sub(f.broke) >= m.policy.SuspectGrace
}

// look updates which members have been silent for too long, and which are candidates.
func (m *model) look(now time.Time) {
	for id, beat := range m.beats {
		if m.beating(id, now) {
			continue
		}
		f := m.facts[id]
		cause := Silent
		if now.Sub(beat) < m.policy.HeartbeatTimeout {
			cause = Connection
		}
		if !f.out {
			m.ends(id, cause)
		}
		delete(m.beats, id)
		f.out, f.presumed, f.broke = false, false, time.Time{}
	}
	for id := range m.facts {
		if _, beats := m.beats[id]; !beats && !m.waits(id) && !m.member(id) {
			delete(m.facts, id)
		}
	}
	candidates := m.candidates(now)
	for id := range candidates {
		if _, ok := m.joined[id]; !ok {
			m.joined[id] = now
		}
	}
	for id := range m.joined {
		if _, ok := candidates[id]; !ok {
			delete(m.joined, id)
		}
	}
}

func (m *model) candidates(now time.Time) map[string]Member {
	found := map[string]Member{}
	for _, a := range m.waiting { // the newest request of a member counts
		if m.healthy(a.Member.ReplicaID, now) {
			found[a.Member.ReplicaID] = a.Member
		}
	}
	return found
}
