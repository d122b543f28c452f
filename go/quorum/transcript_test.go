package quorum

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/transcript"
)

// The commands of a transcript:
//
//	policy min=2 join=1s heartbeat=5s [grace=200ms] [stalled=2s] [eject=3s] [forbid]   a new machine, at 1000 ms, so that its first quorum is 1001
//	ask a [waiter=1] [step=3] [shrink] [failures=1] [known=1005] [number=3] [at=ADDRESS] [world=8] [layout=L,...] [recallable] [of=2] [reaches=1,2]   of=2: a call by a member that has a list of two lighthouses
//	greet a seat=3/3 [term=1] [known=1005]   a member begins a stream; in its list this is the last of three lighthouses
//	reaches a 1,2    the member can reach these lighthouses, and no others
//	recalled 1005 step=3 a b c [from=a] [base=a+,b]   a shows quorum 1005; a+: the vote of a in the base was given for good
//	bound a b [age=1s]   they answer a stamp that was sent this long ago
//	waive a b        an operator states that they have ended
//	missing          prints the members whose votes are missing
//	ended a          its process has ended
//	withdrawn 1      the request is withdrawn
//	beat a b         heartbeats
//	disconnected a           its last stream broke
//	incomplete a     a rank of it has failed
//	suspects a [b]   a collective of the latest quorum failed in a, which suspects b, or no member in particular
//	reached a        a check has reached it
//	unreached a      a check has not reached it
//	reports a computes|waits [for=3s] [rank=1]   its answer to AskProgress
//	shutdown a       its manager server ends
//	drain a          an operator requests that it leaves
//	leaving a        it leaves
//	slept 3s         the lighthouse was stopped for this time
//	woken            the time of the latest Wake
//	tick             the timer
//	wait 100ms       time passes
//	describe         prints the status
//	beside B min=2 …   another machine, named B, with this policy; the following commands are for it
//	at A             the following commands are for machine A, which is that of policy
func TestTranscripts(t *testing.T) {
	transcript.Test(t, func(t *testing.T) func([]string) []string { return (&scribe{t: t}).run })
}

// scribe runs the commands of one transcript.
type scribe struct {
	t       *testing.T
	machine *Machine
	all     map[string]*Machine // by name, if there are several
	now     time.Time
	waiters WaiterID
}

func (r *scribe) begin(args []string) *Machine {
	return NewMachine(Policy{
		MinReplicas:       int(transcript.Number(r.t, transcript.Option(args, "min"))),
		JoinTimeout:       transcript.Duration(r.t, transcript.Option(args, "join")),
		HeartbeatTimeout:  transcript.Duration(r.t, transcript.Option(args, "heartbeat")),
		SuspectGrace:      transcript.Duration(r.t, cmp.Or(transcript.Option(args, "grace"), "0s")),
		StalledAfter:      transcript.Duration(r.t, cmp.Or(transcript.Option(args, "stalled"), "0s")),
		EjectStalledAfter: transcript.Duration(r.t, cmp.Or(transcript.Option(args, "eject"), "0s")),
		ForbidRegression:  slices.Contains(args, "forbid"),
	}, r.now)
}

