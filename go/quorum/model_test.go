package quorum

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// model is the machine written down as slowly and obviously as possible: it keeps what it was told, and
// looks at all of it after every event.
type model struct {
	policy  Policy
	beats   map[string]time.Time
	lost    map[string]time.Time // when the stream of a suspect broke
	out     map[string]bool      // who lost a rank and has not asked since
	died    []string             // in the step
	broken  bool                 // somebody of the latest quorum died since
	waiting []Asked              // in the order of asking
	joined  map[string]time.Time // since when a candidate is one
	latest  *Quorum
	highest int64
	shrunk  bool      // the latest quorum left candidates out
	behind  time.Time // since when a quorum waits that would go on below the latest one's step
}

func newModel(p Policy, start time.Time) *model {
	return &model{policy: p, beats: map[string]time.Time{}, lost: map[string]time.Time{}, out: map[string]bool{}, joined: map[string]time.Time{}, highest: start.UnixMilli()}
}

// step returns the quorum that the event leads to, if any, and who is answered.
func (m *model) step(e Event, now time.Time) (*Quorum, []WaiterID) {
	m.died = nil
	m.look(now)
	switch e := e.(type) {
	case Asked:
		m.waiting = append(m.waiting, e)
		m.beats[e.Member.ReplicaID] = now
		delete(m.lost, e.Member.ReplicaID)
		delete(m.out, e.Member.ReplicaID)
		if m.latest != nil && e.Member.Step >= m.latest.Past().Step {
			m.behind = time.Time{}
		}
		if e.KnownQuorumID <= maxKnownID {
			m.highest = max(m.highest, e.KnownQuorumID)
		}
	case GaveUp:
		m.waiting = slices.DeleteFunc(m.waiting, func(a Asked) bool { return a.Waiter == e.Waiter })
	case Beat:
		m.beats[e.ReplicaID] = now
		delete(m.lost, e.ReplicaID)
	case Lost:
		_, suspect := m.lost[e.ReplicaID]
		if m.healthy(e.ReplicaID, now) && !suspect {
			m.lost[e.ReplicaID] = now
		}
	case Incomplete:
		waits := slices.ContainsFunc(m.waiting, func(a Asked) bool { return a.Member.ReplicaID == e.ReplicaID })
		if m.healthy(e.ReplicaID, now) && !waits {
			m.out[e.ReplicaID] = true
			delete(m.lost, e.ReplicaID)
			m.die(e.ReplicaID)
		}
	}
	m.look(now)
	switch e.(type) {
	case Asked, Tick:
		return m.evaluate(now)
	}
	if len(m.died) > 0 {
		return m.evaluate(now)
	}
	return nil, nil
}

// failed are the members of a quorum that died in the step.
func (m *model) failed(latest *Quorum) (ids []string) {
	if latest == nil {
		return nil
	}
	for _, member := range latest.Members {
		if slices.Contains(m.died, member.ReplicaID) {
			ids = append(ids, member.ReplicaID)
		}
	}
	return ids
}

func (m *model) die(id string) {
	m.died = append(m.died, id)
	m.broken = m.broken || len(m.failed(m.latest)) > 0
}

func (m *model) healthy(id string, now time.Time) bool { return m.beating(id, now) && !m.out[id] }

func (m *model) beating(id string, now time.Time) bool {
	beat, ok := m.beats[id]
	lost, suspect := m.lost[id]
	return ok && now.Sub(beat) < m.policy.HeartbeatTimeout && (!suspect || now.Sub(lost) < m.policy.SuspectGrace)
}

