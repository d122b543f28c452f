// Package agree decides which members of a job without a server train together. It is pure: the inputs of a
// Machine are the live members with their notes, and what other members know; its outputs are this member's
// own note, and its view.
//
// A view is a numbered list of members. No member proposes it: each one computes it from the notes, as all
// live members once all of them ask, with the largest number that one of them asks for. It joins that view by
// announcing the view's digest in its note. A view is formed when all of its members have joined it; only
// then a member is in it. Its communicator has a rank for each member, and a digest of the view as prefix of
// the rendezvous. So members whose lists differ do not meet. That costs time: a member joins another view,
// with a larger number, when its list has changed.
//
// # Why at most one view is live
//
// A view is live while all of its members run, and have joined no later one. The numbers of the views that a
// member joins increase. It joins view v only if v holds more than half of the members of
//
//   - the last formed view that it knows, and
//   - each later view that it has joined, which may have been formed without its knowledge.
//
// Half is enough for the half with the oldest member. Two such parts of a view share a member.
//
// Let u and w be formed views, with no other one between their numbers; w holds more than half of u. For let
// p be a member of w, and f the last formed view that p knew when it joined w. If f is not u, the next formed
// view g after f holds more than half of f, as w does, so a member of f has joined g first, and w later. For
// that member, w must hold more than half of g, or of a formed view after g. Repeat this with that view, up
// to u. Therefore a member of u has left u when w is formed: u is not live any more. (The rule for later
// views that may have been formed is from Yeger Lotem, Keidar and Dolev, "Dynamic voting for consistent
// primary components", 1997; the one for half from Jajodia and Mutchler, "Dynamic voting algorithms", 1990.)
//
// A member that has left the job for good joins no later view. If it has joined none after f, it is not
// counted among the members of f. A process that was started again is another member, which knows nothing of
// what the earlier one has joined: it is counted among no earlier view. A view of new members only is the
// first one of the job, and holds more than half of the seeds.
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
)

// ID identifies one incarnation of a member.
type ID struct {
	Name        string `json:"name"`        // unique in the job at a time
	Incarnation int64  `json:"incarnation"` // time of its start, or more (Rise)
}

func compare(a, b ID) int {
	return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Incarnation, b.Incarnation))
}