func (r *scribe) run(words []string) []string {
	args := words[1:]
	switch words[0] {
	case "policy":
		r.now, r.waiters = time.UnixMilli(1000).UTC(), 0
		r.all = map[string]*Machine{"A": r.begin(args)}
		r.machine = r.all["A"]
		return nil
	case "beside":
		r.all[args[0]] = r.begin(args)
		r.machine = r.all[args[0]]
		return nil
	case "at":
		r.machine = r.all[args[0]]
		require.NotNil(r.t, r.machine, words)
		return nil
	case "ask":
		waiter := r.waiters + 1
		if w := transcript.Option(args, "waiter"); w != "" {
			waiter = WaiterID(transcript.Number(r.t, w))
		}
		r.waiters = max(r.waiters, waiter)
		return r.step(Asked{
			Waiter:        waiter,
			KnownQuorumID: transcript.Number(r.t, transcript.Option(args, "known")),
			Number:        uint64(transcript.Number(r.t, transcript.Option(args, "number"))),
			Recallable:    slices.Contains(args, "recallable"),
			Lighthouses:   int(transcript.Number(r.t, transcript.Option(args, "of"))),
			Reaches:       places(r.t, transcript.Option(args, "reaches")),
			Member: Member{
				ReplicaID:      args[0],
				Address:        cmp.Or(transcript.Option(args, "at"), "http://"+args[0]),
				Step:           transcript.Number(r.t, transcript.Option(args, "step")),
				WorldSize:      uint64(transcript.Number(r.t, transcript.Option(args, "world"))),
				Layouts:        strings.FieldsFunc(transcript.Option(args, "layout"), func(c rune) bool { return c == ',' }),
				CommitFailures: transcript.Number(r.t, transcript.Option(args, "failures")),
				ShrinkOnly:     slices.Contains(args, "shrink"),
			},
		})
	case "greet":
		g := Greeted{ReplicaID: args[0], Term: transcript.Number(r.t, transcript.Option(args, "term"))}
		_, err := fmt.Sscanf(transcript.Option(args, "seat"), "%d/%d", &g.Seat.Place, &g.Seat.Of)
		require.NoError(r.t, err)
		g.Seat.Place--
		g.KnownQuorumID = transcript.Number(r.t, transcript.Option(args, "known"))
		return r.step(g)
	case "reaches":
		return r.step(Reaches{args[0], places(r.t, strings.Join(args[1:], ""))})
	case "recalled":
		p := Past{ID: transcript.Number(r.t, args[0]), Step: transcript.Number(r.t, transcript.Option(args, "step"))}
		seat := Seat{}
		if text := transcript.Option(args, "seat"); text != "" {
			_, err := fmt.Sscanf(text, "%d/%d", &seat.Place, &seat.Of)
			require.NoError(r.t, err)
			seat.Place--
		}
		for _, id := range args[2:] {
			if !strings.Contains(id, "=") {
				p.Members = append(p.Members, Voter{ReplicaID: id, Address: "http://" + id})
			}
		}
		if base := transcript.Option(args, "base"); base != "" {
			for _, ids := range strings.Split(base, ";") {
				var set []Voter
				for _, id := range strings.Split(ids, ",") {
					id, given := strings.CutSuffix(id, "+")
					set = append(set, Voter{ReplicaID: id, Address: "http://" + id, Given: given})
				}
				p.Base = append(p.Base, set)
			}
		}
		require.NoError(r.t, p.Validate())
		return r.step(Recalled{Past: p, From: transcript.Option(args, "from"), Seat: seat})
	case "bound":
		age := transcript.Duration(r.t, cmp.Or(transcript.Option(args, "age"), "0s"))
		var answers []string
		for _, id := range args {
			if !strings.Contains(id, "=") {
				answers = append(answers, r.step(Bound{ReplicaID: id, Since: r.now.Add(-age)})...)
			}
		}
		return answers
	case "waive":
		return r.step(VotesWaived{ReplicaIDs: args, By: "an operator"})
	case "missing":
		return []string{strings.Join(r.machine.votes.missing(), " ")}
	case "ended":
		return r.step(Ended{ReplicaID: args[0]})
	case "withdrawn":
		return r.step(Withdrawn{Waiter: WaiterID(transcript.Number(r.t, args[0]))})
	case "beat", "call":
		var answers []string
		for _, id := range args {
			answers = append(answers, r.step(Beat{ReplicaID: id, Call: words[0] == "call"})...)
		}
		return answers
	case "disconnected":
		return r.step(Disconnected{ReplicaID: args[0]})
	case "incomplete":
		return r.step(Incomplete{ReplicaID: args[0], Reason: "rank 1 has failed"})
	case "suspects":
		suspect := ""
		if len(args) > 1 {
			suspect = args[1]
		}
		return r.step(Suspected{Reporter: args[0], Suspect: suspect, QuorumID: r.machine.past.latest.ID})
	case "reached", "unreached":
		return r.step(Checked{ReplicaID: args[0], QuorumID: r.machine.past.latest.ID, Reached: words[0] == "reached", Reason: "connection refused"})
	case "reports":
		return r.step(Progressed{ReplicaID: args[0], Progress: Progress{
			Step: 1, Rank: transcript.Number(r.t, transcript.Option(args, "rank")), Phase: args[1], Waits: args[1] == "waits",
			For: transcript.Duration(r.t, cmp.Or(transcript.Option(args, "for"), "1h")),
		}})
	case "drain":
		return r.step(Drained{ReplicaID: args[0], Reason: "an operator"})
	case "leaving":
		return r.step(Leaving{ReplicaID: args[0]})
	case "shutdown":
		return r.step(ShuttingDown{ReplicaID: args[0], Finished: slices.Contains(args, "finished")})
	case "slept":
		r.now = r.now.Add(transcript.Duration(r.t, args[0]))
		return r.step(Slept{For: transcript.Duration(r.t, args[0])})
	case "woken":
		return r.step(Woken{})
	case "tick":
		return r.step(Tick{})
	case "wait":
		r.now = r.now.Add(transcript.Duration(r.t, args[0]))
		return nil
	case "describe":
		return describe(r.machine.Describe(r.now))
	}
	require.Fail(r.t, "no such command", words)
	return nil
}

// places parses numbers of lighthouses, of which the first one is 1.
func places(t *testing.T, text string) (p Places) {
	for _, number := range strings.FieldsFunc(text, func(r rune) bool { return r == ',' }) {
		p |= PlacesOf(int(transcript.Number(t, number)) - 1)
	}
	return p
}

