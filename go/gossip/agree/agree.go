// Package agree decides which members of a gossiping job train together. It is pure: a Machine takes in what membership
// knows and what the others have said, and answers with what to say.
//
// A member that needs a view wants a number above those of all views that it knows. When all live members want one, the
// first of them in order proposes a view of all; each of its members confirms it, and takes it when all have confirmed.
// A view that was confirmed by all of its members is formed. Membership is no more than a hint: it may say different
// things to different members, and that costs time but never makes two views live at once.
//
// # Why at most one view is live
//
// A view is live while all of its members are in it. Each member confirms views of growing numbers only, and a view that
// holds more than half of
//
//   - the last formed view that it knows, and
//   - each later view that it has confirmed itself, which may have been formed without its knowledge.
//
// So of two consecutive formed views the later one holds more than half of the earlier one, and with it a member that
// has left the earlier one for good; two formed views have different numbers. (The rule for ambiguous views is that of
// Yeger Lotem, Keidar and Dolev, "Dynamic voting for consistent primary components", 1997.) A member that has left and
// that confirmed nothing after a view is not counted in it: no later view has it. Exactly half is enough where the other
// half is known to have ended, since each of two disjoint halves would have had to see the other one's end. A later life of a name
// counts as the end of the earlier one; a job in which two processes have one name at a time has no such guarantee.
package agree

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
)

// ID is one life of a member.
type ID struct {
	Name        string `json:"name"`        // unique in the job at a time
	Incarnation int64  `json:"incarnation"` // grows with each life of this name
}

func compare(a, b ID) int {
	return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Incarnation, b.Incarnation))
}

// Member is a member of a view.
type Member struct {
	ID
	Address string `json:"address"` // "host:port" of the store that it hosts
}

// View is a list of members. Number and digest name it.
type View struct {
	Number  int64    `json:"number"`
	Members []Member `json:"members"` // in order of their names, one life of each

	digest string // once it was asked for
}

// Digest returns 64 bits in hex of number and members.
func (v *View) Digest() string {
	if v.digest == "" {
		text, err := json.Marshal(v)
		if err != nil {
			panic(err) // strings and numbers
		}
		v.digest = fmt.Sprintf("%x", sha256.Sum256(text))[:16]
	}
	return v.digest
}

// Has reports whether this life of a member is in the view.
func (v *View) Has(id ID) bool {
	return slices.ContainsFunc(v.Members, func(m Member) bool { return m.ID == id })
}

func (v *View) valid() bool {
	for i, m := range v.Members {
		if i > 0 && v.Members[i-1].Name >= m.Name {
			return false
		}
	}
	return v.Number > 0 && len(v.Members) > 0
}

func (v *View) number() int64 {
	if v == nil {
		return 0
	}
	return v.Number
}

// Note is what a member says of itself to all others.
type Note struct {
	Address   string `json:"address"`
	Wants     int64  `json:"wants"`          // smallest number of a view that it may still confirm, or be in
	Confirmed int64  `json:"confirmed"`      // number of the last view that it confirmed, 0 if none
	Digest    string `json:"digest"`         // of that view
	Left      bool   `json:"left,omitempty"` // it ends, and confirms nothing more
}

// hasLeft reports whether the member is in no view v, or will not be.
func (n Note) hasLeft(v *View, digest string) bool {
	return n.Wants > v.Number || n.Confirmed > v.Number || n.Confirmed == v.Number && n.Digest != digest
}

// refuses reports whether the member has not confirmed view v, and never will.
func (n Note) refuses(v *View, digest string) bool {
	return n.Confirmed < v.Number && n.Wants > v.Number || n.Confirmed == v.Number && n.Digest != digest
}

// Peer is a live member.
type Peer struct {
	Note
	At string // where it is reached; seeds are named so
}

// Final says that a member has ended.
type Final struct {
	ID
	Confirmed int64 `json:"confirmed"` // number of the last view that it confirmed
}

// unknown stands for the number of the last view that an ended member confirmed, if it did not say it.
const unknown = math.MaxInt64

// Proposal is a view that is to be confirmed, with facts that those who confirm it may lack.
type Proposal struct {
	View  View    `json:"view"`
	Base  *View   `json:"base,omitempty"`  // the last formed view that the sender knows
	Ended []Final `json:"ended,omitempty"` // members of it
}

// Config is what a machine is made of.
type Config struct {
	Me      ID
	Address string // of the own store
	At      string // where this member is reached
	// Seeds are the members that found the job, each with all of its addresses: a view without a predecessor holds more
	// than half of them.
	Seeds      [][]string
	MinMembers int // smallest size of a view
}

