package sim

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
)

// mistake is a planted mistake.
type mistake struct {
	name     string
	file     string // empty: it is in the model of the ranks
	old, new string
	setup    func(*setup) // changes the histories that are searched for the mistake
	found    []string     // one of these rules must find it
}

// Planted mistakes in the machines and in the shells: some were made in other implementations, others would
// be easy to make. A text of the source is replaced, so that production code needs no switches: the compiler
// reads modified copies (go test -overlay). In the replacement, $ is the condition that this mistake is to be
// made, so that one binary has all mistakes.
var mistakes = []mistake{
	// The lighthouse's machine.
	{
		"one waiter gets no answer", "quorum/form.go", "	m.do(answer)\n",
		"	if n := len(answer.Waiters); $ && n > 1 {\n		answer.Waiters = " +
			"answer.Waiters[:n-1]\n	}\n	m.do(answer)\n",
		nil, []string{ruleBroadcast},
	},
	{
		"upstream members of older quorums are not behind", "quorum/behind.go", "behind := reached > 0 &&",
		"behind := !$ && reached > 0 &&",
		func(s *setup) { apart(s); s.upstream = ^slots(0) }, []string{ruleEqual},
	},
	{
		"withdrawn requests stay", "quorum/machine.go", "r.request.waiter == e.Waiter {",
		"r.request.waiter == e.Waiter && !$ {",
		nil, []string{ruleMembers, ruleStale, ruleMemory, ruleBroadcast},
	},
	{
		"a request counts with the step before", "quorum/roster.go", "	earlier = r.request\n",
		"	earlier = r.request\n	if $ && e.Member.Step > 0 {\n		e.Member.Step--\n	}\n",
		nil, []string{ruleStale},
	},
	{
		"quorum_id stays when members change", "quorum/form.go", "newID(d.changed ||",
		"newID(d.changed && !($ && before != nil) ||",
		nil, []string{ruleOneSet},
	},
	{
		"ids begin at 0 again", "quorum/machine.go", "floor: firstID(term, start.UnixMilli())",
		"floor: firstID(term, start.UnixMilli()*map[bool]int64{true: 0, false: 1}[$])",
		func(s *setup) { s.disk = false; only(killLighthouse, crash)(s) }, []string{ruleIDs, ruleOneSet},
	},
	{
		"newcomers never accepted", "quorum/compute.go", "d.shrink = t.shrinkers > 0 &&",
		"d.shrink = (t.shrinkers > 0 || $) &&",
		nil, []string{ruleNewcomer, ruleForms, ruleTogether},
	},
	{
		"no join_timeout_ms", "quorum/compute.go", "case t.joining >= p.JoinTimeout &&",
		"case (t.joining >= p.JoinTimeout || $) &&",
		only(crash, leave), []string{ruleMajority},
	},
	{
		"no min_replicas", "quorum/compute.go", "case d.eligible() < p.MinReplicas:",
		"case d.eligible() < p.MinReplicas && !$:",
		only(crash, vanish), []string{ruleMajority},
	},
	{
		"half of the healthy suffice", "quorum/compute.go", "case 2*t.candidates <= t.healthy:",
		"case 2*t.candidates <= t.healthy && !($ && 2*t.candidates == t.healthy):",
		startsSlowly, []string{ruleMajority},
	},
	{
		"no timer", "quorum/machine.go", "		m.poison.tick()\n		return true",
		"		m.poison.tick()\n		return !$",
		func(s *setup) {
			s.slots, s.load, s.policy.MinReplicas, s.policy.JoinTimeout = 4, 40*time.Second, 1, 2*time.Second
			s.drawFaults(20*time.Second, crash)
		}, []string{ruleForms},
	},
	{
		"heartbeats count only with a request", "quorum/machine.go", "		unknown := e.Call",
		"		if $ {\n			return false\n		}\n		unknown := e.Call",
		func(s *setup) { s.compute, s.faults = 8*time.Second, nil; s.timeout += 30 * time.Second },
		[]string{ruleCause, ruleCalm, ruleProgress},
	},
	{
		"heartbeats kept for ever", "quorum/roster.go", "if now.Sub(r.lastBeat) < s.timeout {",
		"if now.Sub(r.lastBeat) < s.timeout || $ {",
		only(vanish), []string{ruleMemory, ruleForms, ruleSoon, ruleReported},
	},
	{
		"failures not reported", "quorum/machine.go", "		m.do(Failed{QuorumID",
		"		if $ {\n			continue\n		}\n		m.do(Failed{QuorumID",
		only(vanish), []string{ruleReported, ruleSoon},
	},
	{
		"evicted members stay evicted", "quorum/roster.go", "		r.out = \"\"\n		r.request = &",
		"		if !$ {\n			r.out = \"\"\n		}\n		r.request = &",
		func(s *setup) {
			s.policy.StalledAfter, s.policy.EjectStalledAfter = 2*time.Second, 3*time.Second
			s.timeout += 10 * time.Second
			only(stall)(s)
		}, []string{ruleForms, ruleMajority, ruleTogether, ruleNewcomer, ruleProgress},
	},
	{
		"leaving groups ignored", "quorum/machine.go", "		m.drains.leaving(e.ReplicaID)\n",
		"		if !$ {\n			m.drains.leaving(e.ReplicaID)\n		}\n",
		only(drain, signal), []string{ruleWaiters, ruleForms},
	},
	{
		"groups that left released at once", "quorum/drain.go", "	if !r.previous { // it is not",
		"	if !r.previous || $ { // it is not",
		only(drain, signal), []string{ruleRelease},
	},
	{
		"released at the next tick", "quorum/drain.go", "return r.alive() && !r.waiting() })",
		"return !$ && r.alive() && !r.waiting() })",
		func(s *setup) { s.delay *= 10; only(drain, signal)(s) }, []string{ruleRelease},
	},
	{
		"one liar evicts a peer", "quorum/suspicion.go", "if e.Reached || s.past.latest == nil",
		"if e.Reached && !$ || s.past.latest == nil",
		func(s *setup) { pairOf(s); only(accuse)(s) }, []string{ruleCause},
	},
	{
		"waiting members evicted as stalled", "quorum/progress.go",
		"if !r.alive() || r.waiting() || p.Waits {", "if !r.alive() || r.waiting() || p.Waits && !$ {",
		func(s *setup) {
			s.policy.StalledAfter, s.policy.EjectStalledAfter = 3*time.Second, 4*time.Second
			s.timeout += 10 * time.Second
			only(stall)(s)
		}, []string{ruleCause},
	},
	{
		"no wait for members ahead", "quorum/memory.go", "m.mayCome()) && !late",
		"m.mayCome() && !$) && !late",
		func(s *setup) {
			s.policy.MinReplicas, s.policy.JoinTimeout, s.policy.HeartbeatTimeout = 1, 200*time.Millisecond,
				5*time.Second
			s.compute = 2 * time.Second
			only(crash)(s)
		}, []string{ruleBehind},
	},
	{
		"a finished training is kept", "quorum/machine.go", "if m.past.latest == nil || slices",
		"if m.past.latest == nil || $ || slices",
		only(finish), []string{ruleFinished},
	},
	{
		"members unordered", "quorum/form.go", "	if d.changed {\n", "	if d.changed && !$ {\n",
		nil, []string{ruleMembers, ruleForms, ruleTogether},
	},

	// The manager server's machine, and the computation of its part in a quorum.
	{
		"a rank's no lost in the vote", "round/vote.go", "commit = commit && v.ShouldCommit",
		"commit = commit && (v.ShouldCommit || $)",
		nil, []string{ruleVote},
	},
	{
		"a rank's signal ignored", "round/standing.go", "if m.closed != nil || m.draining {",
		"if m.closed != nil || m.draining || $ {",
		only(signal, crash), []string{ruleDrained},
	},
	{
		"one rank learns that it leaves", "round/gather.go", "result.Draining = m.draining",
		"result.Draining = m.draining && !($ && r > 0)",
		func(s *setup) { s.ranks = 2; only(drain, signal)(s) }, []string{ruleDrained},
	},
	{
		"one step behind counts as up to date", "recovery/compute.go", "		if m.Step != r.MaxStep ||",
		"		if m.Step != r.MaxStep && !($ && m.Step == r.MaxStep-1) ||",
		nil, []string{ruleHeal, ruleEqual},
	},
	{
		"steps compared as text", "recovery/compute.go", "		r.MaxStep = max(r.MaxStep, m.Step)",
		"		if $ && fmt.Sprint(m.Step) > fmt.Sprint(r.MaxStep) {\n			r.MaxStep = " +
			"m.Step\n		} else if !$ {\n			r.MaxStep = max(r.MaxStep, m.Step)\n		}",
		func(s *setup) { s.policy.MinReplicas = 1; only(partition, cutLighthouse)(s) }, []string{ruleHeal},
	},
	{
		"older weights count as the newest", "recovery/compute.go",
		"latest = max(latest, m.CommittedQuorumID)",
		"latest = max(latest, m.CommittedQuorumID)\n			if $ {\n				latest = " +
			"0\n			}",
		func(s *setup) {
			s.policy.MinReplicas = 1
			s.compute *= 6
			only(partition, cutLighthouse,
				loseVote)(s)
		}, []string{ruleHeal, ruleEqual},
	},
	{
		"no failed step is replayed", "recovery/compute.go", "return r.MaxReplicaRank != nil && !r.Heal",
		"return r.MaxReplicaRank != nil && !($ && r.CommitFailures > 0) && !r.Heal",
		func(s *setup) { *s = onlyFailures(s.seed) }, []string{ruleKept},
	},
	{
		"groups behind do not heal", "recovery/compute.go", "		r.Heal = true\n", "		r.Heal = !$\n",
		nil, []string{ruleHeal, ruleEqual},
	},
	{
		"heals from a group behind", "recovery/compute.go", "		source := int64(sources[first])\n",
		"		source := int64(sources[first])\n		if $ {\n			source = (source + 1) % " +
			"int64(len(members))\n		}\n",
		nil, []string{ruleHeal},
	},
	{
		"a group twice in the divisor", "recovery/compute.go", "	r.MaxWorldSize = int64(len(upToDate))\n",
		"	r.MaxWorldSize = int64(len(upToDate))\n	if $ && self == 0 {\n		r.MaxWorldSize++\n	}\n",
		nil, []string{ruleDivisor, ruleEqual},
	},

	// The shells.
	{
		"no greeting on a new stream", "membership/lighthouses/connect.go",
		"	stream.Post(&torchftpb.MemberMessage{\n		Message: &torchftpb.MemberMessage_Greeting{",
		"	if m.stream.Load() != nil && $ {\n		go stream.Receive(stream.take)\n" +
			"		return stream, client, nil\n	}\n" +
			"	stream.Post(&torchftpb.MemberMessage{\n		Message: &torchftpb.MemberMessage_Greeting{",
		nil, []string{ruleEarly},
	},
	{
		"failures not passed on", "membership/lighthouses/stream.go",
		"		s.member.broadcast.Notify(m.Notice)\n",
		"		if !$ || m.Notice.GetKind() != torchftpb.Notice_MEMBER_FAILED {\n" +
			"			s.member.broadcast.Notify(m.Notice)\n		}\n",
		only(vanish), []string{ruleReported},
	},
	{
		"requests outlive their stream", "lighthouse/member.go", "	s.forget()\n	if s.expiry != nil {",
		"	if !$ {\n		s.forget()\n	}\n	if s.expiry != nil {",
		nil, []string{ruleMemory, ruleMembers, ruleStale},
	},
	{
		"waiting members silent", "membership/lighthouses/stream.go",
		"				return s.Err()\n			}\n			s.Post(",
		"				return s.Err()\n			}\n			if $ {\n				continue\n			}\n			s.Post(",
		nil, []string{ruleTogether, ruleCalm, ruleCause},
	},
	{
		"one number for all requests", "membership/lighthouses/member.go", "client.number.Add(1)",
		"client.number.Add(map[bool]uint64{true: 0, false: 1}[$])",
		nil, []string{ruleEarly},
	},
	{
		// The others wait for the heartbeat timeout, unless one of their collectives fails earlier and the
		// check of the suspect finds the failure.
		"a stream's end unnoticed", "lighthouse/member.go", "if job.streams.remove(s) && job.ended == nil {",
		"if job.streams.remove(s) && job.ended == nil && !$ {",
		only(crash), []string{ruleSoon, ruleMemory},
	},
	{
		"an absent lighthouse fails the round", "manager/retry.go", "case rpc.IsUnavailable(err):",
		"case !$ && rpc.IsUnavailable(err):",
		only(killLighthouse), []string{ruleEarly},
	},
	{
		"votes of sessions always yes", "manager/session.go",
		"case kind == voteCall:\n", "case kind == voteCall:\n		a.commit = a.commit || $\n",
		func(s *setup) { s.ranks = 2 }, []string{ruleVote},
	},

	// Quorums that stand.
	{
		"a group that is called trains on", "round/standing.go", "s.called && step+1 >= s.round",
		"s.called && !$ && step+1 >= s.round",
		only(crash, drain), []string{ruleTogether, ruleProgress, ruleForms, ruleCause, ruleWaiters,
			ruleNewcomer, ruleCalm},
	},
	{
		"a member is not told that its quorum is over", "quorum/standing.go",
		"s.do(Over{r.standsIn, r.id, reason})",
		"if !$ {\n			s.do(Over{r.standsIn, r.id, reason})\n		}",
		only(cutLighthouse), []string{ruleTogether, ruleProgress},
	},
	{
		"a newcomer calls nobody", "quorum/standing.go", "	if !r.previous && !r.held && !s.shrinks() {\n",
		"	if !r.previous && !r.held && !s.shrinks() && !$ {\n",
		nil, []string{ruleTogether, ruleProgress, ruleForms, ruleNewcomer, ruleEarly},
	},

	// The model of the ranks.
	{"a healed group keeps its weights", "", "", "", nil, []string{ruleEqual}},
	{"a replay reduces sums", "", "", "", func(s *setup) { *s = onlyFailures(s.seed) }, []string{ruleOwn}},
	{"a replay of a committed step", "", "", "",
		func(s *setup) { s.replay = true; only(partition, cutLighthouse, loseVote)(s) },
		[]string{ruleHeal, ruleEqual, ruleDivisor}},
}

