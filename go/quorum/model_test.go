package quorum

import (
	"fmt"
	"slices"
	"time"
)

// model is the machine written down as slowly and obviously as possible: it keeps what it was told, and
// looks at all of it after every event. It knows one lighthouse, alone.
type model struct {
	policy   Policy
	beats    map[string]time.Time // of those whose signs of life are not too old
	facts    map[string]*facts    // of those in beats, those that wait, and those of the latest quorum
	died     bool                 // somebody, in the step
	dead     map[string]Cause     // in the step, of the latest quorum
	failed   map[string]Cause     // the same, as it is told
	broken   bool                 // a member of the latest quorum died since
	told     bool                 // and before the step
	rejoined bool                 // one that left asks again
	waiting  []Asked              // in the order of asking
	joined   map[string]time.Time // since when a candidate is one
	latest   *Quorum
	highest  int64
	shrunk   bool      // the latest quorum left candidates out
	behind   time.Time // since when a quorum waits that would go on below the latest one's step
	leavers  []string  // of the latest quorum

	reports map[string]string // of the latest quorum: whom a member suspects
	checked map[string]bool

	steps   []time.Duration // of quorums with the members of the one before
	began   time.Time       // when the latest quorum was there
	askedAt time.Time
	said    map[string]Progressed
	heard   map[string]time.Time
	named   map[string]bool

	did []string // in the step: what is not a quorum, in words
}

// facts are what a lighthouse knows of a member besides its signs of life and its requests.
type facts struct {
	lost     time.Time // when the stream of a suspect broke
	out      bool      // it counts as dead until it asks
	presumed bool      // nothing was heard of it yet
	returned bool      // it began a stream since its last answer
	draining bool
	ending   bool
}

func newModel(p Policy, start time.Time) *model {
	return &model{
		policy: p, beats: map[string]time.Time{}, facts: map[string]*facts{}, joined: map[string]time.Time{}, highest: start.UnixMilli(),
	}
}

func (m *model) does(what string, about ...any) { m.did = append(m.did, what+" "+fmt.Sprint(about...)) }

// step returns the quorum that the event leads to, if any, and who is answered.
func (m *model) step(e Event, now time.Time) (*Quorum, []WaiterID) {
	m.told = m.broken
	m.died, m.dead, m.did = false, map[string]Cause{}, nil
	if slept, ok := e.(Slept); ok {
		m.slept(slept.For)
	}
	m.look(now)
	decide := m.take(e, now)
	m.look(now)
	m.fail()
	if decide || m.died {
		return m.evaluate(now)
	}
	return nil, nil
}

// take notes an event, and reports whether it may lead to a quorum, whoever died.
func (m *model) take(e Event, now time.Time) bool {
	switch e := e.(type) {
	case Asked:
		return m.asked(e, now)
	case GaveUp:
		m.waiting = slices.DeleteFunc(m.waiting, func(a Asked) bool { return a.Waiter == e.Waiter })
	case Beat:
		m.beat(e.ReplicaID, now)
	case Greeted:
		m.beat(e.ReplicaID, now)
		m.facts[e.ReplicaID].returned, m.facts[e.ReplicaID].ending = true, false
		return true
	case Lost:
		f := m.facts[e.ReplicaID]
		if f != nil && f.draining && f.out && m.beating(e.ReplicaID, now) {
			delete(m.beats, e.ReplicaID) // it left: nothing more is expected of it
		} else if m.healthy(e.ReplicaID, now) && f.lost.IsZero() {
			f.lost = now
		}
	case Incomplete:
		if m.healthy(e.ReplicaID, now) && !m.waits(e.ReplicaID) {
			m.putOut(e.ReplicaID, RankGone)
		}
	case Suspected:
		m.suspected(e, now)
	case Checked:
		if m.latest != nil && e.QuorumID == m.latest.ID && !e.Reached && m.member(e.ReplicaID) && m.silent(e.ReplicaID, now) {
			m.putOut(e.ReplicaID, Unreachable)
		}
	case Progressed:
		if m.said != nil {
			m.said[e.ReplicaID], m.heard[e.ReplicaID] = e, now
		}
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
		return true
	case Ended:
		if f := m.facts[e.ReplicaID]; f != nil && m.healthy(e.ReplicaID, now) && !m.waits(e.ReplicaID) && (f.presumed || !f.lost.IsZero()) {
			delete(m.beats, e.ReplicaID)
			f.lost, f.presumed = time.Time{}, false
			m.die(e.ReplicaID, Gone)
		}
		return true
	case GivenUp:
		waived := false
		for _, id := range e.ReplicaIDs {
			if m.member(id) && !m.waits(id) {
				m.does("waived", id)
				waived = true
			}
		}
		return waived
	case Tick:
		m.overdue(now)
		if !slices.ContainsFunc(m.members(), func(id string) bool { return m.healthy(id, now) && !m.waits(id) }) {
			m.release()
		}
		return true
	}
	return false
}