// Machine is one member.
type Machine struct {
	cfg      Config
	note     Note
	alive    map[ID]Peer      // the others, the latest life of each name
	ended    map[ID]int64     // members that have ended, and the number of the last view that they confirmed
	latest   *View            // the proposal with the largest number
	base     *View            // the last view that is known to be formed
	attempts []*View          // that this member confirmed since
	asked    bool             // a view is waited for
	taken    *View            // the view that this member is in
	waits    string           // why there is no view yet
	lives    map[string]int64 // the latest life of each name
}

// New returns a member that has not asked for a view.
func New(cfg Config) *Machine {
	return &Machine{
		cfg: cfg, note: Note{Address: cfg.Address}, ended: map[ID]int64{}, lives: map[string]int64{cfg.Me.Name: cfg.Me.Incarnation},
	}
}

// Note is what this member says of itself.
func (m *Machine) Note() Note { return m.note }

// Taken is the view that this member is in, nil if it is in none.
func (m *Machine) Taken() *View { return m.taken }

// Waits says what a view is waited for.
func (m *Machine) Waits() string { return m.waits }

// Replaced reports whether a later life of this member's name has taken its place.
func (m *Machine) Replaced() bool { return m.lives[m.cfg.Me.Name] > m.cfg.Me.Incarnation }

// Lives are the latest lives of all names that this member has heard of.
func (m *Machine) Lives() map[string]int64 { return maps.Clone(m.lives) }

// Learn takes lives that another member knows.
func (m *Machine) Learn(lives map[string]int64) {
	for name, life := range lives {
		m.lives[name] = max(m.lives[name], life)
	}
	m.without()
	m.act()
}

// Rise gives a member that has not asked yet a life after all that are known of its name: its clock may be behind that of the host
// where an earlier life ran. The part below a second of its own clock goes into the number: two lives that rise above the same one must
// not be one ID, since the second one has confirmed nothing of what the first one has.
func (m *Machine) Rise() ID {
	if m.Replaced() {
		m.cfg.Me.Incarnation = m.lives[m.cfg.Me.Name] + 1 + m.cfg.Me.Incarnation%int64(time.Second)
		m.lives[m.cfg.Me.Name] = m.cfg.Me.Incarnation
		m.without()
	}
	return m.cfg.Me
}

// Proposal is what the others should know: the latest proposal and the last formed view; false if there is none.
func (m *Machine) Proposal() (Proposal, bool) {
	if m.latest == nil {
		return Proposal{}, false
	}
	p := Proposal{View: *m.latest, Base: m.base}
	if m.base != nil {
		for _, q := range m.base.Members {
			if confirmed, over := m.over(q.ID); over {
				p.Ended = append(p.Ended, Final{q.ID, confirmed})
			}
		}
	}
	return p, true
}

// Proposed is the number of the latest proposal if it is this member's, else 0.
func (m *Machine) Proposed() int64 {
	if m.latest == nil || m.latest.Members[0].ID != m.cfg.Me {
		return 0
	}
	return m.latest.Number
}

// Missing are the live members that should have confirmed the latest proposal and have not, if it is this member that
// reminds them.
func (m *Machine) Missing() (missing []ID) {
	if !m.asked || m.Proposed() == 0 {
		return nil
	}
	for _, q := range m.latest.Members {
		if peer, ok := m.alive[q.ID]; ok && peer.Confirmed < m.latest.Number {
			missing = append(missing, q.ID)
		}
	}
	return missing
}

// Ask wants a new view. A member that has left gets none: the others count on it to confirm nothing more.
func (m *Machine) Ask() {
	if m.note.Left {
		return
	}
	m.asked, m.taken = true, nil
	m.want(m.number() + 1)
	m.act()
}

// Cancel ends what Ask began, without a view.
func (m *Machine) Cancel() {
	if m.note.Left {
		return
	}
	m.asked = false
	m.want(m.number() + 1) // the others need not wait for it
}

// Leave ends this member.
func (m *Machine) Leave() {
	m.asked, m.taken, m.note.Left = false, nil, true
}

// See takes in which members are alive, this one aside, and what they say.
func (m *Machine) See(peers map[ID]Peer) {
	for id, peer := range peers {
		m.lives[id.Name] = max(m.lives[id.Name], id.Incarnation)
		if peer.Left {
			m.ended[id] = peer.Confirmed
		}
	}
	m.alive = maps.Clone(peers)
	m.without()
	m.act()
}

// without drops live members that have ended, as it turns out.
func (m *Machine) without() {
	maps.DeleteFunc(m.alive, func(id ID, _ Peer) bool { _, over := m.over(id); return over })
}

