package quorum

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// memory records what a lighthouse knows of the job's past.
//
// A new leader of a cluster learns the latest quorum from the log. A lighthouse without a cluster that starts
// learns it from its disk, or from its members, which know the last quorum that they were in: each request
// carries the id of that quorum. The first member whose id is later than that of the lighthouse's latest
// quorum is asked for that quorum (recall.go). The lighthouse continues as if it had formed that quorum
// itself.
//
// Invariants:
//
//  1. No id is used twice, and each new one is above floor and highest.
//  2. highest is raised only to a plausible id, or to the id of a quorum that one of its members shows. So no
//     single wrong number raises the ids of a job for good.
//  3. members[i] is the record of latest.Members[i], and no other record has previous set.
//  4. A quorum below step forms only after heartbeat_timeout_ms, or once no member with a larger step can
//     come any more (regress). So does one that begins before a copy of the state that hosts hold (copies).
type memory struct {
	*core
	// latest is the newest quorum, members the records of its members in order. Both are nil before the
	// first.
	latest  *Quorum
	members []*record
	// another lighthouse, or an earlier start of this one, formed the latest quorum: a member may know a
	// later round of it
	adopted bool
	// bare: the latest quorum was read from disk or from the log, and none of its members has shown it since.
	// Only their ids and addresses are known, and step is from the time when it was formed.
	bare bool
	step int64 // largest of the latest quorum's members, or less (bare)
	// since when a quorum is delayed because it would be below step; zero if no quorum is delayed
	behind time.Time

	copies  copies
	floor   int64 // new ids are above it: firstID, or what an earlier start has reserved
	highest int64 // the largest quorum_id that was used here, or that a member knows
	end     End   // of the last run whose training is complete
}

// Voter is the record of a quorum's member that the other members keep.
type Voter struct {
	ReplicaID string
	Address   string // of the group's manager server
}

// Claim names the round that a member received last: rounds are ordered by the quorum's id and, in one
// quorum, by the step.
type Claim struct {
	QuorumID int64 // 0: none
	Step     int64 // largest of the quorum's members; math.MinInt64: not known
}

// Newer reports whether the round is a later one.
func (c Claim) Newer(than Claim) bool {
	return c.QuorumID > than.QuorumID || c.QuorumID == than.QuorumID && c.Step > than.Step
}

// Round returns the name of the round in which the quorum was delivered.
func (q *Quorum) Round() Claim {
	return Claim{q.ID, q.MaxStep()}
}

// MaxStep returns the largest step of the members.
func (q *Quorum) MaxStep() (step int64) {
	for i := range q.Members {
		step = max(step, q.Members[i].Step)
	}
	return step
}

// Past is the record of a quorum that disks and logs keep: all that a lighthouse needs to continue after it.
type Past struct {
	ID      int64
	Step    int64    // largest of its members when it was formed
	Members []Voter  // ordered by ReplicaID
	Skipped []string `json:",omitempty"`
}

// Kept is the state of a job that a restarted lighthouse, or the next leader, needs.
type Kept struct {
	Highest int64 `json:"highest"` // no id up to this one may be used again
	// zero: the last training is complete, and the next one has had no quorum yet
	Past   Past   `json:"past"`
	End    End    `json:"end,omitzero"`    // of the last run that is complete
	Copies Copies `json:"copies,omitzero"` // the newest that keepers have told of
}

// Past returns the part of the quorum that disks and logs keep.
func (q *Quorum) Past() Past {
	p := Past{ID: q.ID, Step: q.MaxStep(), Members: make([]Voter, len(q.Members)), Skipped: q.Skipped}
	for i, m := range q.Members {
		p.Members[i] = Voter{ReplicaID: m.ReplicaID, Address: m.Address}
	}
	return p
}

// Place returns the index of a member in the list, which is sorted by replica_id: lighthouses of this package
// send it in this order.
func (q *Quorum) Place(id string) (i int, in bool) {
	return slices.BinarySearchFunc(q.Members, id,
		func(m Member, id string) int { return strings.Compare(m.ReplicaID, id) })
}

// Validate reports what is wrong with a quorum that a member or a disk remembers.
func (p Past) Validate() error {
	if p.ID <= 0 || p.ID > maxKnownID {
		return fmt.Errorf("quorum_id is %d: it must be from 1 to %d", p.ID, int64(maxKnownID))
	}
	if len(p.Members) == 0 {
		return fmt.Errorf("quorum %d has no members", p.ID)
	}
	for i, v := range p.Members {
		if v.ReplicaID == "" || i > 0 && p.Members[i-1].ReplicaID >= v.ReplicaID {
			return fmt.Errorf("the members of quorum %d are not in order, each once: %q is at place %d", p.ID,
				v.ReplicaID, i)
		}
	}
	return nil
}