// look notes who became a candidate, and who is none any more.
func (m *model) look(now time.Time) {
	for id := range m.beats {
		if !m.beating(id, now) {
			delete(m.beats, id)
			delete(m.lost, id)
			if !m.out[id] {
				m.die(id)
			}
			delete(m.out, id)
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
		healthy := len(m.beats) - len(m.out)
		enough := len(in) >= m.policy.MinReplicas
		majority := float64(len(candidates)) > float64(healthy)/2
		everybody := len(candidates) == healthy
		if !enough || !majority || !everybody && now.Sub(first) < m.policy.JoinTimeout {
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
	if same && !failures && !m.broken && m.highest <= m.latest.ID {
		q.ID = m.latest.ID
	} else {
		m.highest++
		q.ID = m.highest
	}
	m.latest, m.shrunk, m.broken = q, len(in) < len(candidates), false

	var answered []WaiterID
	var left []Asked
	for _, a := range m.waiting {
		if slices.ContainsFunc(in, func(member Member) bool { return member.ReplicaID == a.Member.ReplicaID }) {
			answered = append(answered, a.Waiter)
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

// history drives the machine and the model through the same random events.
type history struct {
	t       *testing.T
	rng     *rand.Rand
	policy  Policy
	now     time.Time
	machine *Machine
	model   *model

	waiter  WaiterID
	open    map[WaiterID]string // who waits, by replica_id
	sets    map[int64]string    // of members, by quorum_id
	lastID  int64
	wakeAt  time.Time
	quorums int
}

func newHistory(t *testing.T, seed uint64) *history {
	rng := rand.New(rand.NewPCG(seed, 0))
	policy := Policy{
		MinReplicas:      1 + rng.IntN(3),
		JoinTimeout:      time.Duration(1+rng.IntN(2000)) * time.Millisecond,
		HeartbeatTimeout: time.Duration(100+rng.IntN(5000)) * time.Millisecond,
		SuspectGrace:     time.Duration(rng.IntN(3)*rng.IntN(500)) * time.Millisecond,
	}
	return &history{
		t: t, rng: rng, policy: policy, now: epoch,
		machine: NewMachine(policy, epoch), model: newModel(policy, epoch),
		open: map[WaiterID]string{}, sets: map[int64]string{},
	}
}

func (h *history) event(replicas int) Event {
	id := fmt.Sprintf("r%d", h.rng.IntN(replicas))
	switch p := h.rng.IntN(100); {
	case p < 50:
		return h.ask(id)
	case p < 60:
		return GaveUp{Waiter: h.waiter - WaiterID(h.rng.IntN(8))} // most are open, some were answered, some never were
	case p < 80:
		return Beat{ReplicaID: id}
	case p < 88:
		return Lost{ReplicaID: id}
	case p < 90:
		return Woken{}
	case p < 93:
		return Incomplete{ReplicaID: id, Reason: "a rank is gone"}
	default:
		return Tick{}
	}
}

func (h *history) ask(id string) Asked {
	h.waiter++
	a := Asked{Waiter: h.waiter, Member: Member{ReplicaID: id, Step: max(0, int64(h.waiter)-h.rng.Int64N(20))}}
	if h.rng.IntN(20) == 0 {
		a.Member.ShrinkOnly = true
	}
	if h.rng.IntN(20) == 0 {
		a.Member.CommitFailures = 1
	}
	switch h.rng.IntN(30) {
	case 0:
		a.KnownQuorumID = h.lastID + h.rng.Int64N(5)
	case 1:
		a.KnownQuorumID = -1
	case 2:
		a.KnownQuorumID = maxKnownID + 1
	}
	return a
}

// step gives one event to both, compares, and checks what must always hold.
func (h *history) step(e Event) {
	switch e := e.(type) {
	case Asked:
		h.open[e.Waiter] = e.Member.ReplicaID
	case GaveUp:
		delete(h.open, e.Waiter)
	}
	before := h.model.latest
	want, wantAnswered := h.model.step(e, h.now)
	actions := h.machine.Step(e, h.now)

	var got *Quorum
	var answered []WaiterID
	var failed []string
	for _, action := range actions {
		switch a := action.(type) {
		case Deliver:
			require.Nil(h.t, got, "one quorum an event")
			got, answered = a.Quorum, a.Waiters
		case Changed:
			require.Same(h.t, got, a.Quorum)
			require.NotEqual(h.t, h.lastID, a.Quorum.ID)
		case Failed:
			require.Equal(h.t, h.lastID, a.QuorumID)
			failed = append(failed, a.ReplicaID)
		case Wake:
			h.wakeAt = a.At
		}
	}
	require.ElementsMatch(h.t, h.model.failed(before), failed)
	var due time.Time // the end of the first suspect's grace
	for _, lost := range h.model.lost {
		if end := lost.Add(h.policy.SuspectGrace); due.IsZero() || end.Before(due) {
			due = end
		}
	}
	require.True(h.t, due.IsZero() || due.Equal(h.wakeAt), "it asked to be woken at %s, %s is due", h.wakeAt, due)
	require.Equal(h.t, want, got)
	require.ElementsMatch(h.t, wantAnswered, answered)
	if got != nil {
		h.delivered(got, answered)
	}

	require.Equal(h.t, h.machine.recount(h.now), h.machine.roster.tally(h.now), "what is counted as it goes")
	known := map[string]bool{}
	for id := range h.model.beats {
		known[id] = true
	}
	for _, id := range h.open {
		known[id] = true
	}
	for _, r := range h.machine.members {
		known[r.id] = true
	}
	require.Len(h.t, h.machine.roster.replicas, len(known), "memory")
	require.Len(h.t, h.machine.roster.waiters, len(h.open), "memory")
	require.Equal(h.t, h.machine.roster.counts.healthy, h.machine.roster.pulses.Len()-len(h.model.out))
	require.Equal(h.t, h.machine.roster.counts.candidates, h.machine.roster.queue.Len())
}

func (h *history) delivered(q *Quorum, answered []WaiterID) {
	h.quorums++
	require.GreaterOrEqual(h.t, q.ID, h.lastID, "ids never fall")
	h.lastID = q.ID

	set := ""
	for i, m := range q.Members {
		set += m.ReplicaID + " "
		require.True(h.t, i == 0 || q.Members[i-1].ReplicaID < m.ReplicaID, "in order, each once")
	}
	if before, ok := h.sets[q.ID]; ok {
		require.Equal(h.t, before, set, "one set of members for each id")
	}
	h.sets[q.ID] = set

	for _, w := range answered {
		require.Contains(h.t, h.open, w, "only who waits is answered, and once")
		delete(h.open, w)
	}
	if h.model.shrunk {
		return
	}
	for w, id := range h.open {
		require.False(h.t, h.model.healthy(id, h.now), "%s (waiter %d) is healthy, asked, and was left out", id, w)
	}
}

// settle ends the history well: every replica is alive and asks whenever it does not wait. Then whoever
// waits is answered before all have asked once more.
func (h *history) settle(replicas int) {
	for _, a := range slices.Clone(h.model.waiting) {
		if a.Member.ShrinkOnly { // it may keep others out for as long as it waits
			h.step(GaveUp{Waiter: a.Waiter})
		}
	}
	replicas = max(replicas, h.policy.MinReplicas)
	for i := range replicas {
		h.step(Beat{ReplicaID: fmt.Sprintf("r%d", i)})
	}
	for range 3 {
		waiting := map[string]WaiterID{}
		for w, id := range h.open {
			waiting[id] = w
		}
		for i := range replicas {
			id := fmt.Sprintf("r%d", i)
			if _, ok := waiting[id]; !ok {
				a := h.ask(id)
				a.Member.ShrinkOnly = false
				h.step(a)
			}
		}
		h.step(Tick{})
		for id, w := range waiting {
			require.NotContains(h.t, h.open, w, "%s waits for ever", id)
		}
	}
}

func TestRandomHistoriesAgreeWithTheModel(t *testing.T) {
	quorums := 0
	for seed := range uint64(40) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			h := newHistory(t, seed)
			replicas := 1 + h.rng.IntN(7)
			for range 700 {
				h.now = h.now.Add(time.Duration(h.rng.IntN(4)) * time.Duration(h.rng.IntN(300)) * time.Millisecond)
				h.step(h.event(replicas))
			}
			h.settle(replicas)
			quorums += h.quorums
		})
	}
	require.Greater(t, quorums, 3000, "the histories must not be idle")
}