// over reports whether a member has ended, and the number of the last view that it confirmed.
func (m *Machine) over(id ID) (confirmed int64, over bool) {
	if confirmed, over = m.ended[id]; over {
		return confirmed, true
	}
	return unknown, m.lives[id.Name] > id.Incarnation
}

// Bury takes in that a member has left, by its own last note.
func (m *Machine) Bury(id ID, last Note) {
	delete(m.alive, id)
	m.ended[id] = last.Confirmed
	m.act()
}

// Hear takes what another member knows. It is false if that cannot be.
func (m *Machine) Hear(p Proposal) bool {
	if !p.View.valid() || p.Base != nil && (!p.Base.valid() || p.Base.Number > p.View.Number) {
		return false
	}
	for _, final := range p.Ended {
		if old, over := m.over(final.ID); !over || old == unknown {
			m.ended[final.ID] = final.Confirmed
			delete(m.alive, final.ID)
		}
	}
	if p.Base.number() > m.base.number() {
		m.form(p.Base)
	}
	if p.View.Number > m.latest.number() {
		m.latest = &p.View
	}
	m.act()
	return true
}

// form notes that all members of a view have confirmed it.
func (m *Machine) form(v *View) {
	m.base = v
	m.attempts = slices.DeleteFunc(m.attempts, func(a *View) bool { return a.Number <= v.Number })
}

// act goes on as far as it can. Each turn of the loop raises a number, or ends it.
func (m *Machine) act() {
	for m.notice(); m.asked && !m.Replaced() && m.turn(); m.notice() {
	}
}

// notice sees which of the own attempts are formed, and which never will be: a member that says so now may end later, and what it
// said is forgotten. A formed view counts as such also when members have left it before all were seen to confirm it. That is
// safe, since they have confirmed it all the same; else half of the members of a view that no member took could stop the job.
func (m *Machine) notice() {
	for _, v := range slices.Backward(m.attempts) {
		if len(m.unconfirmed(v)) == 0 {
			m.form(v)
			break
		}
	}
	m.attempts = slices.DeleteFunc(m.attempts, m.impossible)
}

// unconfirmed are the other members of a view that are not seen to have confirmed it.
func (m *Machine) unconfirmed(v *View) (missing []string) {
	digest := v.Digest()
	for _, q := range v.Members {
		if q.ID != m.cfg.Me && m.alive[q.ID].Digest != digest {
			missing = append(missing, q.Name)
		}
	}
	return missing
}

func (m *Machine) turn() (again bool) {
	number := m.number()
	if number > m.latest.number() {
		m.waits = fmt.Sprintf("view %d, which others have confirmed, has not been received", number)
		return false
	}
	if m.latest != nil && m.note.Wants <= number {
		return m.judge()
	}
	var absent []string
	for _, id := range m.others() {
		if m.alive[id].Wants <= number {
			absent = append(absent, id.Name)
		}
	}
	if len(absent) > 0 {
		m.waits = "waits for " + strings.Join(absent, ", ")
		return false
	}
	next := m.candidate()
	if len(next.Members) < m.cfg.MinMembers {
		m.waits = fmt.Sprintf("%d of %d members", len(next.Members), m.cfg.MinMembers)
		return false
	}
	if why := m.objection(&next); why != "" {
		m.waits = why
		return false
	}
	if first := next.Members[0].ID; first != m.cfg.Me {
		m.waits = fmt.Sprintf("waits for %s to propose a view", first.Name)
		return false
	}
	m.latest = &next
	return true
}

// judge goes on with the latest proposal, which this member may take.
func (m *Machine) judge() (again bool) {
	v, digest := m.latest, m.latest.Digest()
	over := !v.Has(m.cfg.Me)
	for _, q := range v.Members {
		if q.ID == m.cfg.Me {
			continue
		}
		peer, ok := m.alive[q.ID]
		over = over || !ok || peer.hasLeft(v, digest)
	}
	if over {
		m.want(v.Number + 1)
		return true
	}
	if m.note.Digest != digest {
		why := m.objection(v)
		if why == "" {
			m.note.Confirmed, m.note.Digest = v.Number, digest
			// Also with the members of an earlier attempt: that this one turns out to be impossible says nothing of that one, which others
			// may have formed.
			m.attempts = append(m.attempts, v)
			return true
		}
		m.waits = why
		if next := m.candidate(); m.objection(&next) == "" {
			m.want(v.Number + 1)
			return true
		}
		return false
	}
	if m.base == nil || m.base.Digest() != digest {
		m.waits = fmt.Sprintf("waits for %s to confirm view %d", strings.Join(m.unconfirmed(v), ", "), v.Number)
		return false
	}
	m.taken, m.asked, m.waits = v, false, ""
	return false
}

