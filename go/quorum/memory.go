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

// memory is what a lighthouse knows of the job's past.
//
// Invariants:
//
//  1. No id is given out twice, and none below one that was seen: each new one is above highest.
//  2. highest grows by ids that may have been given out (plausible), and by those of quorums that a member shows that was in
//     them. So no single number spoils the ids of a job for good.
//  3. Nothing is decided while a member is about to tell of a later quorum: while one that waits knows of it, or, at a
//     lighthouse of a list, the one that was asked is alive and had less than heartbeat_timeout_ms to tell. Alone, a lighthouse
//     goes on in the end, although one that knows waits: nobody else can have served the job meanwhile. One of a list goes on
//     without those that do not tell (disbelieve): they are in no quorum here, and give no vote. So it is with a member that was
//     silent meanwhile, and speaks again (ahead). Once nobody is left here who knows, the votes alone keep two histories apart
//     (succession.go).
//  4. members[i] is the replica of latest.Members[i], and nobody else is previous.
type memory struct {
	// latest is the newest quorum, members its replicas in order. Both are nil before the first.
	latest  *Quorum
	members []*replica
	step    int64 // largest of the latest quorum's members

	// highest is the largest quorum_id that anybody has seen. It begins with the milliseconds of the
	// start: the next lighthouse of this job begins above all that this one can give out.
	highest int64

	recall recall // what is to be learned before it may decide
	rumour Voter  // who spoke of a quorum, where none is known, and did not tell of it; empty: nobody
	disk   kept   // what was handed over last
}

// Voter is a member of a quorum as others remember it.
type Voter struct {
	ReplicaID string
	Address   string // of the group's manager server
	Given     bool   // in a base: its vote was given for good to the quorum that has the base (succession.go)
}