func (r *scribe) step(e Event) []string {
	var answers []string
	for _, action := range r.machine.Step(e, r.now) {
		switch a := action.(type) {
		case Deliver:
			members := ""
			for _, m := range a.Quorum.Members {
				members += fmt.Sprintf(" %s(step %d)", m.ReplicaID, m.Step)
			}
			id := fmt.Sprint(a.Quorum.ID)
			if term := termOf(a.Quorum.ID); term > 0 {
				id = fmt.Sprintf("%d (term %d)", a.Quorum.ID&(1<<termBits-1), term)
			}
			base := ""
			for i, set := range a.Quorum.Base {
				if i > 0 {
					base += ";"
				}
				for _, v := range set {
					base += " " + v.ReplicaID
					if v.Given {
						base += "(given)"
					}
				}
			}
			if base != "" {
				base = ", base:" + base
			}
			answers = append(answers, fmt.Sprintf("quorum %s:%s, to waiters %v%s", id, members, a.Waiters, base))
		case Changed:
			answers = append(answers, fmt.Sprintf("changed to %d: joined %v, left %v: %s", a.Quorum.ID, a.Joined, a.Left, a.Reason))
		case Redeliver:
			answers = append(answers, fmt.Sprintf("quorum %d redelivered, to waiter %d", a.Quorum.ID, a.Waiter))
		case Refuse:
			answers = append(answers, fmt.Sprintf("waiter %d is refused: %s", a.Waiter, a.Reason))
		case RefuseStream:
			answers = append(answers, fmt.Sprintf("the stream of %s is refused: %s", a.ReplicaID, a.Reason))
		case Renew:
			answers = append(answers, "all other streams end: "+a.Reason)
		case Recall:
			answers = append(answers, fmt.Sprintf("ask %s for quorum %d", a.ReplicaID, a.QuorumID))
		case FailBack:
			answers = append(answers, fmt.Sprintf("all fail back to number %d: %s", a.Place+1, a.Reason))
		case Probe:
			answers = append(answers, fmt.Sprintf("probe %s at %s", a.ReplicaID, a.Address))
		case Doubted:
			answers = append(answers, fmt.Sprintf("%s is not believed: %s", a.ReplicaID, a.Reason))
		case Refused:
			answers = append(answers, "member "+a.ReplicaID+" does not fit")
		case Waived:
			answers = append(answers, fmt.Sprintf("%s was waived by %s", a.ReplicaID, a.By))
		case Regressed:
			answers = append(answers, fmt.Sprintf("WARNING, quorum %d regresses: %s", a.Quorum.ID, a.Reason))
		case Failed:
			if a.Cause == ShutDown {
				answers = append(answers, fmt.Sprintf("%s of quorum %d ended: %s", a.ReplicaID, a.QuorumID, a.Reason))
				break
			}
			answers = append(answers, fmt.Sprintf("%s of quorum %d failed: %s", a.ReplicaID, a.QuorumID, a.Reason))
		case Stalled:
			answers = append(answers, fmt.Sprintf("%s of quorum %d is stalled: %s", a.ReplicaID, a.QuorumID, a.Reason))
		case Check:
			answers = append(answers, fmt.Sprintf("check on %s of quorum %d", a.ReplicaID, a.QuorumID))
		case AskProgress:
			answers = append(answers, fmt.Sprintf("ask for the progress of %v", a.ReplicaIDs))
		case Drain:
			answers = append(answers, fmt.Sprintf("ask %s to leave: %s", a.ReplicaID, a.Reason))
		case Keep:
			if a.Past.ID == 0 {
				answers = append(answers, fmt.Sprintf("the past is forgotten, except that quorum ids up to %d are used", a.Highest))
			}
		case Release:
			answers = append(answers, a.ReplicaID+" is released")
		case Wake:
			answers = append(answers, fmt.Sprintf("wake in %s", a.At.Sub(r.now)))
		case Waiting:
			answers = append(answers, "waiting: "+a.Reason)
		}
	}
	return answers
}

func describe(s Status) []string {
	lines := []string{
		fmt.Sprintf("quorum %d %v, %d healthy, %d candidates, %d waiters", s.QuorumID, s.Quorum, s.Healthy, s.Candidates, s.Waiters),
		"no quorum because: " + s.Reason,
	}
	for _, m := range s.Members {
		line := fmt.Sprintf("%s: heartbeat %d ms ago", m.ReplicaID, m.HeartbeatAgeMS)
		if !m.Healthy {
			line += ", failed"
		}
		if m.InQuorum {
			line += ", in the quorum"
		}
		if m.Stalled != "" {
			line += ", stalled"
		}
		if m.Out != "" {
			line += ", out"
		}
		if m.Draining != "" {
			line += ", draining"
		}
		if m.Waiting {
			line += fmt.Sprintf(", waits for %d ms", m.WaitingMS)
		}
		lines = append(lines, line)
	}
	return lines
}
