package quorum

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// history drives the machine and the model through the same random events.
type history struct {
	t       *testing.T
	rng     *rand.Rand
	policy  Policy
	now     time.Time
	machine *Machine
	model   *model

	raised  int64
	waiter  WaiterID
	asked   map[WaiterID]string // the replica id of each waiter
	open    map[WaiterID]string // of each pending one
	sets    map[int64]string    // the members of each quorum id
	lastID  int64
	wakeAt  time.Time
	gap     time.Duration // since the event before
	quorums int
	did     int            // number of actions other than quorums and failures
	fed     map[string]int // events by type
}

func newHistory(t *testing.T, seed uint64) *history {
	rng := rand.New(rand.NewPCG(seed, 0))
	policy := Policy{
		MinReplicas:      1 + rng.IntN(3),
		JoinTimeout:      time.Duration(1+rng.IntN(2000)) * time.Millisecond,
		HeartbeatTimeout: time.Duration(100+rng.IntN(5000)) * time.Millisecond,
		SuspectGrace:     time.Duration(rng.IntN(3)*rng.IntN(500)) * time.Millisecond,
	}
	if rng.IntN(2) == 0 {
		policy.StalledAfter = time.Duration(50+rng.IntN(2000)) * time.Millisecond
		policy.EjectStalledAfter = time.Duration(rng.IntN(2)*(50+rng.IntN(4000))) * time.Millisecond
	}
	if rng.IntN(4) == 0 {
		policy.EjectStalledAfter = EjectAuto
	}
	return &history{
		t: t, rng: rng, policy: policy, now: epoch,
		machine: NewMachine(policy, epoch, 0), model: newModel(policy, epoch),
		asked: map[WaiterID]string{}, open: map[WaiterID]string{}, sets: map[int64]string{},
		fed: map[string]int{},
	}
}

func (h *history) event(members int) Event {
	id, other := fmt.Sprintf("r%d", h.rng.IntN(members)), fmt.Sprintf("r%d", h.rng.IntN(members))
	quorumID := h.lastID
	if h.rng.IntN(20) == 0 {
		quorumID--
	}
	switch p := h.rng.IntN(200); {
	case p < 90:
		return h.ask(id)
	case p < 105:
		// most of these are pending, some are answered, some do not exist
		w := h.waiter - WaiterID(h.rng.IntN(8))
		return Withdrawn{ReplicaID: h.asked[w], Waiter: w}
	case p < 125:
		return Beat{ReplicaID: id, Phase: []Phase{Unsaid, Training, Checkpoint}[h.rng.IntN(3)]}
	case p < 135:
		return Disconnected{ReplicaID: id}
	case p < 137:
		return Woken{}
	case p < 140:
		return Incomplete{ReplicaID: id, Reason: "a rank has failed"}
	case p < 146:
		return Greeted{ReplicaID: id, Term: h.rng.Int64N(20) / 19, Known: h.claim()}
	case p < 150:
		return h.recall(members)
	case p < 161:
		return Suspected{Reporter: id, Suspect: []string{"", other}[h.rng.IntN(2)], QuorumID: quorumID}
	case p < 165:
		return Checked{ReplicaID: id, QuorumID: quorumID, Reached: h.rng.IntN(3) == 0, Reason: "no answer"}
	case p < 175:
		return Progressed{ReplicaID: id, Progress: Progress{
			Step: int64(h.waiter) - h.rng.Int64N(20), Waits: h.rng.IntN(2) == 0,
			For:   time.Duration(h.rng.IntN(3000)) * time.Millisecond,
			Phase: []Phase{Unsaid, Training, Training, Evaluation}[h.rng.IntN(4)],
		}}
	case p < 178:
		return Drained{ReplicaID: id, Reason: "somebody"}
	case p < 181:
		return Leaving{ReplicaID: id}
	case p < 183:
		return ShuttingDown{ReplicaID: id}
	case p < 184:
		return Slept{For: h.gap}
	case p < 185:
		return Copied{Copies: Copies{Step: max(0, int64(h.waiter)-h.rng.Int64N(20)),
			Quorum: quorumID - h.rng.Int64N(3), Hosts: []string{"h1"}}, Reporting: []string{"h2"}}
	case p < 187: // no quorum of these histories stands
		return Stopped{ReplicaID: id, QuorumID: quorumID, Step: h.rng.Int64N(20)}
	case p < 191:
		return Parting{ReplicaID: id, QuorumID: quorumID, Reason: "a reason"}
	case p < 192: // each is of another step: poison_test.go has equal ones
		h.raised++
		return Raised{ReplicaID: id, Digest: Digest{Step: h.raised}}
	case p < 193:
		return Changes{ReplicaID: id, Reason: "a setting"}
	case p < 194: // seats_test.go has fewer seats than members
		return Limited{MaxReplicas: members + h.rng.IntN(3)}
	default:
		return Tick{}
	}
}

