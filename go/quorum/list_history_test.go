package quorum

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// listHistory drives the machines of two lighthouses of a list through random events, with members that follow the protocol. It
// checks them against a second, independent implementation of the rule of succession.go.
type listHistory struct {
	t          *testing.T
	rng        *rand.Rand
	policy     Policy
	now        time.Time
	houses     [2]ledger
	members    []*listMember
	lives      int
	waiters    map[WaiterID]*listMember
	waiter     WaiterID
	after      map[int64]int64    // by quorum_id: the quorum after which it was formed
	receivedBy map[int64][]string // by quorum_id: the members that have received it
	of         map[int64][]string // by quorum_id: its members
	chain      []int64            // quorums that all of their members have received
	wakeAt     [2]time.Time       // when each lighthouse asked to be woken; zero if it did not

	delivered, changed, based, refused, sentBack int
}

// ledger is the test's own record of what a lighthouse must know.
type ledger struct {
	machine *Machine
	last    *Past
	gave    map[string]bool     // members that ended while they were bound
	counts  map[string]struct{} // those of them whose votes the machine counts
	keeps   []Recalled          // states to be written to disk, the newest last
}

type listMember struct {
	id       string
	failed   bool
	at       int // the lighthouse of its stream; -1: it has none
	served   int // the lighthouse of its stream or, without one, of its last stream; -1: it has had none
	term     int64
	past     *Past
	step     int64
	promised time.Time // until when it is bound to the lighthouse in served
	stamp    time.Time // the last stamp that its lighthouse sent, zero if none
	asks     WaiterID
	number   uint64
	until    time.Time // until when it is stopped
	spoke    time.Time // time of its last message
	reaches  bool      // it has reported on its stream that it can reach the first lighthouse
}

func newListHistory(t *testing.T, seed uint64) *listHistory {
	h := &listHistory{
		t: t, rng: rand.New(rand.NewPCG(seed, 1)), now: epoch, waiters: map[WaiterID]*listMember{},
		policy: Policy{MinReplicas: 1, JoinTimeout: 100 * time.Millisecond, HeartbeatTimeout: 3 * time.Second, SuspectGrace: 50 * time.Millisecond},
		after:  map[int64]int64{}, receivedBy: map[int64][]string{}, of: map[int64][]string{},
	}
	for i := range h.houses {
		h.houses[i] = ledger{machine: NewMachine(h.policy, h.now), gave: map[string]bool{}}
	}
	for range 2 + h.rng.IntN(4) {
		h.join()
	}
	return h
}

func (h *listHistory) join() {
	h.lives++
	h.members = append(h.members, &listMember{id: fmt.Sprintf("%c%d", 'a'+h.rng.IntN(26), h.lives), at: -1, served: -1})
}

func (m *listMember) known() int64 {
	if m.past == nil {
		return 0
	}
	return m.past.ID
}

// earlier returns the lighthouses before its own that the member reports to reach.
func (m *listMember) earlier() Places {
	if m.reaches {
		return PlacesOf(0)
	}
	return 0
}

// does feeds one random event.
func (h *listHistory) does() {
	h.now = h.now.Add(time.Duration(h.rng.IntN(3)*h.rng.IntN(400)) * time.Millisecond)
	at := h.rng.IntN(2)
	m := h.members[h.rng.IntN(len(h.members))]
	for i, due := range h.wakeAt {
		if !due.IsZero() && !h.now.Before(due) {
			h.wakeAt[i] = time.Time{}
			h.step(i, Woken{})
			next := h.houses[i].machine.roster.due()
			require.True(h.t, next.IsZero() || next.After(h.now), "a member is still a suspect after its grace")
			require.Equal(h.t, next, h.wakeAt[i], "a wake-up is requested for the end of the next suspect's grace")
		}
	}
	switch p := h.rng.IntN(100); {
	case p < 25:
		h.step(at, Tick{})
	case p < 40:
		for _, m := range h.members {
			if m.at < 0 || h.stopped(m) {
				continue
			}
			if m.spoke = h.now; m.at > 0 && h.rng.IntN(3) == 0 {
				m.reaches = h.rng.IntN(8) > 0
				h.step(m.at, Reaches{m.id, m.earlier()})
			}
			h.step(m.at, Beat{ReplicaID: m.id})
		}
	case p < 75 && h.stopped(m):
	case p < 75:
		if m.at < 0 {
			h.greet(m, at)
		} else if m.asks == 0 {
			h.ask(m)
		}
	case p < 85 && !h.stopped(m):
		h.bind(m)
	case p < 92:
		h.breaks(m)
	case p < 94:
		h.ends(m)
	case p < 96 && len(h.members) < 6:
		h.join()
	case p < 98: // for longer than the heartbeat timeout
		m.until = h.now.Add(h.policy.HeartbeatTimeout + time.Duration(h.rng.IntN(2000))*time.Millisecond)
	case p == 99:
		h.crash(at)
	}
}

