package servers

import (
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
)

var mistakesFlag = flag.Bool("mistakes", false, "look for planted mistakes (TestMistakesInTheShellsAreFound): half a minute each")

// Planted mistakes in the shells: the compiler reads a file in which one text is replaced (go test -overlay), so that production
// code needs no switches.
var mistakes = []struct {
	name, file string
	from, to   string
	rules      []string // one of these rules must find it; each is given by the beginning of its text
}{
	{
		"no greeting on a new stream", "membership/lighthouses/member.go",
		"	stream.post(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Greeting{",
		"	if m.stream != nil {\n		go stream.receive()\n		return stream, client, nil\n	}\n" +
			"	stream.post(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Greeting{",
		[]string{"a call ends before its deadline"},
	},
	{
		"failures not passed on", "membership/lighthouses/stream.go",
		"		s.member.broadcast.Notify(membership.Notice{\n			Kind: membership.MemberFailed, QuorumID: f.GetQuorumId(), ReplicaID: f.GetReplicaId(), Reason: f.GetReason(),\n		})\n",
		"		_ = f\n",
		[]string{"a failure reaches all members of its quorum"},
	},
	{
		"requests outlive their stream", "lighthouse/member.go",
		"	s.forget()\n	if s.expiry != nil {", "	if s.expiry != nil {",
		[]string{"every waiter is answered once"},
	},
	{
		"waiting members silent", "membership/lighthouses/stream.go",
		"	s.post(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Alive{Alive: true}})\n	return s.interval",
		"	return s.interval",
		[]string{"groups that reach each other and the lighthouse train in one quorum", "while nothing fails, no step is lost"},
	},
	{
		"one number for all requests", "membership/lighthouses/member.go",
		"client.number.Add(1)", "client.number.Add(0)",
		[]string{"a call ends before its deadline"},
	},
	{
		// The others wait for the heartbeat timeout, unless one of their collectives fails earlier and the check of the suspect finds the
		// failure.
		"a stream's end unnoticed", "lighthouse/member.go",
		"if job.streams.remove(s) && job.ended == nil {", "if job.streams.remove(s) && job.ended != nil {",
		[]string{"after a failure the others have a quorum"},
	},
	{
		"an absent lighthouse fails the round", "manager/retry.go",
		"case rpc.IsUnavailable(err):", "case false && rpc.IsUnavailable(err):",
		[]string{"a call ends before its deadline"},
	},
	{
		"votes of sessions always yes", "manager/session.go",
		"ShouldCommitResponse{ShouldCommit: a.commit}", "ShouldCommitResponse{ShouldCommit: true}",
		[]string{"a group commits only what all its ranks voted for"},
	},
}

// spoil returns the source of a file with a mistake in it.
func spoil(t *testing.T, file, from, to string) (path, code string) {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("../..", file))
	require.NoError(t, err)
	source, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, 1, strings.Count(string(source), from), "%s must contain the text of the mistake once", file)
	return path, strings.Replace(string(source), from, to, 1)
}

// The sources still contain the texts that the mistakes replace, and the page has the number of mistakes.
func TestTheMistakesFitTheShells(t *testing.T) {
	for _, m := range mistakes {
		spoil(t, m.file, m.from, m.to)
	}
	require.Equal(t, []string{strconv.Itoa(len(mistakes))}, testmain.Row(t, "correctness.md", "go/sim/servers/mistakes_test.go", ", "))
}

func TestMistakesInTheShellsAreFound(t *testing.T) {
	if !*mistakesFlag {
		t.Skip("-mistakes is not set")
	}
	for _, m := range mistakes {
		t.Run(m.name, func(t *testing.T) {
			path, code := spoil(t, m.file, m.from, m.to)
			dir := t.TempDir()
			spoiled, overlay := filepath.Join(dir, "spoiled.go"), filepath.Join(dir, "overlay.json")
			require.NoError(t, os.WriteFile(spoiled, []byte(code), 0o600))
			text, err := json.Marshal(map[string]map[string]string{"Replace": {path: spoiled}})
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(overlay, text, 0o600))

			test := exec.CommandContext(t.Context(), "go", "test", ".", "-overlay", overlay, "-vet=off", "-failfast",
				"-run", "^TestTheRulesHold$", "-seeds", "150")
			out, err := test.CombinedOutput()
			require.Error(t, err, "nothing was found")
			found := regexp.MustCompile(`servers_test.go:\d+: (.*)\n`).FindSubmatch(out)
			require.NotNil(t, found, "%s", out)
			t.Logf("found as: %s", found[1])
			assert.True(t, slices.ContainsFunc(m.rules, func(rule string) bool { return strings.HasPrefix(string(found[1]), rule) }))
		})
	}
}
