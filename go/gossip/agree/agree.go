// Package agree decides which members of a job without a server train together. It is pure: the inputs of a Machine are the list of
// live members and the notes and proposals of the others; its outputs are this member's own note and proposal.
//
// A view is a numbered list of members. A member that needs one announces in its note the smallest number that the view may have:
// one above all numbers that the member knows. When all live members have done so, the first of them (by name) proposes a view of
// all live members. Each member of the proposal confirms it in its own note. When all have confirmed it, each one takes it, that
// is, enters the view. A view that all of its members have confirmed is formed. The list of live members is only a hint: it may
// differ from member to member. That costs time, but never makes two views live at once.
//
// # Why at most one view is live
//
// A view is live while all of its members are in it. A member confirms a view only if the view's number is larger than that of any
// view that it confirmed before, and if the view contains more than half of the members of
//
//   - the last formed view that this member knows, and
//   - each later view that it has confirmed itself, which may have been formed without its knowledge.
//
// So of two consecutive formed views, the later one contains more than half of the members of the earlier one. Each of these
// members has confirmed a larger number, and is therefore no longer in the earlier view: that view is not live any more. (The rule
// for later views that may have been formed is from Yeger Lotem, Keidar and Dolev, "Dynamic voting for consistent primary
// components", 1997.)
//
// Two exceptions concern members that have ended. Let f be one of the views above. If the last view that such a member confirmed is
// not later than f, the member is not counted among the members of f: it is in no view later than f. And exactly half of f is enough
// if the whole other half has ended: a second view with the other half would need members that have ended.
//
// A later incarnation of a name counts as the end of the earlier one. In a job in which two processes have one name at the same
// time, two views may be live.
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

// ID identifies one incarnation of a member.
type ID struct {
	Name        string `json:"name"`        // unique in the job at a time
	Incarnation int64  `json:"incarnation"` // grows with each start under this name
}

func compare(a, b ID) int {
	return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Incarnation, b.Incarnation))
}

// Member is a member of a view.
type Member struct {
	ID
	Address string `json:"address"` // "host:port" of the store that it hosts
}

// View is a list of members. Number and digest identify it.
type View struct {
	Number  int64    `json:"number"`
	Members []Member `json:"members"` // in order of their names, one incarnation of each

	digest string // empty until Digest has computed it
}

// Digest returns a hash of number and members: 64 bits in hex.
func (v *View) Digest() string {
	if v.digest == "" {
		text, err := json.Marshal(v)
		if err != nil {
			panic(err) // impossible: a view consists of strings and numbers only
		}
		v.digest = fmt.Sprintf("%x", sha256.Sum256(text))[:16]
	}
	return v.digest
}

// Has reports whether this incarnation of a member is in the view.
func (v *View) Has(id ID) bool {
	return slices.ContainsFunc(v.Members, func(m Member) bool { return m.ID == id })
}

func (v *View) valid() bool {
	for i, m := range v.Members {
		if i > 0 && v.Members[i-1].Name >= m.Name {
			return false
		}
	}
	return v.Number > 0 && v.Number <= mostNumber && len(v.Members) > 0
}

// mostNumber bounds the numbers in messages. A member adds one to the largest number that it knows: above the largest integer it would
// never come to an end (act).
const mostNumber = math.MaxInt64 / 2

func (v *View) number() int64 {
	if v == nil {
		return 0
	}
	return v.Number
}

// Note is the state that a member announces to all others.
type Note struct {
	Address   string `json:"address"`
	Wants     int64  `json:"wants"`          // smallest number of a view that it may still confirm, or be in
	Confirmed int64  `json:"confirmed"`      // number of the last view that it confirmed, 0 if none
	Digest    string `json:"digest"`         // of that view
	Left      bool   `json:"left,omitempty"` // it ends, and confirms no further view
}

func (n Note) valid() bool {
	return n.Wants >= 0 && n.Wants <= mostNumber && n.Confirmed >= 0 && n.Confirmed <= mostNumber
}

