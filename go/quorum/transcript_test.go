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
//	policy min=2 [max=3] join=1s heartbeat=5s [grace=200ms] [stalled=2s] [eject=3s] [forbid] [term=1]   a new machine, at 1000 ms, so that its first quorum is 1001
//	ask a [waiter=1] [step=3] [shrink] [failures=1] [known=1005] [number=3] [at=ADDRESS] [world=8] [layout=L,...] [recallable]
//	ask … [committed=1001] [each] [run=RUN]   likewise; it asks for each step; the run of its launcher
//	greet a [term=1] [known=1005] [step=3] [stands=1005] [at=7]   a member begins a stream; step is that of its last round, at the one that it is in
//	stopped a 1005 step=7   its answer to a call
//	parts a 1005     it has left quorum 1005, which stands
//	changes a        it has to tell the others something
//	recalled 1005 step=3 a b c [from=a] [highest=2000] [committed=1004] [stands]   a shows quorum 1005; without from, the disk or the log does
//	restored 1005 run=RUN step=7   likewise, the disk of a lighthouse that has forgotten a training, but for ids up to 1005 and its end
//	copies step=9 quorum=1001 on=h1,h2 from=h1   the newest copy, hosts that hold it, and hosts that report
//	withdrawn 1      the request is withdrawn
//	beat a b [phase=evaluation for=3s]   heartbeats
//	disconnected a           its last stream broke
//	incomplete a     a rank of it has failed
//	suspects a [b]   a collective of the latest quorum failed in a, which suspects b, or no member in particular
//	reached a        a check has reached it
//	unreached a      a check has not reached it
//	reports a computes|waits [for=3s] [rank=1] [phase=training]   its answer to AskProgress
//	shutdown a [finished [run=RUN step=7]]   its manager server ends
//	drain a          an operator requests that it leaves
//	leaving a        it leaves
//	slept 3s         the lighthouse was stopped for this time
//	woken            the time of the latest Wake
//	tick             the timer
//	wait 100ms       time passes
//	describe         prints the status
func TestTranscripts(t *testing.T) {
	transcript.Test(t, func(t *testing.T) func([]string) []string { return (&scribe{t: t}).run })
}

// scribe runs the commands of one transcript.
type scribe struct {
	t       *testing.T
	machine *Machine
	now     time.Time
	waiters WaiterID
	asked   map[WaiterID]string // replica ids
	waited  cause               // the last that was shown since the latest quorum
}

func (r *scribe) begin(args []string) *Machine {
	return NewMachine(Policy{
		MinReplicas:       int(transcript.Number(r.t, transcript.Option(args, "min"))),
		MaxReplicas:       int(transcript.Number(r.t, transcript.Option(args, "max"))),
		JoinTimeout:       transcript.Duration(r.t, transcript.Option(args, "join")),
		HeartbeatTimeout:  transcript.Duration(r.t, transcript.Option(args, "heartbeat")),
		SuspectGrace:      transcript.Duration(r.t, cmp.Or(transcript.Option(args, "grace"), "0s")),
		StalledAfter:      transcript.Duration(r.t, cmp.Or(transcript.Option(args, "stalled"), "0s")),
		EjectStalledAfter: r.eject(cmp.Or(transcript.Option(args, "eject"), "0s")),
		ForbidRegression:  slices.Contains(args, "forbid"),
	}, r.now, transcript.Number(r.t, transcript.Option(args, "term")))
}

func (r *scribe) eject(after string) time.Duration {
	if after == "auto" {
		return EjectAuto
	}
	return transcript.Duration(r.t, after)
}

