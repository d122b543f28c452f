package round

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

	"github.com/torchft/torchft/go/quorum"
)

// model is a slow and obvious version of the machine: it keeps the pending requests and votes in two lists.
type model struct {
	size     int64
	asks     []QuorumAsked
	votes    []modelVote
	metadata map[int64]string
	absent   map[int64]Kind
	answered map[int64]uint64
	rounds   uint64
	inFlight uint64
	known    int64
	closed   bool
	draining bool
	does     map[int64]*modelRank

	out outcome // of the current event
}

// modelRank is a rank's progress.
type modelRank struct {
	phase           phase
	answered, waits bool
}

type modelVote struct {
	Voted
	round uint64
}

// outcome has the results of an event: a line for each answered waiter, and one for the lighthouse. Their
// order is irrelevant.
type outcome map[string]string

func newModel(size int64) *model {
	return &model{size: size, metadata: map[int64]string{}, absent: map[int64]Kind{},
		answered: map[int64]uint64{}, does: map[int64]*modelRank{}}
}

func (m *model) answer(w WaiterID, text string) { m.out[fmt.Sprint("waiter ", w)] = text }
func (m *model) fail(w WaiterID, k Kind)        { m.answer(w, "fails: "+k.String()) }

func (m *model) failAsks(k Kind) {
	if m.inFlight != 0 {
		m.out["lighthouse"] = fmt.Sprint("cancel ", m.inFlight)
	}
	for _, a := range m.asks {
		m.fail(a.Waiter, k)
	}
	m.asks, m.inFlight = nil, 0
}

func (m *model) failVotes(k Kind) {
	for _, v := range m.votes {
		m.fail(v.Waiter, k)
	}
	m.votes = nil
}

func (m *model) step(e Event) outcome {
	m.out = outcome{}
	switch e := e.(type) {
	case QuorumAsked:
		m.asked(e)
	case QuorumKnown:
		m.quorumKnown(e)
	case Voted:
		m.voted(e)
	case MetadataAsked:
		switch text, ok := m.metadata[e.GroupRank]; {
		case m.closed:
			m.fail(e.Waiter, KindUnavailable)
		case ok:
			m.answer(e.Waiter, "metadata "+text)
		default:
			m.fail(e.Waiter, KindInvalid)
		}
	case Drained, DrainAsked:
		m.draining = true
	case ProgressAsked:
		for _, r := range m.does {
			r.answered = false
		}
	case RankProgressed:
		if e.GroupRank >= 0 && e.GroupRank < m.size {
			r := m.rank(e.GroupRank)
			r.answered, r.waits = !e.Begins, e.Waits && !e.Begins
		}
	case StillDisconnected:
		if _, absent := m.absent[e.GroupRank]; absent && !m.closed {
			m.out["incomplete"] = "reported"
		}
	case RankBack:
		delete(m.absent, e.GroupRank)
	case Withdrawn:
		m.withdrawn(e)
	case RankDisconnected:
		if !m.closed && e.GroupRank >= 0 && e.GroupRank < m.size {
			m.absent[e.GroupRank] = KindAborted
			m.failAsks(KindAborted)
			m.failVotes(KindAborted)
		}
	case Closed:
		m.closed = true
		m.failAsks(KindUnavailable)
		m.failVotes(KindUnavailable)
	}
	return m.out
}

func (m *model) rank(rank int64) *modelRank {
	if m.does[rank] == nil {
		m.does[rank] = &modelRank{}
	}
	return m.does[rank]
}

// progress reports whether all ranks wait for others, and whether all that are in a step have reported their
// progress.
func (m *model) progress() (waits, complete bool) {
	waits, complete = true, true
	for rank := range m.size {
		r := m.rank(rank)
		complete = complete && (r.phase != inStep || r.answered)
		waits = waits && (r.phase == inQuorum || r.phase == inVote ||
			r.phase == inStep && r.answered && r.waits)
	}
	return waits, complete
}