// older orders members by their start. Half of a view is the half of its oldest member, so that a job does
// not end with a member that has just joined.
func older(a, b ID) int {
	return cmp.Or(cmp.Compare(a.Incarnation, b.Incarnation), cmp.Compare(a.Name, b.Name))
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

func (v *View) number() int64 {
	if v == nil {
		return 0
	}
	return v.Number
}

// mostNumber bounds the numbers in messages, since members add one to the largest number that they know.
const mostNumber = math.MaxInt64 / 2

// Note is the state that a member announces to all others.
type Note struct {
	Address string `json:"address"`
	Asks    bool   `json:"asks,omitempty"`   // it waits for a view
	Wants   int64  `json:"wants"`            // smallest number of a view that it may still join, or be in
	Joined  int64  `json:"joined"`           // number of the last view that it joined, 0 if none
	Digest  string `json:"digest"`           // of that view
	Formed  bool   `json:"formed,omitempty"` // it knows a formed view
	Left    bool   `json:"left,omitempty"`   // it ends, and joins no further view
}

// Peer is a live member.
type Peer struct {
	Note
	At string // its "host:port" for gossip: an address in Config.Seeds, if the member is a seed
}

// Known is what members tell each other besides their notes.
type Known struct {
	Formed *View   `json:"formed,omitempty"` // the last formed view that the sender knows
	Left   []Final `json:"left,omitempty"`   // members of that view that have left the job
}

// Final reports that a member has left the job.
type Final struct {
	ID
	Joined int64 `json:"joined"` // number of the last view that it joined
}

// Config has the settings of a Machine.
type Config struct {
	Me      ID
	Address string // of the own store
	At      string // this member's "host:port" for gossip
	// Seeds are the members that start the job, each with all of its addresses: a view of new members only
	// contains more than half of them.
	Seeds      [][]string
	MinMembers int // smallest size of a view
}

// Machine is the state of one member.
type Machine struct {
	cfg    Config
	note   Note
	alive  map[ID]Peer  // the others, the latest incarnation of each name
	left   map[ID]int64 // for each member that has left the job: the number of the last view that it joined
	formed *View        // the last formed view that this member knows
	joined []*View      // views after formed that this member joined, in order of their numbers
	taken  *View        // the view that this member is in
	waits  string       // why no view is taken yet
}

// New returns a member that has not asked for a view.
func New(cfg Config) *Machine {
	return &Machine{cfg: cfg, note: Note{Address: cfg.Address}, left: map[ID]int64{}}
}

// Note returns the state that this member announces.
func (m *Machine) Note() Note { return m.note }

// Taken returns the view that this member is in, nil if it is in none.
func (m *Machine) Taken() *View { return m.taken }

// Waits returns the reason why Ask has not led to a view yet.
func (m *Machine) Waits() string { return m.waits }

// Replaced reports whether a later incarnation of this member's name is alive, and takes its place.
func (m *Machine) Replaced() bool { return m.latest() > m.cfg.Me.Incarnation }

func (m *Machine) latest() (incarnation int64) {
	for id := range m.alive {
		if id.Name == m.cfg.Me.Name {
			incarnation = id.Incarnation
		}
	}
	return incarnation
}

// Rise raises this member's incarnation above that of a live member of its name: the clock of an earlier
// incarnation may have been ahead. It is called before the first Ask. The clock's fraction of a second is
// added: two processes that rise above the same earlier one must not get the same ID, since the others would
// count what the first one has joined for the second one.
func (m *Machine) Rise() ID {
	if m.Replaced() {
		m.cfg.Me.Incarnation = m.latest() + 1 + m.cfg.Me.Incarnation%1e9
		m.See(m.alive)
	}
	return m.cfg.Me
}

// Ask requests a new view. A member that has left gets none: the others rely on its promise to join no
// further view.
func (m *Machine) Ask() {
	if m.note.Left {
		return
	}
	m.taken, m.note.Asks = nil, true
	m.leave()
	m.act()
}

// Cancel withdraws an Ask that has led to no view.
func (m *Machine) Cancel() {
	if m.note.Left {
		return
	}
	m.note.Asks = false
	m.leave()
}

// leave makes the others stop waiting for this member in the last view that it joined.
func (m *Machine) leave() { m.note.Wants = max(m.note.Wants, m.note.Joined+1, m.formed.number()+1) }

// Leave ends this member: from here on it joins no view.
func (m *Machine) Leave() { m.taken, m.note.Asks, m.note.Left = nil, false, true }

// See sets the live members, without this one, and their notes. Members with an impossible number are
// ignored, and so is an earlier incarnation of a member: its end has not been noticed yet.
func (m *Machine) See(peers map[ID]Peer) {
	m.alive = maps.Clone(peers)
	lives := map[string]int64{m.cfg.Me.Name: m.cfg.Me.Incarnation}
	for id, peer := range peers {
		lives[id.Name] = max(lives[id.Name], id.Incarnation)
		if peer.Left {
			m.left[id] = peer.Joined
		}
	}
	maps.DeleteFunc(m.alive, func(id ID, n Peer) bool {
		_, left := m.left[id]
		bad := min(n.Wants, n.Joined) < 0 || max(n.Wants, n.Joined) > mostNumber
		return left || bad || id.Incarnation < lives[id.Name]
	})
	m.act()
}

// Known returns the message for the others.
func (m *Machine) Known() Known {
	k := Known{Formed: m.formed}
	if m.formed != nil {
		for _, q := range m.formed.Members {
			if joined, left := m.left[q.ID]; left {
				k.Left = append(k.Left, Final{q.ID, joined})
			}
		}
	}
	return k
}

// Learn handles another member's message.
func (m *Machine) Learn(k Known) {
	for _, f := range k.Left {
		m.left[f.ID] = f.Joined
		delete(m.alive, f.ID)
	}
	if k.Formed.number() > m.formed.number() && k.Formed.Number <= mostNumber && len(k.Formed.Members) > 0 {
		m.form(k.Formed)
	}
	m.act()
}

// form records that all members of a view have joined it. Earlier views are dropped: if one of them was
// formed, v follows it, so that a view that follows v comes after it, too.
func (m *Machine) form(v *View) {
	m.formed, m.note.Formed = v, true
	m.joined = slices.DeleteFunc(m.joined, func(a *View) bool { return a.Number <= v.Number })
}

// act takes or joins a view, if it can. It is called after each input, also for a member that does not ask: a
// note that shows that a view was formed may be missing later.
func (m *Machine) act() {
	for again := true; again; {
		for _, v := range slices.Backward(m.joined) {
			if len(m.missing(v)) == 0 { // members that have left it since have joined it all the same
				m.form(v)
				break
			}
		}
		again = m.note.Asks && !m.Replaced() && m.turn()
	}
}

// missing returns the other members of a view whose notes do not show that they have joined it.
func (m *Machine) missing(v *View) (names []string) {
	for _, q := range v.Members {
		if q.ID != m.cfg.Me && m.alive[q.ID].Digest != v.Digest() {
			names = append(names, q.Name)
		}
	}
	return names
}

// turn takes or joins a view, and reports whether it has joined one.
func (m *Machine) turn() bool {
	if f := m.formed; f != nil && f.Digest() == m.note.Digest && f.Number == m.note.Wants && m.over(f) == "" {
		m.taken, m.note.Asks, m.waits = f, false, ""
		return false
	}
	next := m.candidate()
	if next.Number == m.note.Joined {
		if next.Digest() == m.note.Digest {
			m.waits = fmt.Sprintf("waits for %s to join view %d", strings.Join(m.missing(next), ", "),
				next.Number)
			return false
		}
		next.Number, next.digest = next.Number+1, "" // a member joins at most one view of each number
	}
	// A member that has joined another view of this number has another list. It joins a view with the next
	// number if its own list changes, and this member joins the view with this number if it is the one whose
	// list changes.
	var absent []string
	for _, q := range next.Members {
		peer := m.alive[q.ID]
		if q.ID != m.cfg.Me && (!peer.Asks || peer.Joined == next.Number && peer.Digest != next.Digest()) {
			absent = append(absent, q.Name)
		}
	}
	if len(absent) > 0 {
		m.waits = "waits for " + strings.Join(absent, ", ")
		return false
	}
	if m.waits = m.objection(next); m.waits != "" {
		return false
	}
	m.note.Wants, m.note.Joined, m.note.Digest = next.Number, next.Number, next.Digest()
	m.joined = append(m.joined, next)
	return true
}

// candidate returns the view of all live members.
func (m *Machine) candidate() *View {
	next := &View{Number: max(m.note.Wants, m.formed.number()+1),
		Members: []Member{{m.cfg.Me, m.cfg.Address}}}
	for id, peer := range m.alive {
		next.Number = max(next.Number, peer.Wants)
		next.Members = append(next.Members, Member{id, peer.Address})
	}
	slices.SortFunc(next.Members, func(a, b Member) int { return compare(a.ID, b.ID) })
	return next
}

// objection returns the reason why this member must not join a view, empty if it may: the rules in the
// package comment.
func (m *Machine) objection(v *View) string {
	if len(v.Members) < m.cfg.MinMembers {
		return fmt.Sprintf("%d of %d members", len(v.Members), m.cfg.MinMembers)
	}
	if m.formed == nil && !slices.ContainsFunc(v.Members,
		func(q Member) bool { return m.alive[q.ID].Formed }) {
		if why := m.founds(v); why != "" {
			return why
		}
	}
	for _, f := range append(m.joined[:len(m.joined):len(m.joined)], m.formed) {
		if why := follows(v, f, m.left); why != "" {
			return why
		}
	}
	return ""
}

// follows returns the reason why view v must not follow f, which has been or may have been formed; empty if
// it may.
//
// Two parts that may follow f share a member even if they know of different members that have left. Those are
// in neither part, so each part holds at least half of the members that have not left, and half only if it
// knows all that have left.
func follows(v, f *View, left map[ID]int64) string {
	if f == nil {
		return ""
	}
	here, all := 0, 0
	var missing []string
	var oldest *ID
	for _, q := range f.Members {
		if joined, gone := left[q.ID]; gone && joined <= f.Number {
			continue
		}
		if all++; v.Has(q.ID) {
			here++
		} else {
			missing = append(missing, q.Name)
		}
		if oldest == nil || older(q.ID, *oldest) < 0 {
			oldest = &q.ID
		}
	}
	if here > 0 && (2*here > all || 2*here == all && v.Has(*oldest)) {
		return ""
	}
	return fmt.Sprintf("%d of the %d members of view %d are here: %s are missing, and a view must hold more "+
		"than half of the last one, or half with the oldest member",
		here, all, f.Number, strings.Join(missing, ", "))
}

// founds returns the reason why a view must not be the first one of the job; empty if it may.
func (m *Machine) founds(v *View) string {
	here := map[string]bool{}
	for _, q := range v.Members {
		if here[m.alive[q.ID].At] = true; q.ID == m.cfg.Me {
			here[m.cfg.At] = true
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
	return fmt.Sprintf("%d of the %d seeds are here, and the first view must hold more than half of them",
		count, len(m.cfg.Seeds))
}

// over returns the reason why a view of this member is not live any more, empty while it is.
func (m *Machine) over(v *View) (why string) {
	if m.Replaced() {
		return "a later incarnation of " + m.cfg.Me.Name + " has taken its place"
	}
	for _, q := range v.Members {
		peer, alive := m.alive[q.ID]
		_, left := m.left[q.ID]
		switch {
		case q.ID == m.cfg.Me:
		case left || peer.Wants > v.Number:
			why = q.Name + " has left the view"
		case !alive:
			why = q.Name + " does not answer"
		}
	}
	return why
}

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
	news := News{View: m.taken.Number, Ended: m.over(m.taken)}
	for id, peer := range m.alive {
		if !m.taken.Has(id) && peer.Asks {
			news.Joining = append(news.Joining, id.Name)
		}
	}
	slices.Sort(news.Joining)
	return news
}