func (r *scribe) run(words []string) []string {
	args := words[1:]
	switch words[0] {
	case "policy":
		r.now, r.waiters, r.waited = time.UnixMilli(1000).UTC(), 0, noRequest
		r.asked = map[WaiterID]string{}
		r.machine = r.begin(args)
		return nil
	case "ask":
		waiter := r.waiters + 1
		if w := transcript.Option(args, "waiter"); w != "" {
			waiter = WaiterID(transcript.Number(r.t, w))
		}
		r.waiters = max(r.waiters, waiter)
		r.asked[waiter] = args[0]
		return r.step(Asked{
			Waiter:        waiter,
			KnownQuorumID: transcript.Number(r.t, transcript.Option(args, "known")),
			Number:        uint64(transcript.Number(r.t, transcript.Option(args, "number"))),
			Recallable:    slices.Contains(args, "recallable"),
			Run:           transcript.Option(args, "run"),
			Member: Member{
				CommittedQuorumID: transcript.Number(r.t, transcript.Option(args, "committed")),
				ReplicaID:         args[0],
				Address:           cmp.Or(transcript.Option(args, "at"), "http://"+args[0]),
				Step:              transcript.Number(r.t, transcript.Option(args, "step")),
				WorldSize:         uint64(transcript.Number(r.t, transcript.Option(args, "world"))),
				Layouts: strings.FieldsFunc(transcript.Option(args, "layout"),
					func(c rune) bool { return c == ',' }),
				CommitFailures: transcript.Number(r.t, transcript.Option(args, "failures")),
				ShrinkOnly:     slices.Contains(args, "shrink"),
				AsksEachStep:   slices.Contains(args, "each"),
			},
		})
	case "greet":
		return r.step(Greeted{
			ReplicaID: args[0],
			Term:      transcript.Number(r.t, transcript.Option(args, "term")),
			Known: Claim{transcript.Number(r.t, transcript.Option(args, "known")),
				transcript.Number(r.t, transcript.Option(args, "step"))},
			StandsIn: transcript.Number(r.t, transcript.Option(args, "stands")),
			Step:     transcript.Number(r.t, transcript.Option(args, "at")),
		})
	case "stopped":
		return r.step(Stopped{ReplicaID: args[0], QuorumID: transcript.Number(r.t, args[1]),
			Step: transcript.Number(r.t, transcript.Option(args, "step"))})
	case "parts":
		return r.step(Parting{ReplicaID: args[0], QuorumID: transcript.Number(r.t, args[1]), Step: 4,
			Reason: "it has not committed step 4"})
	case "limit":
		return r.step(Limited{MaxReplicas: int(transcript.Number(r.t, args[0]))})
	case "changes":
		return r.step(Changes{ReplicaID: args[0], Reason: "another setting"})
	case "recalled":
		q := &Quorum{ID: transcript.Number(r.t, args[0]), Created: r.now}
		for _, id := range args[2:] {
			if id == "stands" {
				q.Stands = true
			} else if !strings.Contains(id, "=") {
				q.Members = append(q.Members, Member{
					ReplicaID: id, Address: "http://" + id,
					Step:              transcript.Number(r.t, transcript.Option(args, "step")),
					CommittedQuorumID: transcript.Number(r.t, transcript.Option(args, "committed")),
				})
			}
		}
		require.NoError(r.t, q.Past().Validate())
		e := Recalled{From: transcript.Option(args, "from")}
		if e.Highest = transcript.Number(r.t, transcript.Option(args, "highest")); e.From != "" {
			e.Quorum = q
		} else {
			e.Past = q.Past()
		}
		return r.step(e)
	case "restored":
		return r.step(Recalled{Kept: Kept{Highest: transcript.Number(r.t, args[0]), End: End{
			transcript.Option(args, "run"), transcript.Number(r.t, transcript.Option(args, "step"))}}})
	case "copies":
		hosts := func(option string) []string {
			return strings.FieldsFunc(transcript.Option(args, option), func(r rune) bool { return r == ',' })
		}
		return r.step(Copied{Copies{transcript.Number(r.t, transcript.Option(args, "step")),
			transcript.Number(r.t, transcript.Option(args, "quorum")), hosts("on")}, hosts("from")})
	case "withdrawn":
		w := WaiterID(transcript.Number(r.t, args[0]))
		return r.step(Withdrawn{ReplicaID: r.asked[w], Waiter: w})
	case "beat", "call":
		var answers []string
		step := transcript.Number(r.t, transcript.Option(args, "step"))
		for _, id := range args {
			if !strings.Contains(id, "=") {
				answers = append(answers, r.step(Beat{ReplicaID: id, Call: words[0] == "call",
					Step: step, Phase: r.phase(args),
					For: transcript.Duration(r.t, cmp.Or(transcript.Option(args, "for"), "0s"))})...)
			}
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
		return r.step(Checked{ReplicaID: args[0], QuorumID: r.machine.past.latest.ID,
			Reached: words[0] == "reached", Reason: "connection refused"})
	case "reports":
		return r.step(Progressed{ReplicaID: args[0], Progress: Progress{
			Step: 1, Rank: transcript.Number(r.t, transcript.Option(args, "rank")), What: args[1],
			Waits: args[1] == "waits", Phase: r.phase(args),
			For: transcript.Duration(r.t, cmp.Or(transcript.Option(args, "for"), "1h")),
		}})
	case "drain":
		return r.step(Drained{ReplicaID: args[0], Reason: "an operator"})
	case "leaving":
		return r.step(Leaving{ReplicaID: args[0],
			Step: transcript.Number(r.t, transcript.Option(args, "step"))})
	case "shutdown":
		return r.step(ShuttingDown{ReplicaID: args[0], Finished: slices.Contains(args, "finished"),
			End: End{transcript.Option(args, "run"), transcript.Number(r.t, transcript.Option(args, "step"))}})
	case "slept":
		r.now = r.now.Add(transcript.Duration(r.t, args[0]))
		return r.step(Slept{For: transcript.Duration(r.t, args[0])})
	case "woken":
		return r.step(Woken{})
	case "tick":
		return append(r.step(Tick{}), r.waits()...)
	case "wait":
		r.now = r.now.Add(transcript.Duration(r.t, args[0]))
		return nil
	case "describe":
		return describe(r.machine.Describe(r.now))
	}
	require.Fail(r.t, "no such command", words)
	return nil
}

func (r *scribe) step(e Event) []string {
	var answers []string
	for _, action := range r.machine.Step(e, r.now) {
		switch a := action.(type) {
		case Deliver:
			r.waited = noRequest
			members := ""
			for _, m := range a.Quorum.Members {
				members += fmt.Sprintf(" %s(step %d)", m.ReplicaID, m.Step)
			}
			id := fmt.Sprint(a.Quorum.ID)
			if term := TermOf(a.Quorum.ID); term > 0 {
				id = fmt.Sprintf("%d (term %d)", a.Quorum.ID&(1<<termBits-1), term)
			}
			stands := ""
			if a.Quorum.Stands {
				stands = ", stands"
			}
			answers = append(answers, fmt.Sprintf("quorum %s:%s, to waiters %v%s", id, members, a.Waiters,
				stands))
		case Call:
			answers = append(answers, fmt.Sprintf("the quorum after %d is called: ask %v where they stop",
				a.QuorumID, a.ReplicaIDs))
		case Round:
			answers = append(answers, fmt.Sprintf("the quorum after %d is that of step %d: tell %v",
				a.QuorumID, a.Step, a.ReplicaIDs))
		case Over:
			answers = append(answers, fmt.Sprintf("tell %s that quorum %d is over: %s", a.ReplicaID,
				a.QuorumID, a.Reason))
		case Advanced:
			answers = append(answers, fmt.Sprintf("quorum %d, of %d members, has come to step %d", a.QuorumID,
				a.Members, a.Step))
		case Changed:
			answers = append(answers, fmt.Sprintf("changed to %d: joined %v, left %v: %s", a.Quorum.ID,
				a.Joined, a.Left, a.Reason))
		case Redeliver:
			answers = append(answers, fmt.Sprintf("quorum %d redelivered, to waiter %d", a.Quorum.ID,
				a.Waiter))
		case Refuse:
			answers = append(answers, fmt.Sprintf("waiter %d is refused: %s", a.Waiter, a.Reason))
		case RefuseStream:
			answers = append(answers, fmt.Sprintf("the stream of %s is refused: %s", a.ReplicaID, a.Reason))
		case Recall:
			answers = append(answers, fmt.Sprintf("ask %s for quorum %d", a.ReplicaID, a.QuorumID))
		case Report:
			switch a.What {
			case QuorumAwaited:
				answers = append(answers, "no quorum yet: "+a.Reason)
			case ClaimDoubted:
				answers = append(answers, fmt.Sprintf("%s is not believed: %s", a.ReplicaID, a.Reason))
			case MemberRefused:
				answers = append(answers, "member "+a.ReplicaID+" does not fit")
			case CopyAwaited, MemberStraggles, JobStops, UnitSkipped:
				answers = append(answers, "WARNING: "+a.Reason)
			case JobRegressed:
				answers = append(answers, fmt.Sprintf("WARNING, quorum %d regresses: %s", a.QuorumID, a.Reason))
			}
		case Failed:
			if a.Cause == Parts {
				answers = append(answers, fmt.Sprintf("%s parts with quorum %d in step %d: %s", a.ReplicaID,
					a.QuorumID, a.Step, a.Reason))
				break
			}
			if a.Cause == ShutDown {
				answers = append(answers, fmt.Sprintf("%s of quorum %d ended: %s", a.ReplicaID, a.QuorumID,
					a.Reason))
				break
			}
			answers = append(answers, fmt.Sprintf("%s of quorum %d failed: %s", a.ReplicaID, a.QuorumID,
				a.Reason))
		case Stalled:
			answers = append(answers, fmt.Sprintf("%s of quorum %d is stalled: %s", a.ReplicaID, a.QuorumID,
				a.Reason))
		case Check:
			answers = append(answers, fmt.Sprintf("check on %s of quorum %d", a.ReplicaID, a.QuorumID))
		case AskProgress:
			answers = append(answers, fmt.Sprintf("ask for the progress of %v", a.ReplicaIDs))
		case Drain:
			answers = append(answers, fmt.Sprintf("ask %s to leave: %s", a.ReplicaID, a.Reason))
		case Keep:
			if a.End.Run != "" {
				answers = append(answers, fmt.Sprintf("the end of run %s at step %d is kept", a.End.Run,
					a.End.Step))
			}
			if a.Past.ID == 0 {
				answers = append(answers, fmt.Sprintf("the past is forgotten, except that quorum ids up to "+
					"%d are used", a.Highest))
			}
			if a.Copies.Step > 0 {
				answers = append(answers, fmt.Sprintf("kept: copies of step %d, on %v", a.Copies.Step,
					a.Copies.Hosts))
			}
		case Release:
			answers = append(answers, a.ReplicaID+" is released")
		case Wake:
			answers = append(answers, fmt.Sprintf("wake in %s", a.At.Sub(r.now)))
		}
	}
	return answers
}

// waits returns why there is no quorum, once for each reason.
func (r *scribe) waits() []string {
	m := r.machine
	d := m.decide(m.roster.tally(m.now), m.now)
	if d.cause == noRequest || d.ready() || d.cause == r.waited {
		return nil
	}
	r.waited = d.cause
	return []string{"waiting: " + m.roster.explain(d)}
}

func (r *scribe) phase(args []string) Phase {
	name := transcript.Option(args, "phase")
	require.Contains(r.t, phaseNames, name)
	return Phase(slices.Index(phaseNames[:], name))
}

func describe(s Status) []string {
	lines := []string{
		fmt.Sprintf("quorum %d %v, %d healthy, %d candidates, %d waiters", s.QuorumID, s.Quorum, s.Healthy,
			s.Candidates, s.Waiters),
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
		if m.Phase != "" {
			line += fmt.Sprintf(", %s for %d ms", m.Phase, m.PhaseMS)
		}
		if m.Draining != "" {
			line += ", draining"
		}
		if m.Standby {
			line += ", standby"
		} else if m.Waiting {
			line += fmt.Sprintf(", waits for %d ms", m.WaitingMS)
		}
		lines = append(lines, line)
	}
	return lines
}