// stopped reports whether a member is stopped, and sends nothing.
func (h *listHistory) stopped(m *listMember) bool { return h.now.Before(m.until) }

// greet begins a stream of a member with a lighthouse (at). A new member begins with the first lighthouse of its list, and a bound
// member stays with its last one.
func (h *listHistory) greet(m *listMember, at int) {
	switch {
	case m.served < 0: // a new member
		at = 0
	case h.now.Before(m.promised):
		at = m.served
	}
	m.at, m.served, m.stamp, m.spoke, m.reaches = at, at, time.Time{}, h.now, false
	h.step(at, Greeted{m.id, Seat{at, 2}, m.term, m.known()})
}

func (h *listHistory) ask(m *listMember) {
	h.waiter++
	m.asks, m.number, m.spoke = h.waiter, m.number+1, h.now
	h.waiters[h.waiter] = m
	h.step(m.at, Asked{Waiter: h.waiter, Member: Member{ReplicaID: m.id, Address: "http://" + m.id, Step: m.step}, KnownQuorumID: m.known(), Recallable: true, Number: m.number, Reaches: m.earlier()})
}

// bind makes a member answer the last stamp that it received, and sends it the next one.
func (h *listHistory) bind(m *listMember) {
	if m.at < 0 {
		return
	}
	if !m.stamp.IsZero() {
		m.promised = h.now.Add(BondTime)
		h.step(m.at, Bound{m.id, m.stamp})
	}
	m.stamp = h.now
}

// breaks breaks the stream of a member, if it has one.
func (h *listHistory) breaks(m *listMember) {
	if at := m.at; at >= 0 {
		h.unasks(m)
		m.at = -1
		h.step(at, Disconnected{m.id})
	}
}

func (h *listHistory) unasks(m *listMember) {
	if w := m.asks; w != 0 {
		m.asks = 0
		delete(h.waiters, w)
		h.step(m.at, Withdrawn{w})
	}
}

// ends ends the process of a member. Probes may detect that, and another group starts in its place.
func (h *listHistory) ends(m *listMember) {
	at, bound := m.at, h.now.Before(m.promised)
	m.failed = true
	h.members = slices.DeleteFunc(h.members, func(o *listMember) bool { return o == m })
	h.join()
	if at >= 0 {
		h.unasks(m)
		h.step(at, Disconnected{m.id})
	}
	for i := range h.houses {
		if l := &h.houses[i]; h.rng.IntN(4) > 0 {
			if l.last != nil && m.known() <= l.last.ID && bound && m.served == i {
				l.gave[m.id] = true
			}
			h.step(i, Ended{m.id})
		}
	}
}

// crash restarts a lighthouse, with a state that it has written, or without any. Its members detect the end of its process, which
// releases them.
func (h *listHistory) crash(at int) {
	l := &h.houses[at]
	var disk *Recalled
	if n := len(l.keeps); n > 0 && h.rng.IntN(2) == 0 {
		disk = &l.keeps[max(0, n-1-h.rng.IntN(2))]
	}
	for _, m := range h.members {
		if m.at == at {
			delete(h.waiters, m.asks)
			m.at, m.asks, m.promised = -1, 0, time.Time{}
		}
	}
	*l, h.wakeAt[at] = ledger{machine: NewMachine(h.policy, h.now), gave: map[string]bool{}}, time.Time{}
	if disk != nil {
		h.step(at, *disk)
	}
}

// letGo makes a lighthouse release a member and end its stream.
func (h *listHistory) letGo(m *listMember) {
	if m.asks != 0 {
		delete(h.waiters, m.asks)
	}
	at, w := m.at, m.asks
	m.at, m.asks, m.promised = -1, 0, time.Time{}
	if w != 0 {
		h.step(at, Withdrawn{w})
	}
	h.step(at, Disconnected{m.id})
}

func (h *listHistory) member(id string) *listMember {
	for _, m := range h.members {
		if m.id == id {
			return m
		}
	}
	return nil
}