func (m *model) asked(e QuorumAsked) {
	switch {
	case m.closed:
		m.fail(e.Waiter, KindUnavailable)
		return
	case e.GroupWorldSize != 0 && e.GroupWorldSize != m.size:
		m.fail(e.Waiter, KindInvalid)
		m.failAsks(KindInvalid)
		m.failVotes(KindInvalid)
		if e.GroupRank >= 0 && e.GroupRank < m.size {
			m.absent[e.GroupRank] = KindInvalid
		}
		return
	case e.GroupRank < 0 || e.GroupRank >= m.size:
		m.fail(e.Waiter, KindInvalid)
		return
	}
	m.metadata[e.GroupRank] = e.CheckpointMetadata
	m.draining = m.draining || e.Drain
	*m.rank(e.GroupRank) = modelRank{phase: inQuorum}
	delete(m.absent, e.GroupRank)
	m.failVotes(KindAborted)

	var older []QuorumAsked
	m.asks, older = split(m.asks, func(a QuorumAsked) bool { return a.GroupRank != e.GroupRank })
	for _, o := range older {
		m.fail(o.Waiter, KindAborted)
		if m.inFlight == 0 {
			continue
		}
		o.Waiter, o.Deadline = e.Waiter, e.Deadline
		if o == e {
			m.asks = append(m.asks, e)
			return
		}
		m.failAsks(KindAborted)
	}
	m.asks = append(m.asks, e)

	if rank := m.firstAbsent(m.hasAsked); rank >= 0 {
		m.failAsks(m.absent[rank])
		return
	}
	if int64(len(m.asks)) == m.size {
		m.rounds++
		m.inFlight = m.rounds
		m.out["lighthouse"] = fmt.Sprintf("ask %d at step %d, knows %d", m.inFlight, m.smallestStep(),
			m.known)
	}
}

func (m *model) smallestStep() int64 {
	steps := []int64{}
	for _, a := range m.asks {
		steps = append(steps, a.Step)
	}
	return slices.Min(steps)
}

func (m *model) hasAsked(rank int64) bool {
	return slices.ContainsFunc(m.asks, func(a QuorumAsked) bool { return a.GroupRank == rank })
}

func (m *model) hasVoted(rank int64) bool {
	return slices.ContainsFunc(m.votes, func(v modelVote) bool { return v.GroupRank == rank })
}

func (m *model) firstAbsent(present func(rank int64) bool) int64 {
	for r := range m.size {
		if _, absent := m.absent[r]; absent && !present(r) {
			return r
		}
	}
	return -1
}

// quorumKnown handles the quorums of the histories below: they have this group and one more, "z".
func (m *model) quorumKnown(e QuorumKnown) {
	if m.inFlight == 0 || e.Round != m.inFlight {
		return
	}
	m.inFlight = 0
	if e.Failure != nil {
		m.failAsks(e.Failure.Kind)
		return
	}
	m.known = max(m.known, e.Quorum.ID)
	silent := slices.ContainsFunc(m.asks, func(a QuorumAsked) bool { return a.CommittedQuorumID == 0 })
	differ := slices.ContainsFunc(m.asks, func(a QuorumAsked) bool {
		return a.Step != m.asks[0].Step || !silent && a.CommittedQuorumID != m.asks[0].CommittedQuorumID
	})
	behind := e.Quorum.Members[1].Step > e.Quorum.Members[0].Step
	if differ && !behind {
		m.failAsks(KindAborted)
		return
	}
	m.failVotes(KindAborted)
	for _, a := range m.asks {
		m.answer(a.Waiter, fmt.Sprintf("quorum %d, heal %t, draining %t", e.Quorum.ID, behind, m.draining))
		*m.rank(a.GroupRank) = modelRank{phase: inStep}
		m.answered[a.GroupRank] = e.Round
	}
	m.asks = nil
}

func (m *model) voted(e Voted) {
	if m.closed {
		m.fail(e.Waiter, KindUnavailable)
		return
	}
	if e.GroupRank < 0 || e.GroupRank >= m.size {
		m.fail(e.Waiter, KindInvalid)
		return
	}
	delete(m.absent, e.GroupRank)
	*m.rank(e.GroupRank) = modelRank{phase: inVote}
	v := modelVote{e, m.answered[e.GroupRank]}
	for _, other := range m.votes {
		if other.round > v.round || other.round == v.round && other.Step > v.Step {
			m.fail(e.Waiter, KindAborted)
			return
		}
	}
	var stale []modelVote
	m.votes, stale = split(m.votes, func(o modelVote) bool {
		return o.round == v.round && o.Step == v.Step && o.GroupRank != v.GroupRank
	})
	for _, o := range stale {
		m.fail(o.Waiter, KindAborted)
	}
	m.votes = append(m.votes, v)
	if rank := m.firstAbsent(m.hasVoted); rank >= 0 {
		m.failVotes(m.absent[rank])
		return
	}
	if !m.hasAsked(e.GroupRank) && slices.ContainsFunc(m.asks,
		func(a QuorumAsked) bool { return !m.hasVoted(a.GroupRank) }) {
		m.failVotes(KindAborted)
		return
	}
	if int64(len(m.votes)) == m.size {
		commit := !slices.ContainsFunc(m.votes, func(o modelVote) bool { return !o.ShouldCommit })
		for _, o := range m.votes {
			*m.rank(o.GroupRank) = modelRank{phase: afterVote}
			m.answer(o.Waiter, fmt.Sprint("commit ", commit))
		}
		m.votes = nil
	}
}