// keep appends a Keep for a new quorum, a new end or a new copy. While members train on in their quorum,
// nothing else is written.
func (m *memory) keep() {
	k := Kept{Highest: m.ids(), End: m.end, Copies: m.copies.newest}
	if m.latest != nil {
		k.Past = m.latest.Past()
	}
	m.do(Keep{k})
}

// copied takes what keepers report of the job.
func (m *memory) copied(e Copied) {
	if m.latest != nil && m.copies.told(e, m.latest.Past(), m.now) {
		m.keep()
	}
}

// forget drops all but the highest id and the end: the ids of the next training must not repeat those of this
// one, and a group of this one may come back.
func (m *memory) forget() {
	for _, r := range m.members {
		m.roster.setPrevious(r, false, m.now)
	}
	*m = memory{core: m.core, floor: m.floor, highest: m.highest, end: m.end}
	m.keep()
}

// ids returns the id that the next new one is above.
func (m *memory) ids() int64 { return max(m.floor, m.highest) }

func (m *memory) latestID() int64 {
	if m.latest == nil {
		return 0
	}
	return m.latest.ID
}

// round returns the latest round that the lighthouse knows with the records of its members, which it needs in
// order to redeliver it. No member can know a later round of a quorum that was formed here. Of an adopted
// quorum whose records are not known, also the first round is later.
func (m *memory) round() Claim {
	switch {
	case m.latest == nil:
		return Claim{}
	case !m.adopted:
		return Claim{m.latest.ID, math.MaxInt64}
	case m.bare:
		return Claim{m.latest.ID, m.step - 1}
	}
	return Claim{m.latest.ID, m.step}
}

// aheadOfClock is how far the milliseconds in a plausible id may be ahead of this lighthouse's clock. The
// clocks of two hosts differ by less.
const aheadOfClock = time.Hour

// plausible reports whether an id that a member claims to know may exist. If it is not plausible, a member of
// that quorum must show the quorum, with the list of its members. So a single wrong number does not raise the
// ids for good, and a lighthouse whose own clock is wrong still continues after the quorum that its members
// show.
func (m *memory) plausible(id int64) bool {
	low := id & (1<<termBits - 1)
	return id <= m.ids() || TermOf(id) <= m.term && low <= m.clock(m.now).Add(aheadOfClock).UnixMilli()
}

// pick returns the members of a quorum, and whether they differ from those of the latest one; if not, they
// are in order. Otherwise deliver sorts them: many picked quorums are not delivered, since each event picks
// one again while a later check forbids it.
func (m *memory) pick(d decision) (in []*record, changed bool) {
	t := d.tally
	if d.eligible() == t.previous && t.previousCandidates == t.previous {
		return m.members, false // the members of the latest quorum, in the same order
	}
	in = make([]*record, 0, d.eligible())
	for e := m.roster.queue.Front(); e != nil; e = e.Next() {
		r := e.Value.(*record)
		if r.previous || !d.shrink {
			in = append(in, r)
		}
	}
	return in, true
}

// newID returns the id of a quorum that is formed now. The id is new if the members must not reuse the
// connections of the latest quorum, or if a member knows a later quorum: with the id of the latest one here,
// that member would return to an earlier quorum, and to its keys in the store.
func (m *memory) newID(reconnects bool) int64 {
	if m.latest == nil || reconnects || m.highest > m.latest.ID {
		m.highest = m.ids() + 1
		return m.highest
	}
	return m.latest.ID
}

// isKnownTo reports whether all of these members are in the latest quorum, and in no later one. Of a quorum
// that was adopted, the members have to say so: the disk of a restarted lighthouse may be older than what its
// members have received.
func (m *memory) isKnownTo(in []*record) bool {
	return m.latest == nil || !m.adopted || !slices.ContainsFunc(in,
		func(r *record) bool { return r.request.known != m.latest.ID })
}

// follow makes a quorum that was formed here the latest one.
func (m *memory) follow(q *Quorum, in []*record, changed bool) (joined, left []string) {
	m.latest, m.step, m.adopted, m.bare = q, q.MaxStep(), false, false
	if !changed {
		return nil, nil
	}
	for _, r := range in {
		if !r.previous {
			joined = append(joined, r.id)
		}
	}
	before := m.members
	m.members = in
	for _, r := range before {
		m.roster.setPrevious(r, false, m.now)
	}
	for _, r := range in {
		m.roster.setPrevious(r, true, m.now)
	}
	for _, r := range before {
		if !r.previous {
			left = append(left, r.id)
		}
	}
	return joined, left
}