// objection says why this member may not confirm a view; empty: it may.
func (m *Machine) objection(v *View) string {
	if v.Number <= m.note.Confirmed {
		return fmt.Sprintf("view %d was confirmed already", m.note.Confirmed)
	}
	if m.base == nil {
		if why := m.founds(v); why != "" {
			return why
		}
	} else if why := m.follows(v, m.base); why != "" {
		return why
	}
	for _, a := range m.attempts {
		if why := m.follows(v, a); why != "" {
			return why
		}
	}
	return ""
}

// follows says why a view must not follow f, which is formed or may be.
func (m *Machine) follows(v, f *View) string {
	here, ended, all := 0, 0, 0
	var missing []string
	for _, q := range f.Members {
		last, over := m.over(q.ID)
		switch {
		case v.Has(q.ID):
			here++
		case over && last <= f.Number:
			continue
		case over:
			ended++
		default:
			missing = append(missing, q.Name)
		}
		all++
	}
	if here > 0 && (2*here > all || 2*here == all && len(missing) == 0) {
		return ""
	}
	return fmt.Sprintf("%d of the %d members of view %d are here, and more than half must be; missing: %s",
		here, all, f.Number, strings.Join(missing, ", "))
}

// impossible reports whether a view that this member confirmed can never be formed.
func (m *Machine) impossible(v *View) bool {
	digest := v.Digest()
	for _, q := range v.Members {
		if peer, ok := m.alive[q.ID]; ok && peer.refuses(v, digest) {
			return true
		}
		if last, over := m.over(q.ID); over && last < v.Number {
			return true
		}
	}
	return false
}

// founds says why a view must not be the first one of the job.
func (m *Machine) founds(v *View) string {
	here := map[string]bool{}
	for _, q := range v.Members {
		if q.ID == m.cfg.Me {
			here[m.cfg.At] = true
		} else {
			here[m.alive[q.ID].At] = true
		}
	}
	count := 0
	for _, addresses := range m.cfg.Seeds {
		if slices.ContainsFunc(addresses, func(at string) bool { return here[at] }) {
			count++
		}
	}
	if 2*count > len(m.cfg.Seeds) {
		return ""
	}
	return fmt.Sprintf("%d of the %d seeds are here, and the first view must hold more than half of them", count, len(m.cfg.Seeds))
}

// candidate is the view of all live members.
func (m *Machine) candidate() View {
	next := View{Number: max(m.number()+1, m.note.Wants), Members: []Member{{m.cfg.Me, m.note.Address}}}
	for id, peer := range m.alive {
		next.Number = max(next.Number, peer.Wants)
		next.Members = append(next.Members, Member{id, peer.Address})
	}
	slices.SortFunc(next.Members, func(a, b Member) int { return compare(a.ID, b.ID) })
	return next
}

// number is the largest one of a view that is known to exist.
func (m *Machine) number() int64 {
	largest := max(m.latest.number(), m.note.Confirmed)
	for _, peer := range m.alive {
		largest = max(largest, peer.Confirmed)
	}
	return largest
}

func (m *Machine) want(number int64) { m.note.Wants = max(m.note.Wants, number) }

func (m *Machine) others() []ID { return slices.SortedFunc(maps.Keys(m.alive), compare) }

// News is what a member that is in a view sees.
type News struct {
	View    int64    `json:"view"`
	Lost    string   `json:"lost"`    // why the view does not hold any more; empty as long as it does
	Joining []string `json:"joining"` // names of processes that want to become members
}

// News is what is to be known about the view that this member is in; its number is 0 if it is in none.
func (m *Machine) News() News {
	if m.taken == nil {
		return News{}
	}
	news, digest := News{View: m.taken.Number}, m.taken.Digest()
	for _, q := range m.taken.Members {
		if q.ID == m.cfg.Me {
			continue
		}
		peer, ok := m.alive[q.ID]
		last, over := m.over(q.ID)
		switch {
		case over && last == unknown:
			news.Lost = q.Name + " was started again"
		case over || ok && peer.hasLeft(m.taken, digest):
			news.Lost = q.Name + " has left the view"
		case !ok:
			news.Lost = q.Name + " does not answer"
		}
	}
	if m.Replaced() {
		news.Lost = "a later life of " + m.cfg.Me.Name + " has taken its place"
	}
	for _, id := range m.others() {
		if !m.taken.Has(id) && m.alive[id].Wants > m.taken.Number {
			news.Joining = append(news.Joining, id.Name)
		}
	}
	return news
}
