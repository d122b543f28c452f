package round

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/transcript"
	"github.com/torchft/torchft/go/quorum"
)

// The commands of a transcript:
//
//	group ranks=2            a new machine, of replica group g
//	ask 0 [waiter=1] [step=3] [metadata=m] [handle=h] [layout=l] [shrink] [init] [failures=1] [committed=7] [world=2] [within=5s]
//	quorum 1 id=7 g:3 x:5:6  the lighthouse answers round 1: groups, their steps, and the quorums of their last commits
//	quorum 1 stands id=7 …   likewise, and the quorum stands
//	called 7                 the lighthouse calls the quorum after 7
//	round 7 step=9           it names the first step that needs another one
//	reached                  the group has another stream with a lighthouse
//	failed 1 unavailable     round 1 fails
//	vote 0 yes [waiter=1] [step=3]
//	metadata 0               a peer asks where rank 0 serves its checkpoint
//	timeout 1, cancel 1      waiter 1 is withdrawn
//	disconnected 1           the last connection of rank 1 broke
//	still-disconnected 1     rank 1 has not reconnected in time
//	back 1                   rank 1 has reconnected
//	drained                  the lighthouse asks the group to leave
//	evicted 7 [member=x]     the group, or another member, counts as failed in quorum 7
//	asked                    the lighthouse asks for the progress of the group
//	reports 0 computes|waits [phase=evaluation] rank 0 reports its progress
//	begins 0 [phase=evaluation]   its script begins a phase, or ends the one before
//	progress                 prints the progress that the group would report
//	wait 3s
//	close
//	describe
func TestTranscripts(t *testing.T) {
	transcript.Test(t, func(t *testing.T) func([]string) []string { return (&scribe{t: t}).run })
}

// scribe runs the commands of one transcript.
type scribe struct {
	t       *testing.T
	machine *Machine
	waiters WaiterID
	now     time.Time
}

func phaseNamed(name string) quorum.Phase {
	for _, p := range quorum.Phases() {
		if p.String() == name {
			return p
		}
	}
	return quorum.Unsaid
}

func (r *scribe) run(words []string) []string {
	args := words[1:]
	switch words[0] {
	case "group":
		r.waiters, r.now = 0, epoch
		r.machine = NewMachine(Group{ReplicaID: "g", Address: "http://g", StoreAddress: "store g",
			WorldSize: r.number(transcript.Option(args, "ranks"))})
		return nil
	case "ask":
		return r.step(QuorumAsked{
			Waiter:   r.waiter(args),
			Deadline: epoch.Add(r.duration(transcript.Option(args, "within"))),
			Request: Request{
				GroupRank:          r.number(args[0]),
				Step:               r.number(transcript.Option(args, "step")),
				CheckpointMetadata: transcript.Option(args, "metadata"),
				ShrinkOnly:         slices.Contains(args, "shrink"),
				InitSync:           slices.Contains(args, "init"),
				CommitFailures:     r.number(transcript.Option(args, "failures")),
				CommittedQuorumID:  r.number(transcript.Option(args, "committed")),
				ReconfigureHandle:  transcript.Option(args, "handle"),
				GroupWorldSize:     r.number(transcript.Option(args, "world")),
				Layout:             transcript.Option(args, "layout"),
				ReplaysFailedSteps: slices.Contains(args, "replays"),
				Drain:              slices.Contains(args, "drain"),
			},
		})
	case "quorum":
		q := &quorum.Quorum{ID: r.number(transcript.Option(args, "id"))}
		for _, a := range args[1:] {
			if a == "stands" {
				q.Stands = true
			}
			if !strings.Contains(a, ":") {
				continue
			}
			id, at, _ := strings.Cut(a, ":")
			step, committed, _ := strings.Cut(at, ":")
			q.Members = append(q.Members, quorum.Member{
				ReplicaID: id, Step: r.number(step), Address: "http://" + id, StoreAddress: "store " + id,
				CommittedQuorumID: r.number(committed),
			})
		}
		return r.step(QuorumKnown{Round: uint64(r.number(args[0])), Quorum: q})
	case "called":
		return r.step(Called{QuorumID: r.number(args[0])})
	case "reached":
		return r.step(Reached{})
	case "round":
		return r.step(RoundKnown{QuorumID: r.number(args[0]),
			Step: r.number(transcript.Option(args, "step"))})
	case "failed":
		kinds := map[string]Kind{"timeout": KindTimeout, "unavailable": KindUnavailable,
			"internal": KindInternal}
		return r.step(QuorumKnown{Round: uint64(r.number(args[0])),
			Failure: &Failure{kinds[args[1]], "the lighthouse reported it"}})
	case "vote":
		return r.step(Voted{
			Waiter: r.waiter(args), GroupRank: r.number(args[0]),
			Step: r.number(transcript.Option(args, "step")), ShouldCommit: args[1] == "yes",
		})
	case "metadata":
		return r.step(MetadataAsked{Waiter: r.waiter(args), GroupRank: r.number(args[0])})
	case "timeout", "cancel":
		return r.step(Withdrawn{Waiter: WaiterID(r.number(args[0])), Timeout: words[0] == "timeout"})
	case "disconnected":
		return r.step(RankDisconnected{GroupRank: r.number(args[0])})
	case "still-disconnected":
		return r.step(StillDisconnected{GroupRank: r.number(args[0])})
	case "back":
		return r.step(RankBack{GroupRank: r.number(args[0])})
	case "evicted":
		return r.step(MemberFailed{QuorumID: r.number(args[0]),
			ReplicaID: cmp.Or(transcript.Option(args, "member"), "g"), Reason: "no progress"})
	case "drained":
		return r.step(Drained{})
	case "signaled":
		return r.step(DrainAsked{})
	case "asked":
		return r.step(ProgressAsked{})
	case "reports":
		return r.step(RankProgressed{GroupRank: r.number(args[0]), What: args[1], Waits: args[1] == "waits",
			Phase: phaseNamed(transcript.Option(args, "phase"))})
	case "begins":
		return r.step(RankProgressed{GroupRank: r.number(args[0]), Begins: true,
			Phase: phaseNamed(transcript.Option(args, "phase"))})
	case "worked":
		e := RankWorked{GroupRank: r.number(args[0]), Host: "idle"}
		for _, took := range args[1:] {
			e.Took = append(e.Took, r.duration(took))
		}
		return r.step(e)
	case "pace":
		return []string{fmt.Sprintf("%+v", r.machine.Pace())}
	case "progress":
		p, complete := r.machine.Progress(r.now)
		return []string{fmt.Sprintf("%+v, complete: %t", p, complete)}
	case "wait":
		r.now = r.now.Add(r.duration(args[0]))
		return nil
	case "close":
		return r.step(Closed{Reason: "the manager server shuts down"})
	case "describe":
		return []string{fmt.Sprintf("%+v", r.machine.Describe())}
	}
	require.Fail(r.t, "no such command", words)
	return nil
}