func (h *history) ask(id string) Asked {
	h.waiter++
	a := Asked{Waiter: h.waiter, Recallable: h.rng.IntN(2) == 0,
		Member: Member{ReplicaID: id, Step: max(0, int64(h.waiter)-h.rng.Int64N(20))}}
	a.Member.CommittedQuorumID = max(0, int64(h.waiter)%11-7) // mostly 0, as of upstream's members
	if h.rng.IntN(20) == 0 {
		a.Member.ShrinkOnly = true
	}
	if h.rng.IntN(20) == 0 {
		a.Member.CommitFailures = 1
	}
	if q := h.model.latest; q != nil && h.rng.IntN(4) == 0 { // the same request again, as after a lost answer
		for _, member := range q.Members {
			if member.ReplicaID == id {
				a.Member = member
				if h.model.lowered[id] {
					a.Member.Step++
				}
			}
		}
	}
	if h.rng.IntN(2) == 0 {
		a.KnownQuorumID = h.lastID
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

// recall returns a quorum of this lighthouse, or one that an earlier lighthouse of the job has formed.
func (h *history) recall(members int) Recalled {
	q := &Quorum{ID: h.lastID + h.rng.Int64N(6) - 2, Created: h.now}
	step := max(0, int64(h.waiter)-h.rng.Int64N(20))
	for i := range members {
		if h.rng.IntN(2) == 0 {
			q.Members = append(q.Members, Member{ReplicaID: fmt.Sprintf("r%d", i), Step: step})
		}
	}
	if latest := h.model.latest; latest != nil && h.rng.IntN(2) == 0 { // another round of the same quorum
		q.ID, q.Members = latest.ID, slices.Clone(latest.Members)
		for i := range q.Members {
			q.Members[i].Step = step
		}
	}
	e := Recalled{Kept: Kept{Past: q.Past(), Highest: q.ID + h.rng.Int64N(3)}}
	if h.rng.IntN(2) == 0 {
		e.Past, e.Quorum, e.From = Past{}, q, fmt.Sprintf("r%d", h.rng.IntN(members))
	}
	return e
}

// claim returns a round that a member may know, and sometimes one that nobody knows.
func (h *history) claim() Claim {
	c := Claim{h.lastID, max(0, int64(h.waiter)-h.rng.Int64N(20))}
	if h.rng.IntN(20) == 0 {
		c.QuorumID += h.rng.Int64N(5)
	}
	return c
}

// step feeds one event to the machine and to the model, compares their actions, and checks the invariants.
func (h *history) step(e Event) {
	h.fed[reflect.TypeOf(e).Name()]++
	switch e := e.(type) {
	case Asked:
		h.open[e.Waiter], h.asked[e.Waiter] = e.Member.ReplicaID, e.Member.ReplicaID
	case Withdrawn:
		delete(h.open, e.Waiter)
	}
	want, wantAnswered := h.model.step(e, h.now)
	actions := h.machine.Step(e, h.now)
	h.machine.standing.ends() // the model has no quorums that stand: round/together_test.go plays those
	if q := h.machine.past.latest; q != nil {
		q.Stands = false
	}
	for _, r := range h.machine.roster.members {
		r.attends = false
	}

	var got *Quorum
	var answered []WaiterID
	var did []string
	failed := map[string]Cause{}
	does := func(what string, about ...any) { did = append(did, what+" "+fmt.Sprint(about...)) }
	for _, action := range actions {
		switch a := action.(type) {
		case Deliver:
			require.Nil(h.t, got, "an event delivers at most one quorum")
			got, answered = a.Quorum, a.Waiters
		case Changed:
			require.Same(h.t, got, a.Quorum)
			require.NotEqual(h.t, h.lastID, a.Quorum.ID)
		case Failed:
			failed[a.ReplicaID] = a.Cause
		case Wake:
			h.wakeAt = a.At
		case Redeliver:
			require.Same(h.t, h.machine.past.latest, a.Quorum)
			delete(h.open, a.Waiter)
			does("redeliver", a.Waiter)
		case RefuseStream:
			does("refuse stream", a.ReplicaID)
		case Refuse:
			delete(h.open, a.Waiter)
			does("refuse", a.Waiter)
		case Check:
			does("check", a.ReplicaID)
		case AskProgress:
			does("ask", a.ReplicaIDs)
		case Stalled:
			does("stalled", a.ReplicaID)
		case Report:
			if a.What == ClaimDoubted {
				does("doubted", a.ReplicaID)
			}
		case Judged:
			require.Empty(h.t, a.Verdict)
			does("judge", a.ReplicaID)
		case Drain:
			does("drain", a.ReplicaID)
		case Release:
			does("release", a.ReplicaID)
		}
	}
	h.did += len(did)
	require.ElementsMatch(h.t, h.model.did, did, "%#v", e)
	require.Equal(h.t, h.model.failed, failed, "%#v", e)
	var due time.Time // the end of the first suspect's grace
	for _, f := range h.model.facts {
		if end := f.broke.Add(h.policy.SuspectGrace); !f.broke.IsZero() && (due.IsZero() || end.Before(due)) {
			due = end
		}
	}
	require.True(h.t, due.IsZero() || due.Equal(h.wakeAt),
		"the machine asked to be woken at %s, although the first grace ends at %s", h.wakeAt, due)
	require.Equal(h.t, want, got, "%#v", e)
	require.ElementsMatch(h.t, wantAnswered, answered)
	if got != nil {
		h.delivered(got, answered)
	}
	if q := h.model.latest; q != nil {
		h.lastID = q.ID
	}

	require.Equal(h.t, recount(h.machine.roster, h.machine.now), h.machine.roster.tally(h.machine.now),
		"the running counts equal a recount")
	require.Len(h.t, h.machine.roster.members, len(h.model.facts), "no record of a member leaks")
	pending := 0
	for _, r := range h.machine.roster.members {
		if r.waiting() {
			pending++
		}
	}
	require.Equal(h.t, len(h.open), pending, "no record of a waiter leaks")
	healthy := 0
	for id := range h.model.facts {
		if h.model.healthy(id, h.now) {
			healthy++
		}
	}
	require.Equal(h.t, healthy, h.machine.roster.counts.healthy)
	alive, served := h.machine.InUse()
	require.Equal(h.t, healthy > 0, alive)
	require.Equal(h.t, h.model.latest != nil, served)
	require.Equal(h.t, h.machine.roster.counts.candidates, h.machine.roster.queue.Len())
}

// recount is the definition of a tally.
func recount(s *roster, now time.Time) tally {
	var t tally
	for _, r := range s.members {
		if r.previous {
			t.previous++
		}
		if !r.alive() || now.Sub(r.lastBeat) >= s.timeout || r.held {
			continue
		}
		t.healthy++
		if r.previous {
			t.present++
		}
		if r.presumed {
			t.presumed++
		}
		if !r.waiting() {
			continue
		}
		t.candidates++
		t.waited = max(t.waited, now.Sub(r.joined))
		if r.previous {
			t.previousCandidates++
			t.joining = max(t.joining, now.Sub(r.joined))
		}
		if r.member().ShrinkOnly {
			t.shrinkers++
		}
	}
	if t.previousCandidates == 0 {
		t.joining = t.waited
	}
	return t
}

func (h *history) delivered(q *Quorum, answered []WaiterID) {
	h.quorums++
	require.GreaterOrEqual(h.t, q.ID, h.lastID, "ids never fall")
	h.lastID = q.ID

	set := ""
	for i, m := range q.Members {
		set += m.ReplicaID + " "
		require.True(h.t, i == 0 || q.Members[i-1].ReplicaID < m.ReplicaID,
			"the members are in order, each once")
	}
	if before, ok := h.sets[q.ID]; ok {
		require.Equal(h.t, before, set, "one set of members for each id")
	}
	h.sets[q.ID] = set

	for _, w := range answered {
		require.Contains(h.t, h.open, w, "only pending waiters are answered, each once")
		delete(h.open, w)
	}
	if h.model.shrunk {
		return
	}
	for w, id := range h.open {
		require.False(h.t, h.model.healthy(id, h.now), "%s (waiter %d) is healthy, asked, and was left out",
			id, w)
	}
}

// settle ends the history without further faults: every member is alive, and asks whenever it has no pending
// request. Then each pending request must be answered by the time all the others have asked once more.
func (h *history) settle(members int) {
	for _, a := range slices.Clone(h.model.waiting) {
		if a.Member.ShrinkOnly { // new members may not join while such a request is pending
			h.step(Withdrawn{ReplicaID: a.Member.ReplicaID, Waiter: a.Waiter})
		}
	}
	members = max(members, h.policy.MinReplicas)
	for i := range members {
		h.step(Greeted{ReplicaID: fmt.Sprintf("r%d", i)}) // it claims no quorum any more
	}
	for range 3 {
		waiting := map[string]WaiterID{}
		for w, id := range h.open {
			waiting[id] = w
		}
		for i := range members {
			id := fmt.Sprintf("r%d", i)
			if _, ok := waiting[id]; !ok {
				a := h.ask(id)
				a.Member.ShrinkOnly, a.KnownQuorumID = false, 0
				a.Member.Step = int64(h.waiter) // a later step: not the repeated request of a lost answer
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
	quorums, did, fed := 0, 0, map[string]int{}
	for seed := range uint64(40) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			h := newHistory(t, seed)
			members := 1 + h.rng.IntN(7)
			for range 700 {
				h.gap = time.Duration(h.rng.IntN(4)) * time.Duration(h.rng.IntN(300)) * time.Millisecond
				h.now = h.now.Add(h.gap)
				h.step(h.event(members))
			}
			h.settle(members)
			quorums, did = quorums+h.quorums, did+h.did
			for name, n := range h.fed {
				fed[name] += n
			}
		})
	}
	t.Log(quorums, did, fed)
	for _, name := range eventTypes(t) {
		require.GreaterOrEqual(t, fed[name], 100, "%s is fed %d times", name, fed[name])
	}
	require.Greater(t, did, 1500, "the histories must not be idle")
	require.Greater(t, quorums, 3000, "the histories must not be idle")
}

// eventTypes returns the names of all kinds of events.
func eventTypes(t *testing.T) (names []string) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "types.go", nil, 0)
	require.NoError(t, err)
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Recv != nil && f.Name.Name == "isEvent" {
			names = append(names, f.Recv.List[0].Type.(*ast.Ident).Name)
		}
	}
	require.NotEmpty(t, names)
	return names
}