func (m *model) withdrawn(e Withdrawn) {
	own, others := KindAborted, KindAborted
	if e.Timeout {
		own = KindTimeout
	}
	if slices.ContainsFunc(m.asks, func(a QuorumAsked) bool { return a.Waiter == e.Waiter }) {
		if m.inFlight != 0 {
			others = own
		}
		m.failAsks(others)
		m.fail(e.Waiter, own)
	}
	if slices.ContainsFunc(m.votes, func(v modelVote) bool { return v.Waiter == e.Waiter }) {
		m.failVotes(KindAborted)
		m.fail(e.Waiter, own)
	}
}

func split[T any](all []T, keep func(T) bool) (kept, rest []T) {
	for _, x := range all {
		if keep(x) {
			kept = append(kept, x)
		} else {
			rest = append(rest, x)
		}
	}
	return kept, rest
}

// history drives the machine and the model through the same random events.
type history struct {
	t       *testing.T
	rng     *rand.Rand
	machine *Machine
	model   *model

	waiter   WaiterID
	open     map[WaiterID]Event
	asked    uint64 // the pending request to the lighthouse, 0 if none
	askedAt  int64  // its step
	quorumID int64
	commits  int
	fed      map[string]int // events by type
}

func (h *history) next() WaiterID {
	h.waiter++
	return h.waiter
}

func (h *history) event() Event {
	size := h.model.size
	rank := h.rng.Int64N(size)
	if h.rng.IntN(60) == 0 {
		rank = h.rng.Int64N(size+4) - 2 // some are out of range
	}
	switch p := h.rng.IntN(110); {
	case p >= 109 && h.rng.IntN(10) == 0:
		return []Event{Drained{}, DrainAsked{}}[h.rng.IntN(2)]
	case p >= 108:
		failed := []string{"g", "g", "z", "y"}[h.rng.IntN(4)]
		return MemberFailed{QuorumID: max(1, h.quorumID-h.rng.Int64N(2)), ReplicaID: failed,
			Reason: "it is silent"}
	case p >= 107:
		return ProgressAsked{}
	case p >= 106: // what it changes is no answer
		return RankWorked{GroupRank: rank, Took: make([]time.Duration, h.rng.IntN(20))}
	case p >= 104:
		return RankProgressed{GroupRank: rank, Waits: h.rng.IntN(2) == 0, What: "something",
			Begins: h.rng.IntN(4) == 0}
	case p >= 102:
		return StillDisconnected{GroupRank: rank}
	case p >= 100:
		return RankBack{GroupRank: rank}
	case p < 35:
		e := QuorumAsked{
			Waiter: h.next(), Request: Request{GroupRank: rank, Step: 3,
				CheckpointMetadata: fmt.Sprint("at ", h.waiter%4)},
			Deadline: epoch.Add(time.Duration(h.rng.IntN(9)) * time.Second),
		}
		if h.rng.IntN(12) == 0 {
			e.Step = h.rng.Int64N(5)
		}
		if h.rng.IntN(12) > 0 { // otherwise the rank does not report it
			e.CommittedQuorumID = 1 + h.rng.Int64N(20)/19
		}
		if h.rng.IntN(40) == 0 {
			e.GroupWorldSize = size + h.rng.Int64N(2)
		}
		e.Drain = h.rng.IntN(400) == 0
		return e
	case p < 65:
		e := Voted{Waiter: h.next(), GroupRank: rank, Step: 3, ShouldCommit: h.rng.IntN(10) > 0}
		if h.rng.IntN(12) == 0 {
			e.Step = h.rng.Int64N(5)
		}
		return e
	case p < 85:
		round := h.asked
		if h.rng.IntN(8) == 0 {
			round = h.rng.Uint64N(h.model.rounds + 2)
		}
		if h.rng.IntN(6) == 0 {
			return QuorumKnown{Round: round, Failure: &Failure{KindUnavailable, "not reached"}}
		}
		h.quorumID += h.rng.Int64N(2)
		return QuorumKnown{Round: round, Quorum: &quorum.Quorum{ID: h.quorumID, Members: []quorum.Member{
			{ReplicaID: "g", Step: h.askedAt},
			{ReplicaID: "z", Address: "http://z", Step: h.askedAt + h.rng.Int64N(2)},
		}}}
	case p < 90:
		return MetadataAsked{Waiter: h.next(), GroupRank: rank}
	case p < 96:
		return Withdrawn{Waiter: h.waiter - WaiterID(h.rng.IntN(6)), Timeout: h.rng.IntN(2) == 0}
	case p < 97: // no quorum of these histories stands
		return Called{QuorumID: h.quorumID}
	case p < 98:
		return []Event{RoundKnown{QuorumID: h.quorumID, Step: h.rng.Int64N(5)}, Reached{}}[h.rng.IntN(2)]
	default:
		return RankDisconnected{GroupRank: rank}
	}
}