func (h *listHistory) step(at int, e Event) {
	l := &h.houses[at]
	// The machine may count fewer votes of ended members than the test, since it learns of some ends too late, but never more.
	l.counts = maps.Clone(l.machine.list.ended)
	if e, is := e.(Ended); is && l.machine.list.holds(e.ReplicaID, l.machine.past.latestID(), h.now) {
		l.machine.list.end(e.ReplicaID)
		l.counts = maps.Clone(l.machine.list.ended)
		l.machine.list.back(e.ReplicaID)
	}
	actions := l.machine.Step(e, h.now)
	if r, is := e.(Recalled); is && (l.last == nil || l.last.ID < r.Past.ID) {
		require.False(h.t, slices.ContainsFunc(actions, func(a Action) bool { _, doubted := a.(Doubted); return doubted }), "a member shows a quorum that was formed, and is not believed")
		l.learns(r.Past)
	}
	switch e := e.(type) {
	case Greeted:
		delete(l.gave, e.ReplicaID)
	case Asked:
		delete(l.gave, e.Member.ReplicaID)
	}
	for _, action := range actions {
		switch a := action.(type) {
		case Welcome:
			m := h.member(a.ReplicaID)
			m.term, m.stamp = max(m.term, a.Term), h.now
		case RefuseStream:
			require.Fail(h.t, a.Reason)
		case Renew:
			for _, m := range slices.Clone(h.members) {
				if greeted, _ := e.(Greeted); m.at == at && m.id != greeted.ReplicaID {
					h.letGo(m)
				}
			}
		case FailBack:
			h.sentBack++
			require.Equal(h.t, 1, at, "only the later lighthouse sends its members back")
			for _, m := range slices.Clone(h.members) {
				if m.at != at {
					continue
				}
				if r := l.machine.roster.members[m.id]; h.now.Sub(m.spoke) < h.policy.HeartbeatTimeout && (r == nil || r.out == "") {
					require.True(h.t, m.reaches, "%s is alive, and does not say that it reaches the other lighthouse", m.id)
				}
				require.False(h.t, l.machine.list.holds(m.id, math.MaxInt64, h.now), "%s may ask elsewhere from here on", m.id)
				h.letGo(m)
			}
		case Wake:
			h.wakeAt[at] = a.At
		case Recall:
			if m := h.member(a.ReplicaID); m != nil && m.at == at && m.known() >= a.QuorumID && !h.stopped(m) && h.rng.IntN(3) > 0 {
				h.step(at, Recalled{Past: *m.past, From: m.id})
			}
		case Probe: // the hosts of live members do not refuse connections
		case Refuse:
			h.refused++
			if m := h.waiters[a.Waiter]; m != nil {
				delete(h.waiters, a.Waiter)
				m.asks = 0
				if a.Why == Outvoted || a.Why == Unshown {
					m.promised = time.Time{}
				}
			}
		case Redeliver:
			h.receive(h.waiters[a.Waiter], a.Waiter, a.Quorum)
		case Keep:
			l.keeps = append(l.keeps, Recalled{Past: a.Past, Highest: a.Highest + 10, Seat: a.Seat})
		case Deliver:
			h.deliver(at, a)
		}
	}
}

func (l *ledger) learns(p Past) { l.last = &p }