func (m *model) asked(e Asked, now time.Time) bool {
	id := e.Member.ReplicaID
	if e.KnownQuorumID > max(m.highest, now.Add(time.Hour).UnixMilli()) { // it would have to show it
		m.does("refuse", e.Waiter)
		return false
	}
	m.highest = max(m.highest, e.KnownQuorumID)
	if m.lostAnswer(e, now) {
		m.beat(id, now)
		m.facts[id].returned = false
		m.does("again", e.Waiter)
		return false
	}
	if at := slices.Index(m.leavers, id); at >= 0 {
		m.leavers = slices.Delete(m.leavers, at, at+1)
		m.rejoined = true
	}
	m.beat(id, now)
	m.facts[id].out, m.facts[id].ending = false, false
	m.waiting = append(m.waiting, e)
	if m.latest == nil || e.Member.Step >= m.latest.Past().Step {
		m.behind = time.Time{}
	}
	return true
}

// lostAnswer: it says what it said when it was put into the latest quorum, on a stream that it began since, and nothing
// else has happened.
func (m *model) lostAnswer(e Asked, now time.Time) bool {
	id := e.Member.ReplicaID
	f := m.facts[id]
	if m.latest == nil || m.latest.Revision == 0 || m.latest.ID != m.highest || m.told || m.rejoined || len(m.leavers) > 0 || !m.member(id) {
		return false
	}
	if f == nil || !f.returned || f.draining || !m.healthy(id, now) {
		return false
	}
	if slices.ContainsFunc(m.members(), func(id string) bool { return m.waits(id) && m.healthy(id, now) }) {
		return false
	}
	return !m.waits(id) && fmt.Sprint(m.latest.Members[slices.Index(m.members(), id)]) == fmt.Sprint(e.Member)
}

func (m *model) beat(id string, now time.Time) {
	m.beats[id] = now
	if m.facts[id] == nil {
		m.facts[id] = &facts{}
	}
	m.facts[id].lost, m.facts[id].presumed = time.Time{}, false
}

func (m *model) putOut(id string, cause Cause) {
	m.facts[id].out, m.facts[id].lost = true, time.Time{}
	m.die(id, cause)
}

// die notes the end of one that was alive. Whoever is not in the latest quorum ends without a word.
func (m *model) die(id string, cause Cause) {
	m.died = true
	if m.member(id) || m.waits(id) {
		m.dead[id] = cause
	}
	m.broken = m.broken || m.member(id)
}