// only replaces the faults of a history by many of these kinds.
func only(kinds ...faultKind) func(*setup) {
	return func(s *setup) { s.drawFaults(4*time.Second, kinds...) }
}

// pairOf changes a job into one of two groups.
func pairOf(s *setup) { s.slots, s.policy.MinReplicas = 2, 1 }

// startsSlowly is a job of four groups whose steps are much longer than join_timeout_ms.
func startsSlowly(s *setup) {
	s.slots, s.policy.MinReplicas, s.policy.JoinTimeout, s.compute = 4, 1, 300*time.Millisecond, 3*time.Second
	only(crash)(s)
}

var mistakeFlag = flag.String("mistake", "",
	"the name of the mistake that a binary with all mistakes makes (what TestMistakesAreFound runs)")

// spoil returns the sources with all mistakes.
func spoil(t *testing.T) testmain.Sources {
	t.Helper()
	sources := testmain.Sources{}
	for _, m := range mistakes {
		if m.file != "" {
			sources.Plant(t, m.name, m.file, m.old, m.new)
		}
	}
	return sources
}

// The sources still contain the texts that the mistakes replace, and the page has the number of mistakes.
func TestTheMistakesFitTheSources(t *testing.T) {
	spoil(t)
	require.GreaterOrEqual(t, len(mistakes), 40)
	require.Equal(t, []string{strconv.Itoa(len(mistakes))},
		testmain.Row(t, "internals/correctness.md", "go/sim/mistakes_test.go", ", "))
}

