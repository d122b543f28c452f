package lighthouse

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testlog"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/slots"
)

var somePast = quorum.Past{ID: 1234, Step: 56,
	Members: []quorum.Voter{{ReplicaID: "a", Address: "http://a:1"}, {ReplicaID: "b"}}}

func TestAStateIsReadAsItWasWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.state")
	want := state{Job: "x", Kept: quorum.Kept{Highest: 2000, Past: somePast,
		End:    quorum.End{Run: "r", Step: 57},
		Copies: quorum.Copies{Step: 55, Quorum: 1234, Hosts: []string{"h1", "h2"}}}}
	for range 2 { // the second write replaces an older file
		text, err := want.encode()
		require.NoError(t, err)
		require.NoError(t, writeFile(t.Context(), path, text))
		text, err = os.ReadFile(path)
		require.NoError(t, err)
		got, err := decodeState(text, "x")
		require.NoError(t, err)
		assert.Equal(t, want, got)
	}
	left, err := filepath.Glob(filepath.Join(filepath.Dir(path), "*"))
	require.NoError(t, err)
	assert.Equal(t, []string{path}, left)
}

// A file that is cut short at any byte, or has any byte changed, is an error.
func TestADamagedStateIsAnError(t *testing.T) {
	text, err := state{Job: "x", Kept: quorum.Kept{Highest: 2000, Past: somePast}}.encode()
	require.NoError(t, err)
	for n := range len(text) - 1 { // without the last byte, a newline, which may be missing
		_, err := decodeState(text[:n], "x")
		require.Error(t, err, "cut short to %d bytes", n)
		damaged := []byte(string(text))
		damaged[n] ^= 1
		_, err = decodeState(damaged, "x")
		require.Error(t, err, "byte %d", n)
	}
	_, err = decodeState(text, "y")
	assert.ErrorContains(t, err, `it belongs to job "x"`)
	other, err := state{Job: "x", Kept: quorum.Kept{Past: quorum.Past{ID: 3}}}.encode()
	require.NoError(t, err)
	_, err = decodeState(other, "x")
	assert.ErrorContains(t, err, "quorum 3 has no members")
}

func FuzzState(f *testing.F) {
	text, err := state{Job: "x", Kept: quorum.Kept{Highest: 2000, Past: somePast}}.encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(stateMagic))
	f.Fuzz(func(t *testing.T, text []byte) {
		if s, err := decodeState(text, "x"); err == nil && !s.ended() && s.Past.Validate() != nil {
			t.Error("an invalid state was read")
		}
	})
}

// startOn starts a lighthouse that keeps its state in a directory, and whose log can be read.
func startOn(t *testing.T, dir string, change ...func(*Config)) (*Server, *testlog.Log) {
	t.Helper()
	var log testlog.Log
	cfg := DefaultConfig()
	cfg.Bind, cfg.MinReplicas, cfg.StateDir, cfg.Hostname = "127.0.0.1:0", 1, dir, "localhost"
	cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	for _, c := range change {
		c(&cfg)
	}
	s, err := New(cfg)
	require.NoError(t, err)
	t.Cleanup(s.Shutdown)
	return s, &log
}

func (s *Server) testAsk(t *testing.T, id string, step int64) *quorum.Quorum {
	t.Helper()
	j := s.jobs["default"]
	d, err := j.quorum(t.Context(), quorum.Asked{Member: quorum.Member{ReplicaID: id, Step: step}})
	require.NoError(t, err)
	return d.quorum
}