// adopt makes a quorum that was formed before this lighthouse started the latest one. Its members are
// presumed alive for heartbeat_timeout_ms: otherwise the first member that asks would continue alone.
func (m *memory) adopt(q *Quorum) {
	before := m.members
	m.members = make([]*record, len(q.Members))
	for i, v := range q.Members {
		r := m.roster.presume(v.ReplicaID, m.now)
		if r.address == "" {
			r.address = v.Address
		}
		m.roster.setPrevious(r, true, m.now)
		r.behind = false
		m.members[i] = r
	}
	for _, r := range before {
		// after the loop above: the record of a member of both quorums, with its request number, must not be
		// dropped in between
		_, in := q.Place(r.id)
		m.roster.setPrevious(r, in, m.now)
	}
	m.latest, m.step, m.adopted = q, q.MaxStep(), true
}

// remembered returns a quorum of which only the part that disks and logs keep is known.
func (p Past) remembered(now time.Time) *Quorum {
	q := &Quorum{ID: p.ID, Members: make([]Member, len(p.Members)), Created: now, Skipped: p.Skipped}
	for i, v := range p.Members {
		q.Members[i] = Member{ReplicaID: v.ReplicaID, Address: v.Address, Step: p.Step}
	}
	return q
}

// shown takes a later round of the latest quorum, which has the same members.
func (m *memory) shown(q *Quorum) {
	m.latest, m.step, m.bare = q, q.MaxStep(), false
}

// mayRegress is the last check of a decision: if the quorum would be below the step of the latest one,
// members with that step have heartbeat_timeout_ms to come. Without that time, their newer weights would be
// overwritten, and the steps lost.
//
// Once all of them have failed, the job goes on from the newest copy of the state. With ForbidRegression a
// quorum then waits for the hosts of that copy, whose groups may come back. If it does not begin before the
// copy, there is nothing later to wait for.
func (m *memory) mayRegress(d decision, now time.Time) decision {
	step, lives := int64(-1), false
	for _, r := range d.in {
		step, lives = max(step, r.member().Step), lives || r.previous
	}
	if !lives {
		d.behind = m.copies.behind(step)
	}
	forbids := m.policy.ForbidRegression && (m.mayCome() || !m.copies.known())
	reason := cmp.Or(d.behind, m.regress(step))
	if reason == "" && forbids {
		reason = m.unproven(d.in)
	}
	late := !m.behind.IsZero() && now.Sub(m.behind) >= m.policy.HeartbeatTimeout
	switch {
	case reason == "":
	case d.behind != "" && m.policy.ForbidRegression:
		d.cause, d.detail = behindJob, "forbid_regression is set: "+reason
	case (d.behind != "" || m.mayCome()) && !late:
		d.cause, d.detail = behindJob, "they have heartbeat_timeout_ms to come: "+reason
	case forbids:
		d.cause, d.detail = forbidden, "forbid_regression is set: "+reason
	default:
		d.regress = reason
	}
	return d
}

// unproven returns the reason why a quorum may be below the step that the job had reached although it is not
// below the known one: only the step at which the latest quorum began is known (bare), and none of its
// members is in the next one. It is empty if neither holds.
func (m *memory) unproven(in []*record) string {
	if m.latest == nil || !m.bare || slices.ContainsFunc(in, func(r *record) bool { return r.previous }) {
		return ""
	}
	return fmt.Sprintf("quorum %d (%s) began at step %d, and it is not known which step it reached, since "+
		"none of its members has asked this "+
		"lighthouse; if steps after that one may be lost, start the lighthouse without forbid_regression",
		m.latest.ID, names(m.absent()), m.step)
}

// mayCome reports whether a member of the latest quorum that does not ask counts as alive.
func (m *memory) mayCome() bool {
	return slices.ContainsFunc(m.members, func(r *record) bool { return !r.candidate() && r.alive() })
}

// absent returns the members of the latest quorum that are no candidates.
func (m *memory) absent() (ids []string) {
	for _, r := range m.members {
		if !r.candidate() {
			ids = append(ids, r.id)
		}
	}
	return ids
}

// decided records since when the quorum waits for members with a larger step. Decisions with other causes
// leave it as it is: membership churn must not restart the wait.
func (m *memory) decided(d decision) {
	switch {
	case d.cause == noRequest, d.cause == forbidden, d.ready():
		m.behind = time.Time{}
	case d.cause == behindJob && m.behind.IsZero():
		m.behind = m.now
	}
}

// regress returns the reason why a quorum at a step would be below that which the job had reached, with the
// missing members of the latest quorum; empty if it would not be below, or if none is missing.
func (m *memory) regress(step int64) string {
	if m.latest == nil {
		return ""
	}
	absent := m.absent()
	if step >= m.step || len(absent) == 0 {
		return ""
	}
	return fmt.Sprintf("the job had reached step %d in quorum %d, the members that ask are at step %d at "+
		"most; missing of that quorum: %s",
		m.step, m.latest.ID, step, names(absent))
}