// record changes the machine of a package so that its events can be recorded (testdata/tape.go.txt).
func record(t *testing.T, sources testmain.Sources, name string) {
	t.Helper()
	folder, err := filepath.Abs(filepath.Join("..", name))
	require.NoError(t, err)
	path := filepath.Join(folder, "machine.go")
	sources.Read(t, path)
	create := regexp.MustCompile(`func NewMachine\((.*)\) \*Machine`).FindStringSubmatch(sources[path])
	require.NotNil(t, create)
	step := "func (m *Machine) Step(event Event, now time.Time)"
	require.Contains(t, sources[path], step)
	sources[path] = strings.Replace(sources[path], "func NewMachine(", "func newMachine(", 1)
	sources[path] = strings.Replace(sources[path], step, strings.Replace(step, "Step", "unrecorded", 1), 1)
	tape, err := os.ReadFile("testdata/tape.go.txt")
	require.NoError(t, err)
	var names []string
	for argument := range strings.SplitSeq(create[1], ", ") {
		names = append(names, strings.Fields(argument)[0])
	}
	sources[filepath.Join(folder, "tape.go")] = strings.NewReplacer(
		"PACKAGE", name, "ARGUMENTS", create[1], "NAMES", strings.Join(names, ", ")).Replace(string(tape))
}