// fail tells of those who died and are in the latest quorum. Who said before that it ends did.
func (m *model) fail() {
	m.failed = map[string]Cause{}
	for id, cause := range m.dead {
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
		m.facts[id].out, m.facts[id].lost = true, time.Time{}
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
	if p.Validate() != nil {
		return
	}
	if in := slices.ContainsFunc(p.Members, func(v Voter) bool { return v.ReplicaID == e.From }); e.From != "" && !in {
		m.does("doubted", e.From)
		return
	}
	m.highest = max(m.highest, p.ID, min(e.Highest, maxKnownID))
	if m.latest != nil && p.ID <= m.latest.ID {
		return
	}
	m.latest = &Quorum{ID: p.ID, Created: now}
	for _, v := range p.Members {
		m.latest.Members = append(m.latest.Members, Member{ReplicaID: v.ReplicaID, Step: p.Step})
		if !m.healthy(v.ReplicaID, now) {
			m.beat(v.ReplicaID, now)
			m.facts[v.ReplicaID].presumed = true
		}
	}
	m.died, m.broken = m.died || len(m.dead) > 0, false
	clear(m.dead) // of the quorum before: the members of this one have the time to come
	m.next(now, false)
}

// next begins a quorum.
func (m *model) next(now time.Time, sameMembers bool) {
	if sameMembers {
		m.steps = append(m.steps, now.Sub(m.began))
	}
	m.began, m.askedAt = now, time.Time{}
	m.said, m.heard, m.named = nil, nil, map[string]bool{}
	m.reports, m.checked = map[string]string{}, map[string]bool{}
}

func (m *model) slept(span time.Duration) {
	for id, beat := range m.beats {
		m.beats[id] = beat.Add(span)
		if f := m.facts[id]; !f.lost.IsZero() {
			f.lost = f.lost.Add(span)
		}
	}
	m.began = m.began.Add(span)
}

func (m *model) suspected(e Suspected, now time.Time) {
	if m.latest == nil || e.QuorumID != m.latest.ID || !m.member(e.Reporter) {
		return
	}
	m.beat(e.Reporter, now)
	if _, again := m.reports[e.Reporter]; again || e.Suspect == e.Reporter {
		return
	}
	m.reports[e.Reporter] = e.Suspect
	for _, id := range m.members() {
		lost := 0
		for _, suspect := range m.reports {
			if suspect == "" || suspect == id {
				lost++
			}
		}
		if m.silent(id, now) && !m.checked[id] && 2*lost > len(m.members())-1 {
			m.checked[id] = true
			m.does("check", id)
		}
	}
}

// silent: it neither asked nor reported, and counts as alive.
func (m *model) silent(id string, now time.Time) bool {
	_, reported := m.reports[id]
	return !reported && !m.waits(id) && m.healthy(id, now)
}

// overdue looks at a step that takes too long.
func (m *model) overdue(now time.Time) {
	if m.latest == nil {
		return
	}
	patience := m.policy.StalledAfter
	if patience == 0 {
		patience = max(5*time.Second, 10*m.median(), time.Duration(len(m.latest.Members))*time.Millisecond)
	}
	age, answers := now.Sub(m.began), min(time.Second, patience/2)
	if m.policy.StalledAfter == 0 && age < 4*time.Second || age < patience-answers {
		return
	}
	all := true
	for _, id := range m.members() {
		_, said := m.said[id]
		all = all && (said || !m.healthy(id, now) || m.waits(id))
	}
	if age >= patience && !m.askedAt.IsZero() && (now.Sub(m.askedAt) >= answers || all) {
		m.nameStalled(now, age, patience)
		m.part(now)
	}
	if m.askedAt.IsZero() || age >= patience && now.Sub(m.askedAt) >= answers {
		var ask []string
		for _, id := range m.members() {
			if m.healthy(id, now) && !m.waits(id) {
				ask = append(ask, id)
			}
		}
		if len(ask) > 0 {
			m.askedAt, m.said, m.heard = now, map[string]Progressed{}, map[string]time.Time{}
			m.does("ask", ask)
		}
	}
}

// nameStalled names those that hold up others.
func (m *model) nameStalled(now time.Time, age, patience time.Duration) {
	held := false
	for _, id := range m.members() {
		held = held || m.healthy(id, now) && (m.waits(id) || m.said[id].Progress.Waits)
	}
	for _, id := range m.members() {
		p, said := m.said[id]
		still := age
		if said {
			still = min(age, p.Progress.For+now.Sub(m.heard[id]))
		}
		if !held || !m.healthy(id, now) || m.waits(id) || p.Progress.Waits || still < patience {
			continue
		}
		if !m.named[id] {
			m.named[id] = true
			m.does("stalled", id)
		}
		if limit := m.policy.EjectStalledAfter; limit > 0 && still >= limit {
			m.putOut(id, NoProgress)
		}
	}
}

// part finds one that asks for the quorum of a step in which the others wait for it.
func (m *model) part(now time.Time) {
	if m.told {
		return
	}
	for _, id := range m.members() {
		for _, peer := range m.members() {
			p, said := m.said[peer]
			if m.waits(id) && said && p.Progress.Waits && p.Progress.Step >= m.newest(id).Step && m.healthy(peer, now) && !m.waits(peer) {
				m.die(id, Parted)
				return
			}
		}
	}
}

func (m *model) median() time.Duration {
	last := slices.Sorted(slices.Values(m.steps[max(0, len(m.steps)-64):]))
	if len(last) == 0 {
		return 0
	}
	return last[len(last)/2]
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

func (m *model) newest(id string) (member Member) {
	for _, a := range m.waiting {
		if a.Member.ReplicaID == id {
			member = a.Member
		}
	}
	return member
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
	return !f.lost.IsZero() && now.Sub(f.lost) >= m.policy.SuspectGrace
}

// look notes who is too silent, who became a candidate, and who is none any more.
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
			m.die(id, cause)
		}
		delete(m.beats, id)
		f.out, f.presumed, f.lost = false, false, time.Time{}
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
	for _, a := range m.waiting { // the newest request wins
		if m.healthy(a.Member.ReplicaID, now) {
			found[a.Member.ReplicaID] = a.Member
		}
	}
	return found
}