// Past is a quorum as its members remember it, all that a lighthouse needs to go on after it.
type Past struct {
	ID      int64
	Step    int64     // largest of its members
	Members []Voter   // ordered by ReplicaID
	Base    [][]Voter // as Quorum.Base
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

// sets are those of which the next quorum needs the votes: the members, and then each of the base.
func (p Past) sets() [][]Voter { return slices.Concat([][]Voter{p.Members}, p.Base) }

// at is the place of a member.
func (q *Quorum) at(id string) (i int, in bool) {
	return slices.BinarySearchFunc(q.Members, id, func(m Member, id string) int { return strings.Compare(m.ReplicaID, id) })
}

func (m *Member) voter() Voter { return Voter{ReplicaID: m.ReplicaID, Address: m.Address} }

// Validate says why what somebody remembers cannot be true.
func (p Past) Validate() error {
	if p.ID <= 0 || p.ID > maxKnownID {
		return fmt.Errorf("quorum_id is %d: it must be from 1 to %d", p.ID, int64(maxKnownID))
	}
	if len(p.Members) == 0 {
		return fmt.Errorf("quorum %d has no members", p.ID)
	}
	if tooLong(p.Base) {
		return fmt.Errorf("quorum %d has a base of %d quorums: allowed are %d, or more that have at most %d members together",
			p.ID, len(p.Base), mostBases, mostVoters)
	}
	for _, voters := range p.sets() {
		for i, v := range voters {
			if v.ReplicaID == "" || i > 0 && voters[i-1].ReplicaID >= v.ReplicaID {
				return fmt.Errorf("the members of quorum %d are not in order, each once: %q is at place %d", p.ID, v.ReplicaID, i)
			}
		}
	}
	return nil
}

// keepEvery is how often a new step is to be written. It decides nothing but whether a warning is due.
const keepEvery = time.Second

// kept is what is on the disk, as far as it matters when to write.
type kept struct {
	step int64
	at   time.Time
}

// keep hands over what is to be remembered: at once where the quorum is a new one, and its step once in a while.
func (m *memory) keep(fresh bool, seat Seat, now time.Time) []Action {
	if m.latest == nil || !fresh && (m.step == m.disk.step || now.Sub(m.disk.at) < keepEvery) {
		return nil
	}
	m.disk = kept{m.step, now}
	p := m.latest.Past()
	p.Step = m.step
	return []Action{Keep{p, m.highest, seat}}
}

// finish forgets the past of a job whose training has ended on purpose, as every member of its latest quorum said: what begins
// here next is another training, which loses nothing. The ids stay, since those of another training must not repeat them. One
// member that only went away may come back, and its weights count. So may those of a quorum at another lighthouse of a list.
func (m *Machine) finish() []Action {
	if m.latest == nil || m.list.listed() || slices.ContainsFunc(m.members, func(r *replica) bool { return !r.finished }) {
		return nil
	}
	for _, r := range m.members {
		m.roster.setPrevious(r, false, m.now)
	}
	actions := m.drains.release()
	m.memory = memory{highest: m.highest, recall: m.recall}
	m.anew, m.suspicion, m.watch, m.behind = reconnect{}, suspicion{}, watch{}, time.Time{}
	return append(actions, Keep{Highest: m.highest, Seat: m.list.seat})
}

func (m *memory) latestID() int64 {
	if m.latest == nil {
		return 0
	}
	return m.latest.ID
}

const (
	// aheadOfClock is how far the milliseconds in an id may be ahead of this lighthouse's clock, and be believed: those of two
	// hosts differ by less.
	aheadOfClock = time.Hour
	// termReach is how far a member may be ahead of all terms that this lighthouse has seen: a term for each time that somebody
	// went from one lighthouse to another since. A member further ahead has to show the quorum that it was in.
	termReach = 1 << 12
	// mostTold is the highest term that a member may say it was told: after it there is room for others.
	mostTold = maxTerm - termReach
)

// plausible reports whether an id that somebody claims to know may have been given out. One that is not must be shown: with
// who was in the quorum, by one that was. So one wrong number spoils no ids, and a lighthouse whose own clock is wrong goes on
// with its members all the same.
func (m *memory) plausible(id, term int64, now time.Time) bool {
	low := id & (1<<termBits - 1)
	return id <= m.highest || termOf(id) <= term && low <= now.Add(aheadOfClock).UnixMilli()
}

// doubt says why a request is refused that claims to know a quorum, and cannot tell of it; empty if it is taken.
func (m *Machine) doubt(e Asked) (why Refusal, reason string) {
	switch id := e.KnownQuorumID; {
	case e.Tells && id <= maxKnownID, m.plausible(id, m.list.term, m.now):
		return 0, ""
	default:
		return Unbelieved, fmt.Sprintf("known_quorum_id of replica %s is %d: it is far ahead of this lighthouse's clock (%d), and the request does not show that quorum",
			e.Member.ReplicaID, id, m.now.UnixMilli())
	}
}

// overreaches says why a greeting is turned away that claims a term far ahead of all that were seen; empty if it is not. If
// the member can show a quorum of about that term, it shall (shows).
func (m *Machine) overreaches(e Greeted) (refusal string, shows bool) {
	told, seen := e.told(), max(m.list.term, termOf(m.highest))
	switch {
	case told > mostTold:
		return fmt.Sprintf("replica %s was told term %d: the largest is %d", e.ReplicaID, told, int64(mostTold)), false
	case told <= seen+termReach:
		return "", false
	case termOf(e.KnownQuorumID)+termReach < told:
		return fmt.Sprintf("replica %s was told term %d, and knows of no quorum of about that term; the highest that was seen here is %d",
			e.ReplicaID, told, seen), false
	}
	return "", true
}

// told is the highest term that a member knows of. One that got its quorum by a call was not told any.
func (e Greeted) told() int64 { return max(e.Term, termOf(e.KnownQuorumID)) }

// recalled goes on after a quorum that was formed elsewhere, or before the start. Its members are taken for alive until
// they had the time to come, but for those whose hosts say that they are gone.
func (m *Machine) recalled(e Recalled) (actions []Action) {
	p := e.Past
	m.list.remember(e.Seat)
	if p.Validate() != nil {
		if e.From == "" && p.ID == 0 && len(p.Members) == 0 { // of a training that has ended
			m.highest = max(m.highest, min(e.Highest, maxKnownID))
		}
		return nil
	}
	if _, in := slices.BinarySearchFunc(p.Members, e.From, func(v Voter, id string) int { return strings.Compare(v.ReplicaID, id) }); e.From != "" && !in {
		return []Action{Doubted{e.From, fmt.Sprintf("it shows quorum %d, and was not in it", p.ID)}}
	}
	// Alone, there is no term to go by, and nobody can have got further than this: so no forged past takes all ids.
	if seen := termOf(m.highest); !m.list.listed() && e.From != "" && termOf(p.ID) > seen+termReach {
		return []Action{Doubted{e.From, fmt.Sprintf("it shows quorum %d of term %d: the highest that was seen here is %d", p.ID, termOf(p.ID), seen)}}
	}
	switch beyond := m.list.listed() && termOf(p.ID) > m.list.term; {
	case beyond && e.From == "":
		// Nobody has to show what this lighthouse wrote to disk itself. It begins a term of its own, since that of the quorum may belong
		// to another lighthouse. Where the disk answered late, members have asked already: that counts no more, as with every new term.
		actions = m.begin("what is on disk", termOf(p.ID))
	case beyond:
		r := m.roster.replicas[e.From]
		if r == nil || r.claims < termOf(p.ID) {
			return []Action{Doubted{e.From, fmt.Sprintf("it shows quorum %d of term %d: the term here is %d", p.ID, termOf(p.ID), m.list.term)}}
		}
		actions = m.begin("replica "+r.id, r.claims)
	}
	m.highest = max(m.highest, p.ID, min(e.Highest, maxKnownID))
	if p.ID <= m.latestID() {
		return actions
	}
	before := m.members
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
			actions = append(actions, Probe{v.ReplicaID, v.Address})
		}
	}
	for _, r := range before { // after that: who is in both is not forgotten in between, nor the number of its last request
		_, in := q.at(r.id)
		m.roster.setPrevious(r, in, m.now)
	}
	m.latest, m.step, m.rumour, m.suspicion = q, p.Step, Voter{}, suspicion{}
	if r := m.roster.replicas[e.From]; r != nil {
		r.claim = claim{}
	}
	m.anew.forget()
	m.away = false // all of this quorum have the time to come
	m.list.keep(m.votes)
	m.watch.next(m.now, false)
	if m.recall.id <= p.ID {
		m.recall = recall{}
	}
	return actions
}