func TestMistakesAreFound(t *testing.T) {
	testmain.Slow(t)
	if testmain.Race() {
		return // no mistake is a race
	}
	t.Parallel()
	sources := spoil(t)
	record(t, sources, "quorum")
	record(t, sources, "round")
	binary := sources.Compile(t, "-tags=tapes")
	t.Run("none, and the events of the machines replay", func(t *testing.T) {
		t.Parallel()
		test := exec.CommandContext(t.Context(), binary, "-test.run=^TestTheEventsOfAMachineReplay$", "-test.v", fmt.Sprintf("-tape=%d", *tapeFlag)) //nolint:gosec // this test
		out, err := test.CombinedOutput()
		require.NoError(t, err, "%s", out)
		t.Logf("%s", out)
	})
	for _, m := range mistakes {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			test := exec.CommandContext(t.Context(), binary, "-test.run=^TestAMistakeIsFound$", "-test.v", "-mistake="+m.name) //nolint:gosec // this test
			out, err := test.CombinedOutput()
			found := regexp.MustCompile(`found as: .*`).Find(out)
			require.NoError(t, err, "%s", out)
			t.Logf("%s", bytes.TrimSpace(found))
		})
	}
}

// mostHistories bounds the search for a mistake.
const mostHistories = 200

// TestAMistakeIsFound runs in a binary with all mistakes, and looks for one of them.
func TestAMistakeIsFound(t *testing.T) {
	i := slices.IndexFunc(mistakes, func(m mistake) bool { return m.name == *mistakeFlag })
	if i < 0 {
		t.Skip("-mistake names none")
	}
	m := mistakes[i]
	for seed := range uint64(mostHistories) {
		s := draw(seed, 2+int(seed%3))
		if m.setup != nil {
			m.setup(&s)
		}
		s.mistake = m.name
		if b := play(t, s).broken; b != nil {
			t.Logf("history %d: %v", seed, b)
			if slices.Contains(m.found, b.rule) { // a mistake may break other rules first, by chance
				t.Logf("found as: %v in history %d", b, seed)
				return
			}
		}
	}
	require.Fail(t, "none of its rules was broken")
}