// deliver checks a quorum against the rule.
func (h *listHistory) deliver(at int, a Deliver) {
	l, q := &h.houses[at], a.Quorum
	h.delivered++
	require.EqualValues(h.t, at, termOf(q.ID)%2, "each lighthouse has terms of its own")
	in, knows := map[string]bool{}, map[string]bool{}
	for _, m := range q.Members {
		in[m.ReplicaID] = true
		asks := h.member(m.ReplicaID)
		require.NotNil(h.t, asks, "%s has ended", m.ReplicaID)
		require.True(h.t, l.last == nil && asks.past == nil || l.last != nil && asks.known() <= l.last.ID, "%s knows of a later quorum", m.ReplicaID)
		knows[m.ReplicaID] = l.last != nil && asks.known() == l.last.ID
	}
	if l.last == nil {
		require.Zero(h.t, at, "a job begins at the first lighthouse")
	} else {
		require.GreaterOrEqual(h.t, q.ID, l.last.ID, "ids never fall")
		var base [][]string
		for i, set := range slices.Concat([][]Voter{l.last.Members}, l.last.Base) {
			require.True(h.t, l.outvotes(set, in), "quorum %d has no majority of %v", q.ID, set)
			if i > 0 && !majority(set, func(v Voter) bool { return knows[v.ReplicaID] || v.Given }) {
				base = append(base, voterNames(set))
			}
		}
		changed := !slices.Equal(memberNames(q), voterNames(l.last.Members))
		if changed {
			base = append(base, voterNames(l.last.Members))
			h.changed++
		}
		var got [][]string
		for _, set := range q.Base {
			got = append(got, voterNames(set))
		}
		require.Equal(h.t, base, got, "the base of quorum %d", q.ID)
		h.based += len(base)
	}
	if l.last == nil || l.last.ID != q.ID {
		require.NotContains(h.t, h.of, q.ID, "an id is given out once")
		if l.last != nil {
			h.after[q.ID] = l.last.ID
		}
		h.of[q.ID] = memberNames(q)
	}
	l.learns(q.Past())
	for _, w := range a.Waiters {
		m := h.waiters[w]
		if h.rng.IntN(6) > 0 {
			h.receive(m, w, q)
		} else { // the member's stream breaks, and it does not receive the quorum
			m.asks = 0
			delete(h.waiters, w)
			defer h.breaks(m)
		}
	}
}

// receive delivers a quorum to a member. A quorum may commit steps once all of its members have received it. Of two such quorums of a
// job, one must be an ancestor of the other.
func (h *listHistory) receive(m *listMember, w WaiterID, q *Quorum) {
	p := q.Past()
	m.past, m.asks, m.step = &p, 0, m.step+1
	delete(h.waiters, w)
	if !slices.Contains(h.receivedBy[q.ID], m.id) {
		h.receivedBy[q.ID] = append(h.receivedBy[q.ID], m.id)
	}
	if len(h.receivedBy[q.ID]) < len(h.of[q.ID]) || slices.Contains(h.chain, q.ID) {
		return
	}
	for _, other := range h.chain {
		late, early := max(q.ID, other), min(q.ID, other)
		if h.first(late) != h.first(early) {
			continue // two jobs: only new members began the second one, at a lighthouse that had lost its memory
		}
		for late > early {
			late = h.after[late]
		}
		require.Equal(h.t, early, late, "quorums %d and %d commit, and neither comes after the other", q.ID, other)
	}
	h.chain = append(h.chain, q.ID)
}

// first returns the quorum with which a history begins: the one without a predecessor.
func (h *listHistory) first(id int64) int64 {
	for h.after[id] != 0 {
		id = h.after[id]
	}
	return id
}

// outvotes reports whether the members of a set that ask, or whose votes are given, are a majority, by counting them one by one.
func (l *ledger) outvotes(set []Voter, asks map[string]bool) bool {
	return majority(set, func(v Voter) bool { return asks[v.ReplicaID] || v.Given || l.given(v.ReplicaID) })
}

// majority reports whether the counted members are more than half of a set, or half of it including the first one.
func majority(set []Voter, counts func(Voter) bool) bool {
	n := 0
	for _, v := range set {
		if counts(v) {
			n++
		}
	}
	return 2*n > len(set) || 2*n == len(set) && counts(set[0])
}

func (l *ledger) given(id string) bool {
	_, counts := l.counts[id]
	return counts && l.gave[id]
}

func memberNames(q *Quorum) (ids []string) {
	for _, m := range q.Members {
		ids = append(ids, m.ReplicaID)
	}
	return ids
}

func voterNames(set []Voter) (ids []string) {
	for _, v := range set {
		ids = append(ids, v.ReplicaID)
	}
	return ids
}

func TestRandomHistoriesOfTwoLighthousesKeepTheRule(t *testing.T) {
	var delivered, changed, based, committed, refused, sentBack int
	for seed := range uint64(200) {
		h := newListHistory(t, seed)
		for range 400 {
			h.does()
		}
		delivered, changed, based, refused = delivered+h.delivered, changed+h.changed, based+h.based, refused+h.refused
		committed, sentBack = committed+len(h.chain), sentBack+h.sentBack
	}
	t.Log(delivered, changed, based, committed, refused, sentBack)
	require.Greater(t, delivered, 1000, "the histories must not be idle")
	require.Greater(t, changed, 300)
	require.Greater(t, based, 300, "too few sets that must be outvoted besides the members")
	require.Greater(t, committed, 300)
	require.Greater(t, sentBack, 100, "too few failbacks to the first lighthouse")
}