func (r *scribe) step(e Event) []string {
	var answers []string
	for _, action := range r.machine.Step(e, r.now) {
		answers = append(answers, describeAction(action))
	}
	return answers
}

func describeAction(action Action) string {
	switch a := action.(type) {
	case AskLighthouse:
		m := a.Member
		line := fmt.Sprintf("ask the lighthouse, round %d within %s: %s at step %d, %d ranks", a.Round,
			a.Deadline.Sub(epoch), m.ReplicaID, m.Step, m.WorldSize)
		if m.ShrinkOnly {
			line += ", shrink_only"
		}
		if m.ReplaysFailedSteps {
			line += ", replays"
		}
		if len(m.Layouts) > 0 {
			line += fmt.Sprintf(", layouts %s", m.Layouts)
		}
		if m.CommitFailures != 0 {
			line += fmt.Sprintf(", %d commit failures", m.CommitFailures)
		}
		if m.CommittedQuorumID != 0 {
			line += fmt.Sprintf(", committed in %d", m.CommittedQuorumID)
		}
		if m.Handles != nil {
			line += fmt.Sprintf(", handles %v", m.Handles)
		}
		if a.KnownQuorumID != 0 {
			line += fmt.Sprintf(", knows quorum %d", a.KnownQuorumID)
		}
		return line
	case CancelLighthouse:
		return fmt.Sprintf("cancel round %d", a.Round)
	case AnswerQuorum:
		line := fmt.Sprintf("waiter %d: quorum %d, replica rank %d of %d", a.Waiter, a.Result.QuorumID,
			a.Result.ReplicaRank, a.Result.ReplicaWorldSize)
		if a.Result.Heal {
			line += ", heals from " + a.Result.RecoverSrcManagerAddress
		}
		if len(a.Result.RecoverDstReplicaRanks) > 0 {
			line += fmt.Sprintf(", serves %v", a.Result.RecoverDstReplicaRanks)
		}
		if a.Result.Draining {
			line += ", draining"
		}
		return line
	case Stop:
		return fmt.Sprintf("stops at step %d of quorum %d", a.Step, a.QuorumID)
	case Part:
		return fmt.Sprintf("parts with quorum %d: %s", a.QuorumID, a.Reason)
	case NeedQuorum:
		return "the next quorum is needed: " + a.Reason
	case RequestDrain:
		return "report to the lighthouse: drain"
	case AnswerVote:
		if a.Stands {
			return fmt.Sprintf("waiter %d: commit, and train on", a.Waiter)
		}
		return fmt.Sprintf("waiter %d: commit %t", a.Waiter, a.ShouldCommit)
	case AnswerMetadata:
		return fmt.Sprintf("waiter %d: metadata %q", a.Waiter, a.Metadata)
	case ReportIncomplete:
		return "report to the lighthouse: " + a.Reason
	case Fail:
		return fmt.Sprintf("waiter %d fails (%s): %s", a.Waiter, a.Failure.Kind, a.Failure.Reason)
	}
	return fmt.Sprintf("unknown action %T", action)
}

// waiter returns the waiter that the command names, or the next one.
func (r *scribe) waiter(args []string) WaiterID {
	w := r.waiters + 1
	if s := transcript.Option(args, "waiter"); s != "" {
		w = WaiterID(r.number(s))
	}
	r.waiters = max(r.waiters, w)
	return w
}

func (r *scribe) number(s string) int64 { return transcript.Number(r.t, s) }

func (r *scribe) duration(s string) time.Duration { return transcript.Duration(r.t, cmp.Or(s, "1m")) }