// hasLeft reports whether the member has left view v, or will never enter it.
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
	At string // its "host:port" for gossip: an address in Config.Seeds, if the member is a seed
}

// Final reports that a member has ended.
type Final struct {
	ID
	Confirmed int64 `json:"confirmed"` // number of the last view that it confirmed
}

// unknown stands for the number of the last view that a member confirmed, if the member ended without a last note. It is the
// largest number, since such a member may have confirmed any view.
const unknown = math.MaxInt64

// Proposal is a view to be confirmed, with facts that its members need for that and may not have.
type Proposal struct {
	View  View    `json:"view"`
	Base  *View   `json:"base,omitempty"`  // the last formed view that the sender knows
	Ended []Final `json:"ended,omitempty"` // members of Base that have ended
}

// Config has the settings of a Machine.
type Config struct {
	Me      ID
	Address string // of the own store
	At      string // this member's "host:port" for gossip
	// Seeds are the members that start the job, each with all of its addresses: a view without a predecessor contains more than
	// half of them.
	Seeds      [][]string
	MinMembers int // smallest size of a view
}

// Machine is the state of one member.
type Machine struct {
	cfg      Config
	note     Note
	alive    map[ID]Peer      // the others, the latest incarnation of each name
	ended    map[ID]int64     // for each member that has ended: the number of the last view that it confirmed
	latest   *View            // the proposal with the largest number
	base     *View            // the last view that this member knows to be formed
	attempts []*View          // views after base that this member confirmed, and that may have been formed
	asked    bool             // Ask was called, and no view is taken yet
	taken    *View            // the view that this member is in
	waits    string           // why no view is taken yet
	lives    map[string]int64 // the latest incarnation of each name
}

// New returns a member that has not asked for a view.
func New(cfg Config) *Machine {
	return &Machine{
		cfg: cfg, note: Note{Address: cfg.Address}, ended: map[ID]int64{}, lives: map[string]int64{cfg.Me.Name: cfg.Me.Incarnation},
	}
}

// Note returns the state that this member announces.
func (m *Machine) Note() Note { return m.note }

// Taken returns the view that this member is in, nil if it is in none.
func (m *Machine) Taken() *View { return m.taken }

// Waits returns the reason why Ask has not led to a view yet.
func (m *Machine) Waits() string { return m.waits }

// Replaced reports whether a later incarnation of this member's name has taken its place.
func (m *Machine) Replaced() bool { return m.lives[m.cfg.Me.Name] > m.cfg.Me.Incarnation }

// Lives returns the latest known incarnation of each name.
func (m *Machine) Lives() map[string]int64 { return maps.Clone(m.lives) }

// Learn adds the latest incarnations that another member knows.
func (m *Machine) Learn(lives map[string]int64) {
	for name, life := range lives {
		m.lives[name] = max(m.lives[name], life)
	}
	m.without()
	m.act()
}

// Rise raises this member's incarnation above all known ones of its name. It is called before the first Ask. The incarnation is
// taken from the clock, which may be behind the clock of the host where an earlier incarnation ran. The clock's fraction of a
// second is added: two processes that rise above the same earlier incarnation must not get the same ID, since the others would
// count confirmations of the first one for the second one.
func (m *Machine) Rise() ID {
	if m.Replaced() {
		m.cfg.Me.Incarnation = m.lives[m.cfg.Me.Name] + 1 + m.cfg.Me.Incarnation%int64(time.Second)
		m.lives[m.cfg.Me.Name] = m.cfg.Me.Incarnation
		m.without()
	}
	return m.cfg.Me
}

// Proposal returns the message for the others: the latest proposal and the last formed view. It returns false if there is no
// proposal.
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

// Proposed returns the number of the latest proposal if it is this member's own, otherwise 0.
func (m *Machine) Proposed() int64 {
	if m.latest == nil || m.latest.Members[0].ID != m.cfg.Me {
		return 0
	}
	return m.latest.Number
}