func TestALighthouseContinuesAfterTheQuorumOnDisk(t *testing.T) {
	dir := t.TempDir()
	s, _ := startOn(t, dir)
	before := s.testAsk(t, "a", 7)
	s.Shutdown()

	again, log := startOn(t, dir)
	status := again.Status()
	assert.Equal(t, before.ID, status.QuorumID)
	assert.Equal(t, []string{"a"}, status.Quorum)
	assert.Contains(t, log.String(), "the job continues from its state on disk")
	after := again.testAsk(t, "a", 8)
	assert.GreaterOrEqual(t, after.ID, before.ID+stateAhead)
	again.Shutdown()

	// While the members stay the same, nothing is written.
	third, _ := startOn(t, dir)
	id := third.testAsk(t, "a", 9).ID
	require.Equal(t, after.ID, id-stateAhead-1)
	require.Equal(t, id, third.testAsk(t, "a", 100).ID)
	third.Shutdown()
	text, err := os.ReadFile(filepath.Join(dir, "default.state"))
	require.NoError(t, err)
	got, err := decodeState(text, "default")
	require.NoError(t, err)
	assert.Equal(t, id, got.Past.ID)
	assert.EqualValues(t, 9, got.Past.Step)
}

// After all groups have failed, a quorum that would begin before the newest copy waits for its hosts, also
// after a restart of the lighthouse, and names those that are missing.
func TestAQuorumWaitsForTheHostsOfTheNewestCopy(t *testing.T) {
	dir := t.TempDir()
	forbid := func(c *Config) { c.ForbidRegression, c.HeartbeatTimeout = true, 200*time.Millisecond }
	report := func(s *Server, host string, step, quorumID int64) {
		slot := slots.Slot{Job: "train", Group: host, GroupWorldSize: 1, Step: step,
			Quorum: quorumID}
		told := slots.Report{Address: "http://" + host, Host: host,
			Held: slots.Held{Snapshots: []slots.Slot{slot}}}
		require.NoError(t, s.keepers.hear("default", told, time.Now()))
	}
	s, _ := startOn(t, dir, forbid)
	id := s.testAsk(t, "a", 7).ID
	report(s, "h1", 20, id)
	report(s, "h2", 20, id)
	report(s, "h3", 18, id)
	require.NoError(t, s.jobs["default"].hears(time.Now()))
	s.Shutdown()

	again, log := startOn(t, dir, forbid)
	report(again, "h3", 18, id)
	report(again, "h2", 15, id)
	j := again.jobs["default"]
	require.NoError(t, j.hears(time.Now()))
	const reason = "forbid_regression is set: the members that ask are at step 18 at most, and copies in " +
		"memory of step 20 are on h1, h2; missing of these hosts: h1"
	go func() { // its deadline is the end of the test
		_, _ = j.quorum(t.Context(), quorum.Asked{Member: quorum.Member{ReplicaID: "c", Step: 18,
			CommittedQuorumID: id}})
	}()
	require.Eventually(t, func() bool {
		require.NoError(t, j.feed(quorum.Beat{ReplicaID: "c"}))
		return strings.Contains(log.String(), reason)
	}, time.Minute, 10*time.Millisecond)
	events := httptest.NewRecorder()
	j.site.ServeHTTP(events, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/api/v1/history", nil))
	assert.Contains(t, events.Body.String(), reason)
	assert.EqualValues(t, 20, again.testAsk(t, "d", 20).MaxStep(), "its host is back")
}

func TestNoQuorumIsKeptOnDiskOfACompleteTraining(t *testing.T) {
	dir := t.TempDir()
	s, log := startOn(t, dir)
	ofTerm3 := quorum.Past{ID: 3<<42 + 5, Step: 6, Members: []quorum.Voter{{ReplicaID: "a"}}}
	require.NoError(t, s.jobs["default"].feed(quorum.Recalled{Kept: quorum.Kept{Past: ofTerm3}}))
	before := s.testAsk(t, "a", 7)
	require.Equal(t, int64(3), quorum.TermOf(before.ID))
	require.NoError(t, s.jobs["default"].feed(quorum.ShuttingDown{ReplicaID: "a", Finished: true,
		End: quorum.End{Run: "r", Step: 8}}))
	assert.Contains(t, log.String(), "the training is complete, as all of its groups reported")
	assert.Empty(t, s.Status().Quorum)
	s.Shutdown()

	again, log := startOn(t, dir)
	assert.Empty(t, again.Status().Quorum)
	assert.NotContains(t, log.String(), "the job continues from its state on disk")
	_, err := again.jobs["default"].quorum(t.Context(),
		quorum.Asked{Member: quorum.Member{ReplicaID: "late"}, Run: "r"})
	require.ErrorContains(t, err, "the training has ended: it was complete at step 8, before late came back")
	after := again.testAsk(t, "b", 0)
	assert.GreaterOrEqual(t, after.ID, before.ID+stateAhead, "a quorum id was used twice")
	assert.Equal(t, int64(3), quorum.TermOf(after.ID))
	assert.NotContains(t, log.String(), "THE JOB REGRESSES")
}

func TestFilesOfEndedJobsAreRemoved(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	old, recent := now.Add(-keepFilesFor-time.Hour), now.Add(-keepFilesFor+time.Hour)
	for name, used := range map[string]time.Time{"ended": old, "paused": recent, "default": old} {
		text, err := state{Job: name, Kept: quorum.Kept{Highest: 7, Past: somePast}, Used: used}.encode()
		require.NoError(t, err)
		require.NoError(t, writeFile(t.Context(), filepath.Join(dir, name+".state"), text))
	}
	for name, at := range map[string]time.Time{
		"damaged.state": old, "x.state.corrupt": old, "y.state.corrupt": recent, "notes.txt": old,
		"my.statements.csv": old, "copy.state.bak": old,
		"x.state.123.tmp": now,
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
		require.NoError(t, os.Chtimes(filepath.Join(dir, name), at, at))
	}
	s, log := startOn(t, dir) // moves the damaged state aside, which is kept from then on
	left := func() (names []string) {
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		for _, entry := range entries {
			names = append(names, entry.Name())
		}
		return names
	}
	others := []string{"lock", "my.statements.csv", "notes.txt", "paused.state", "y.state.corrupt"}
	assert.Equal(t, append([]string{"copy.state.bak", "damaged.state.corrupt", "default.state",
		"ended.state"}, others...), left())
	s.sweep(now)
	s.sweep(now.Add(sweepEvery - time.Second))
	assert.Len(t, s.store.States(), 3, "the members of a job may not have come back yet")
	s.Renew()
	s.removeOld(0, now)
	want := append([]string{"copy.state.bak", "damaged.state.corrupt", "default.state"}, others...)
	// the renewed one is written
	require.Eventually(t, func() bool { return slices.Equal(want, left()) }, time.Minute, time.Millisecond,
		"%v", left())
	assert.NotContains(t, log.String(), "error=<nil>")
}

// A job may train for longer than keepFilesFor without a new quorum.
func TestTheFileOfAJobInUseDoesNotAge(t *testing.T) {
	dir := t.TempDir()
	s, _ := startOn(t, dir)
	s.testAsk(t, "a", 7)
	now := time.Now()
	s.Renew()
	s.Shutdown()
	text, err := os.ReadFile(filepath.Join(dir, "default.state"))
	require.NoError(t, err)
	kept, err := decodeState(text, "default")
	require.NoError(t, err)
	assert.False(t, kept.Used.Before(now))
}

func TestADamagedFileIsLoggedAndIgnored(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "default.state")
	require.NoError(t, os.WriteFile(path, []byte("torchft-lighthouse-state 1 abc\n{\"job\":"), 0o600))
	s, log := startOn(t, dir)
	assert.Contains(t, log.String(), "its checksum is wrong")
	assert.FileExists(t, path+".corrupt")
	s.testAsk(t, "a", 1)
	s.Shutdown()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	_, err = decodeState(text, "default")
	require.NoError(t, err)
}

func TestADirectoryThatCannotBeUsed(t *testing.T) {
	dir := t.TempDir()
	startOn(t, dir)
	cfg := DefaultConfig()
	cfg.Bind, cfg.MinReplicas, cfg.StateDir = "127.0.0.1:0", 1, dir
	_, err := New(cfg)
	require.ErrorContains(t, err, "another lighthouse uses it")
	require.ErrorContains(t, err, "state_dir is")

	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	cfg.StateDir = file
	_, err = New(cfg)
	require.ErrorContains(t, err, "not a directory")

	s, log := startOn(t, file, func(c *Config) { c.StateOptional = true })
	assert.Contains(t, log.String(), "is not kept on disk")
	s.testAsk(t, "a", 1)
}