func (m *model) evaluate(now time.Time) (*Quorum, []WaiterID) {
	candidates := m.candidates(now)
	previous := map[string]bool{}
	if m.latest != nil {
		for _, member := range m.latest.Members {
			previous[member.ReplicaID] = true
		}
	}
	shrink := false
	for _, c := range candidates {
		shrink = shrink || c.ShrinkOnly
	}
	var in []Member
	for id, c := range candidates {
		if !shrink || len(previous) == 0 || previous[id] {
			in = append(in, c)
		}
	}
	slices.SortFunc(in, func(a, b Member) int {
		if a.ReplicaID < b.ReplicaID {
			return -1
		}
		return 1
	})

	fast := len(previous) > 0
	for id := range previous {
		if _, ok := candidates[id]; !ok {
			fast = false
		}
	}
	if !fast {
		first, former := now, false
		for id, joined := range m.joined {
			switch {
			case previous[id] && !former: // whoever was in the latest quorum counts before all others
				first, former = joined, true
			case previous[id] == former && joined.Before(first):
				first = joined
			}
		}
		healthy, presumed := 0, false
		for id := range m.beats {
			if m.healthy(id, now) {
				healthy++
				presumed = presumed || m.facts[id].presumed
			}
		}
		enough := len(in) >= m.policy.MinReplicas
		majority := float64(len(candidates)) > float64(healthy)/2
		everybody := len(candidates) == healthy
		if !enough || !majority || !everybody && (now.Sub(first) < m.policy.JoinTimeout || presumed) {
			if len(candidates) == 0 {
				m.behind = time.Time{}
			}
			return nil, nil
		}
		if m.mustWaitForTheStep(in, candidates, now) {
			return nil, nil
		}
	}
	m.behind = time.Time{}

	same := len(in) == len(previous)
	failures := false
	for _, member := range in {
		same = same && previous[member.ReplicaID]
		failures = failures || member.CommitFailures > 0
	}
	q := &Quorum{Members: in, Created: now, Revision: RevisionOf(in)}
	if same && !failures && !m.broken && !m.rejoined && m.highest <= m.latest.ID {
		q.ID = m.latest.ID
	} else {
		m.highest++
		q.ID = m.highest
	}
	m.next(now, same)
	m.release()
	m.latest, m.shrunk, m.broken, m.rejoined = q, len(in) < len(candidates), false, false

	var answered []WaiterID
	var left []Asked
	for _, a := range m.waiting {
		if slices.ContainsFunc(in, func(member Member) bool { return member.ReplicaID == a.Member.ReplicaID }) {
			answered = append(answered, a.Waiter)
			m.facts[a.Member.ReplicaID].returned = false
		} else {
			left = append(left, a)
		}
	}
	m.waiting = left
	m.joined = map[string]time.Time{}
	m.look(now)
	return q, answered
}

// mustWaitForTheStep: the job was ahead of all who are in the quorum, and somebody who lives may know more.
func (m *model) mustWaitForTheStep(in []Member, candidates map[string]Member, now time.Time) bool {
	if m.latest == nil {
		return false
	}
	reached, has := int64(0), int64(0)
	lives := false
	for _, member := range m.latest.Members {
		reached = max(reached, member.Step)
		_, here := candidates[member.ReplicaID]
		lives = lives || !here && m.healthy(member.ReplicaID, now)
	}
	for _, member := range in {
		has = max(has, member.Step)
	}
	if has >= reached || !lives {
		return false
	}
	if m.behind.IsZero() {
		m.behind = now
	}
	return now.Sub(m.behind) < m.policy.HeartbeatTimeout
}