// processEnded notes that a member's host says so, unless the member itself said something since.
func (m *Machine) processEnded(id string) (failed []failure) {
	r := m.roster.replicas[id]
	if r != nil && r.here() {
		return nil
	}
	m.over(id, m.list.holds(id, m.latestID(), m.now))
	if r != nil && r.alive() {
		m.roster.die(r, m.now)
		failed = []failure{{r, ProcessEnded, "its process is gone"}}
	}
	return failed
}

// voter is a member of the latest quorum, or of its base.
func (m *memory) voter(id string) (Voter, bool) {
	if m.latest == nil {
		return Voter{}, false
	}
	if i, in := m.latest.at(id); in {
		return m.latest.Members[i].voter(), true
	}
	for _, set := range m.latest.Base {
		if i, in := slices.BinarySearchFunc(set, id, func(v Voter, id string) int { return strings.Compare(v.ReplicaID, id) }); in {
			return set[i], true
		}
	}
	return Voter{}, false
}

func (m *memory) votes(id string) bool {
	_, votes := m.voter(id)
	return votes
}

// regress reports, in words, that the members of a quorum would go on below the step that the job had reached, while
// others of the last quorum are not there, and whether any of those may still come.
func (m *memory) regress(in []*replica) (reason string, mayCome bool) {
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