// Missing returns the live members that have not confirmed the latest proposal, if this member proposed it. They are sent the
// proposal again.
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

// Ask requests a new view. A member that has left gets none: the others rely on its promise to confirm no further view.
func (m *Machine) Ask() {
	if m.note.Left {
		return
	}
	m.asked, m.taken = true, nil
	m.want(m.number() + 1)
	m.act()
}

// Cancel withdraws an Ask that has led to no view.
func (m *Machine) Cancel() {
	if m.note.Left {
		return
	}
	m.asked = false
	m.want(m.number() + 1) // the others do not wait for this member: it takes no view up to that number
}

// Leave ends this member: from here on it confirms no view.
func (m *Machine) Leave() {
	m.asked, m.taken, m.note.Left = false, nil, true
}

// See sets the live members, without this one, and their notes. Members with an invalid note are ignored.
func (m *Machine) See(peers map[ID]Peer) {
	peers = maps.Clone(peers)
	maps.DeleteFunc(peers, func(_ ID, peer Peer) bool { return !peer.valid() })
	for id, peer := range peers {
		m.lives[id.Name] = max(m.lives[id.Name], id.Incarnation)
		if peer.Left {
			m.ended[id] = peer.Confirmed
		}
	}
	m.alive = peers
	m.without()
	m.act()
}

// without drops the live members that are known to have ended.
func (m *Machine) without() {
	maps.DeleteFunc(m.alive, func(id ID, _ Peer) bool { _, over := m.over(id); return over })
}

// over reports whether a member has ended, and returns the number of the last view that it confirmed, or unknown.
func (m *Machine) over(id ID) (confirmed int64, over bool) {
	if confirmed, over = m.ended[id]; over {
		return confirmed, true
	}
	return unknown, m.lives[id.Name] > id.Incarnation
}

// MemberLeft records that a member has left, with its own last note.
func (m *Machine) MemberLeft(id ID, last Note) {
	delete(m.alive, id)
	m.ended[id] = last.Confirmed
	m.act()
}

// Hear handles another member's proposal. It returns false if the proposal is invalid.
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

// form records that all members of a view have confirmed it. Earlier attempts are dropped: if one of them was formed, v follows it,
// so a view that follows v comes after that attempt, too.
func (m *Machine) form(v *View) {
	m.base = v
	m.attempts = slices.DeleteFunc(m.attempts, func(a *View) bool { return a.Number <= v.Number })
}

// act repeats turn until nothing changes. The loop ends, since each turn but the last raises the number that this member wants, has
// confirmed or has proposed.
func (m *Machine) act() {
	for m.notice(); m.asked && !m.Replaced() && m.turn(); m.notice() {
	}
}

// notice finds attempts that have been formed, and drops those that can never be formed. It does so at each input: a note that shows
// one or the other may be missing at the next input, if the sender of the note has ended. A view counts as formed once all of its
// members were seen to confirm it, even if some of them have left it since. That is safe, since a confirmation cannot be withdrawn.
// If the view did not count as formed, it would remain an attempt that is never known to be formed: if half of its members ended
// without a last note, no later view could follow it.
func (m *Machine) notice() {
	for _, v := range slices.Backward(m.attempts) {
		if len(m.unconfirmed(v)) == 0 {
			m.form(v)
			break
		}
	}
	m.attempts = slices.DeleteFunc(m.attempts, m.impossible)
}

// unconfirmed returns the other members of a view whose notes do not confirm it.
func (m *Machine) unconfirmed(v *View) (missing []string) {
	digest := v.Digest()
	for _, q := range v.Members {
		if q.ID != m.cfg.Me && m.alive[q.ID].Digest != digest {
			missing = append(missing, q.Name)
		}
	}
	return missing
}