// step feeds one event to the machine and the model, compares their actions, and checks the invariants.
func (h *history) step(e Event) {
	h.fed[reflect.TypeOf(e).Name()]++
	switch e := e.(type) {
	case QuorumAsked:
		h.open[e.Waiter] = e
	case Voted:
		h.open[e.Waiter] = e
	case MetadataAsked:
		h.open[e.Waiter] = e
	case QuorumKnown:
		if e.Round == h.asked {
			h.asked = 0
		}
	}
	got := outcome{}
	decided := map[int64]Voted{}
	for _, action := range h.machine.Step(e, epoch) {
		h.take(action, got, decided)
	}
	require.Equal(h.t, h.model.step(e), got, "%#v", e)
	p, complete := h.machine.Progress(epoch)
	waits, all := h.model.progress()
	require.Equal(h.t, waits, p.Waits, "%#v", e)
	require.Equal(h.t, all, complete, "%#v", e)

	require.True(h.t, len(decided) == 0 || int64(len(decided)) == h.model.size, "a decision is for all ranks")
	for _, v := range decided {
		require.Equal(h.t, decided[0].Step, v.Step, "votes on different steps mixed")
	}
	status := h.machine.Describe()
	for _, a := range []Attendance{status.Quorum, status.Vote} {
		for _, rank := range a.Missing {
			require.NotContains(h.t, status.Absent, rank, "ranks wait for an absent rank")
		}
		require.True(h.t, len(a.Missing) > 0 || len(a.Waiting) == 0 || status.Asking,
			"all are there, and wait")
	}
	// A rank makes one call at a time: if it has voted, it no longer waits for its pending request.
	waitsToo := slices.ContainsFunc(status.Vote.Waiting,
		func(r int64) bool { return slices.Contains(status.Quorum.Waiting, r) })
	for _, rank := range status.Vote.Missing {
		require.False(h.t, !waitsToo && slices.Contains(status.Quorum.Waiting, rank),
			"ranks wait for each other")
	}
	require.Equal(h.t, h.asked != 0, status.Asking)
}

func (h *history) take(action Action, got outcome, decided map[int64]Voted) {
	done := func(w WaiterID, text string) {
		require.Contains(h.t, h.open, w, "only pending waiters are answered, and once")
		if v, ok := h.open[w].(Voted); ok && text[0] == 'c' {
			decided[v.GroupRank] = v
			h.commits++
		}
		delete(h.open, w)
		got[fmt.Sprint("waiter ", w)] = text
	}
	switch a := action.(type) {
	case AskLighthouse:
		require.Zero(h.t, h.asked, "one request at a time")
		h.asked, h.askedAt = a.Round, a.Member.Step
		got["lighthouse"] = fmt.Sprintf("ask %d at step %d, knows %d", a.Round, a.Member.Step,
			a.KnownQuorumID)
	case CancelLighthouse:
		require.Equal(h.t, h.asked, a.Round)
		h.asked = 0
		got["lighthouse"] = fmt.Sprint("cancel ", a.Round)
	case AnswerQuorum:
		done(a.Waiter, fmt.Sprintf("quorum %d, heal %t, draining %t", a.Result.QuorumID, a.Result.Heal,
			a.Result.Draining))
	case ReportIncomplete:
		require.NotEmpty(h.t, a.Reason)
		got["incomplete"] = "reported"
	case AnswerVote:
		done(a.Waiter, fmt.Sprint("commit ", a.ShouldCommit))
	case AnswerMetadata:
		done(a.Waiter, "metadata "+a.Metadata)
	case Fail:
		require.NotEmpty(h.t, a.Failure.Reason)
		done(a.Waiter, "fails: "+a.Failure.Kind.String())
	}
}

func TestRandomHistoriesAgreeWithTheModel(t *testing.T) {
	commits, rounds, fed := 0, uint64(0), map[string]int{}
	for seed := range uint64(40) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 0))
			size := 1 + rng.Int64N(4)
			h := &history{
				t: t, rng: rng, open: map[WaiterID]Event{}, fed: fed,
				machine: NewMachine(Group{ReplicaID: "g", WorldSize: size}), model: newModel(size),
			}
			for range 1500 {
				h.step(h.event())
			}
			h.step(Closed{Reason: "the end"})
			require.Empty(t, h.open, "no waiter is left unanswered")
			for range 20 {
				h.step(h.event())
				require.Empty(t, h.open)
			}
			commits += h.commits
			rounds += h.model.rounds
		})
	}
	require.Greater(t, commits, 2000, "the histories must not be idle")
	require.Greater(t, rounds, uint64(1000), "the histories must not be idle")
	for _, name := range eventTypes(t) {
		require.GreaterOrEqual(t, fed[name], 20, "%s is fed %d times", name, fed[name])
	}
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
