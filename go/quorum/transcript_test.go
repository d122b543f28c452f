package quorum

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write what the machine does into the transcripts")

// A transcript is commands, each followed by what the machine did, indented. Lines that begin with # are for
// the reader. After a change of behaviour: go test ./quorum -update, and read the difference.
//
//	policy min=2 join=1s heartbeat=5s [grace=200ms] [stalled=2s] [eject=3s] [forbid]   a new machine, at time 0; its first quorum is 1001
//	ask a [waiter=1] [step=3] [shrink] [failures=1] [known=1005] [number=3] [at=ADDRESS] [tells]
//	greet a seat=1/3 [term=1]   a stream begins, of a member for which this is the first of three lighthouses
//	recalled 1005 step=3 a b c [base=a,b]
//	ended a          its process is gone
//	gave-up 1        the waiter is gone
//	beat a b         heartbeats
//	lost a           its last stream broke
//	incomplete a     a rank of it is gone
//	suspects a [b]   a collective of the latest quorum failed in a; it names b, or nobody
//	reached a        a check found it
//	unreached a      a check did not
//	says a computes|waits [for=3s] [rank=1]
//	slept 3s         the lighthouse stood still
//	woken            what a wake asked for
//	tick             the timer
//	wait 100ms       time passes
//	describe
func TestTranscripts(t *testing.T) {
	paths, err := filepath.Glob("testdata/*.txt")
	require.NoError(t, err)
	require.NotEmpty(t, paths)
	for _, path := range paths {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(path)
			require.NoError(t, err)
			got := (&transcript{t: t}).play(string(want))
			if *update {
				require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
				return
			}
			require.Equal(t, string(want), got)
		})
	}
}

type transcript struct {
	t       *testing.T
	machine *Machine
	now     time.Time
	waiters WaiterID
}

// play returns the text with the answers that the machine gives now.
func (r *transcript) play(text string) string {
	var out strings.Builder
	for line := range strings.Lines(text) {
		switch command := strings.TrimRight(line, "\n"); {
		case strings.HasPrefix(line, " "): // an answer of before
		case command == "" || strings.HasPrefix(command, "#"):
			out.WriteString(line)
		default:
			out.WriteString(line)
			for _, answer := range r.run(strings.Fields(command)) {
				fmt.Fprintf(&out, "  %s\n", answer)
			}
		}
	}
	return out.String()
}

func (r *transcript) run(words []string) []string {
	args := words[1:]
	switch words[0] {
	case "policy":
		r.now, r.waiters = time.UnixMilli(1000).UTC(), 0
		r.machine = NewMachine(Policy{
			MinReplicas:       int(number(r.t, option(args, "min"))),
			JoinTimeout:       duration(r.t, option(args, "join")),
			HeartbeatTimeout:  duration(r.t, option(args, "heartbeat")),
			SuspectGrace:      duration(r.t, cmp.Or(option(args, "grace"), "0s")),
			StalledAfter:      duration(r.t, cmp.Or(option(args, "stalled"), "0s")),
			EjectStalledAfter: duration(r.t, cmp.Or(option(args, "eject"), "0s")),
			ForbidRegression:  slices.Contains(args, "forbid"),
		}, r.now)
		return nil
	case "ask":
		waiter := r.waiters + 1
		if w := option(args, "waiter"); w != "" {
			waiter = WaiterID(number(r.t, w))
		}
		r.waiters = max(r.waiters, waiter)
		return r.step(Asked{
			Waiter:        waiter,
			KnownQuorumID: number(r.t, option(args, "known")),
			Number:        uint64(number(r.t, option(args, "number"))),
			Tells:         slices.Contains(args, "tells"),
			Member: Member{
				ReplicaID:      args[0],
				Address:        cmp.Or(option(args, "at"), "http://"+args[0]),
				Step:           number(r.t, option(args, "step")),
				CommitFailures: number(r.t, option(args, "failures")),
				ShrinkOnly:     slices.Contains(args, "shrink"),
			},
		})
	case "greet":
		g := Greeted{ReplicaID: args[0], Term: number(r.t, option(args, "term"))}
		_, err := fmt.Sscanf(option(args, "seat"), "%d/%d", &g.Seat.Place, &g.Seat.Of)
		require.NoError(r.t, err)
		g.Seat.Place--
		return r.step(g)
	case "recalled":
		p := Past{ID: number(r.t, args[0]), Step: number(r.t, option(args, "step"))}
		for _, id := range args[2:] {
			if !strings.Contains(id, "=") {
				p.Members = append(p.Members, Voter{id, "http://" + id})
			}
		}
		if base := option(args, "base"); base != "" {
			for _, id := range strings.Split(base, ",") {
				p.Base = append(p.Base, Voter{id, "http://" + id})
			}
		}
		require.NoError(r.t, p.Validate())
		return r.step(Recalled{Past: p})
	case "ended":
		return r.step(Ended{ReplicaID: args[0]})
	case "gave-up":
		return r.step(GaveUp{Waiter: WaiterID(number(r.t, args[0]))})
	case "beat":
		var answers []string
		for _, id := range args {
			answers = append(answers, r.step(Beat{ReplicaID: id})...)
		}
		return answers
	case "lost":
		return r.step(Lost{ReplicaID: args[0]})
	case "incomplete":
		return r.step(Incomplete{ReplicaID: args[0], Reason: "rank 1 is gone"})
	case "suspects":
		suspect := ""
		if len(args) > 1 {
			suspect = args[1]
		}
		return r.step(Suspected{Reporter: args[0], Suspect: suspect, QuorumID: r.machine.latest.ID})
	case "reached", "unreached":
		return r.step(Checked{ReplicaID: args[0], QuorumID: r.machine.latest.ID, Reached: words[0] == "reached", Reason: "connection refused"})
	case "says":
		return r.step(Progressed{ReplicaID: args[0], Progress: Progress{
			Step: 1, Rank: number(r.t, option(args, "rank")), Phase: args[1], Waits: args[1] == "waits",
			For: duration(r.t, cmp.Or(option(args, "for"), "1h")),
		}})
	case "slept":
		r.now = r.now.Add(duration(r.t, args[0]))
		return r.step(Slept{For: duration(r.t, args[0])})
	case "woken":
		return r.step(Woken{})
	case "tick":
		return r.step(Tick{})
	case "wait":
		r.now = r.now.Add(duration(r.t, args[0]))
		return nil
	case "describe":
		return describe(r.machine.Describe(r.now))
	}
	require.Fail(r.t, "no such command", words)
	return nil
}