// turn makes one step towards a view, and reports whether another step may follow.
func (m *Machine) turn() (again bool) {
	number := m.number()
	if number > m.latest.number() { // this member waits for that view: its proposer sends it again until all of its members have confirmed it
		m.waits = fmt.Sprintf("view %d, which others have confirmed, has not been received", number)
		return false
	}
	if m.latest != nil && m.note.Wants <= number {
		return m.judge()
	}
	var absent []string // members that have not asked for a view after the latest one
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

// judge handles the latest proposal while this member may still take it: it confirms the proposal, takes it, waits, or asks for a
// later one.
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
	if over { // no member can take the view any more, or this member is not in it: wait for the next proposal
		m.want(v.Number + 1)
		return true
	}
	if m.note.Digest != digest { // not confirmed yet
		why := m.objection(v)
		if why == "" {
			m.note.Confirmed, m.note.Digest = v.Number, digest
			// An earlier attempt is kept even if it has the same members: it may have been formed, and must not be forgotten if the
			// new one turns out to be impossible. Otherwise this member could confirm a view that does not follow the earlier
			// attempt.
			m.attempts = append(m.attempts, v)
			return true
		}
		m.waits = why
		// A view of the present live members could be confirmed: abandon the proposal, so that such a view replaces it. If none
		// could be confirmed, abandoning the proposal would only raise the numbers.
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

// objection returns the reason why this member must not confirm a view, empty if it may: the rules in the package comment.
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

// follows returns the reason why view v must not follow f, which has been or may have been formed; empty if it may.
func (m *Machine) follows(v, f *View) string {
	here, all := 0, 0
	var missing []string
	for _, q := range f.Members {
		last, over := m.over(q.ID)
		switch {
		case v.Has(q.ID):
			here++
		case over && last <= f.Number:
			continue // it has confirmed no view after f: it need not be counted
		case over: // it may have confirmed a view after f, so it counts as a member of f, but it cannot confirm v
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

// impossible reports whether a view that this member confirmed can never be formed: one of its members has not confirmed it, and
// wants a later number or has ended.
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

// founds returns the reason why a view must not be the first one of the job; empty if it may.
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

// candidate returns the view of all live members.
func (m *Machine) candidate() View {
	next := View{Number: max(m.number()+1, m.note.Wants), Members: []Member{{m.cfg.Me, m.note.Address}}}
	for id, peer := range m.alive {
		next.Number = max(next.Number, peer.Wants)
		next.Members = append(next.Members, Member{id, peer.Address})
	}
	slices.SortFunc(next.Members, func(a, b Member) int { return compare(a.ID, b.ID) })
	return next
}

// number returns the largest number of all views that this member knows of: it has the proposal, or a note shows that the view was
// confirmed.
func (m *Machine) number() int64 {
	largest := max(m.latest.number(), m.note.Confirmed)
	for _, peer := range m.alive {
		largest = max(largest, peer.Confirmed)
	}
	return largest
}

func (m *Machine) want(number int64) { m.note.Wants = max(m.note.Wants, number) }

func (m *Machine) others() []ID { return slices.SortedFunc(maps.Keys(m.alive), compare) }

// News describes what has happened to the view that a member is in.
type News struct {
	View    int64    `json:"view"`
	Ended   string   `json:"ended"`   // why the view is not live any more; empty while it is live
	Joining []string `json:"joining"` // names of processes that want to become members
}

// News describes the view that this member is in; its number is 0 if it is in none.
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
			news.Ended = q.Name + " was started again"
		case over || ok && peer.hasLeft(m.taken, digest):
			news.Ended = q.Name + " has left the view"
		case !ok:
			news.Ended = q.Name + " does not answer"
		}
	}
	if m.Replaced() {
		news.Ended = "a later incarnation of " + m.cfg.Me.Name + " has taken its place"
	}
	for _, id := range m.others() {
		if !m.taken.Has(id) && m.alive[id].Wants > m.taken.Number {
			news.Joining = append(news.Joining, id.Name)
		}
	}
	return news
}