func (r *transcript) step(e Event) []string {
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
			for _, v := range a.Quorum.Base {
				base += " " + v.ReplicaID
			}
			if base != "" {
				base = ", to be outvoted too:" + base
			}
			answers = append(answers, fmt.Sprintf("quorum %s:%s, to waiters %v%s", id, members, a.Waiters, base))
		case Changed:
			answers = append(answers, fmt.Sprintf("changed to %d: joined %v, left %v: %s", a.Quorum.ID, a.Joined, a.Left, a.Reason))
		case Refuse:
			answers = append(answers, fmt.Sprintf("waiter %d is refused: %s", a.Waiter, a.Reason))
		case TurnAway:
			answers = append(answers, fmt.Sprintf("%s is turned away: %s", a.ReplicaID, a.Reason))
		case Renew:
			answers = append(answers, "all begin again: "+a.Reason)
		case Recall:
			answers = append(answers, fmt.Sprintf("ask %s (waiter %d) for quorum %d", a.ReplicaID, a.Waiter, a.QuorumID))
		case Probe:
			answers = append(answers, fmt.Sprintf("probe %s at %s", a.ReplicaID, a.Address))
		case Regressed:
			answers = append(answers, fmt.Sprintf("WARNING, quorum %d goes back: %s", a.Quorum.ID, a.Reason))
		case Failed:
			answers = append(answers, fmt.Sprintf("%s of quorum %d failed: %s", a.ReplicaID, a.QuorumID, a.Reason))
		case Stalled:
			answers = append(answers, fmt.Sprintf("%s of quorum %d is stalled: %s", a.ReplicaID, a.QuorumID, a.Reason))
		case Check:
			answers = append(answers, fmt.Sprintf("check on %s of quorum %d", a.ReplicaID, a.QuorumID))
		case AskProgress:
			answers = append(answers, fmt.Sprintf("what do they do? %v", a.ReplicaIDs))
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
			line += ", dead"
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
		if m.Waiting {
			line += fmt.Sprintf(", waits for %d ms", m.WaitingMS)
		}
		lines = append(lines, line)
	}
	return lines
}

func option(args []string, name string) string {
	for _, a := range args {
		if value, ok := strings.CutPrefix(a, name+"="); ok {
			return value
		}
	}
	return ""
}

func number(t *testing.T, s string) int64 {
	if s == "" {
		return 0
	}
	n, err := strconv.ParseInt(s, 10, 64)
	require.NoError(t, err)
	return n
}

func duration(t *testing.T, s string) time.Duration {
	d, err := time.ParseDuration(s)
	require.NoError(t, err)
	return d
}
