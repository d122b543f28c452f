package keeper

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/testlog"
	"github.com/torchft/torchft/go/internal/testmain"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/slots"
)

func TestMain(m *testing.M) { testmain.NoGoroutineIsLeft(m) }

// patience is how long a test waits for what should come within seconds.
const patience = time.Minute

// host is one host: its root, and its keeper.
type host struct {
	t    *testing.T
	root string
	log  testlog.Log
	*Keeper
}

func newHost(t *testing.T) *host {
	root := t.TempDir()
	require.NoError(t, os.Chmod(root, 0o700)) //nolint:gosec // only this user can enter it
	return &host{t: t, root: root}
}

func (h *host) start(change ...func(*Config)) *host {
	h.t.Helper()
	cfg := Config{Root: h.root, Hostname: "127.0.0.1", Keep: time.Hour,
		Logger: slog.New(slog.NewTextHandler(&h.log, nil))}
	for _, c := range change {
		c(&cfg)
	}
	k, err := New(cfg)
	require.NoError(h.t, err)
	h.t.Cleanup(k.Shutdown)
	h.Keeper = k
	return h
}

// slot writes a slot with a body, and returns its content. The header's fields can be changed.
func (h *host) slot(job, group string, rank, slot int, step int64, body []byte, changes ...any) []byte {
	fields := map[string]any{"job": job, "group": group, "group_rank": rank, "group_world_size": 1, "step": step,
		"saved": 1.5, "nbytes": slots.PageSize + len(body), "disk": nil}
	for i := 0; i < len(changes); i += 2 {
		fields[changes[i].(string)] = changes[i+1]
	}
	text, err := json.Marshal(fields)
	require.NoError(h.t, err)
	page := append([]byte("TFTSLOT1"), make([]byte, slots.PageSize-8)...)
	binary.LittleEndian.PutUint32(page[8:], uint32(len(text)))
	binary.LittleEndian.PutUint32(page[12:], crc32.ChecksumIEEE(text))
	copy(page[16:], text)
	h.write(filepath.Join(h.rank(job, group, rank), fmt.Sprint(slot)), append(page, body...))
	return append(page, body...)
}

func (h *host) rank(job, group string, rank int) string {
	return filepath.Join(h.root, url.PathEscape(job), url.PathEscape(group), fmt.Sprintf("rank-%d", rank))
}

func (h *host) write(path string, content []byte) {
	require.NoError(h.t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(h.t, os.WriteFile(path+".new", content, 0o600))
	require.NoError(h.t, os.Rename(path+".new", path))
}

// job writes the settings of a job.
func (h *host) job(name, lighthouse string, security auth.Security) {
	text, err := json.Marshal(settings{lighthouse, "default", security})
	require.NoError(h.t, err)
	h.write(filepath.Join(h.root, url.PathEscape(name), "job.json"), text)
}

// startLighthouse returns a lighthouse on this machine.
func startLighthouse(t *testing.T, security auth.Security) string {
	cfg := lighthouse.DefaultConfig()
	cfg.Bind, cfg.Hostname, cfg.MinReplicas, cfg.Security = "127.0.0.1:0", "127.0.0.1", 1, security
	s, err := lighthouse.New(cfg)
	require.NoError(t, err)
	t.Cleanup(s.Shutdown)
	return s.Address()
}

// web is a client that leaves no goroutine.
func web(t *testing.T) *http.Client {
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: patience}
}

func request(t *testing.T, client *http.Client, address string, headers ...string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address, nil)
	require.NoError(t, err)
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := client.Do(req)
	require.NoError(t, err)
	t.Cleanup(func() { _ = resp.Body.Close() })
	return resp
}

func get(t *testing.T, address string, headers ...string) (int, string) {
	t.Helper()
	resp := request(t, web(t), address, headers...) //nolint:bodyclose // request closes it with the test
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(body)
}

// keepers waits until a lighthouse has heard of a number of keepers.
func keepers(t *testing.T, address string, n int) []lighthouse.KeeperHeld {
	t.Helper()
	var answer lighthouse.KeepersAnswer
	require.Eventually(t, func() bool {
		_, body := get(t, address+"/api/v1/keepers")
		return json.Unmarshal([]byte(body), &answer) == nil && len(answer.Keepers) == n
	}, patience, 20*time.Millisecond)
	return answer.Keepers
}

func TestTheSlotsOfTwoHostsAreToldAndServed(t *testing.T) {
	at := startLighthouse(t, auth.Security{})
	a, b := newHost(t), newHost(t)
	want := a.slot("a job/1", "g", 0, 0, 7, []byte("state"))
	a.write(filepath.Join(a.rank("a job/1", "g", 0), "1"), make([]byte, slots.PageSize))
	a.job("a job/1", at, auth.Security{})
	b.job("a job/1", at, auth.Security{})
	a.start()
	b.start()
	held := keepers(t, at, 2)
	if len(held[0].Snapshots) == 0 {
		held[0], held[1] = held[1], held[0]
	}
	assert.Empty(t, held[1].Snapshots)
	require.Len(t, held[0].Snapshots, 2)
	assert.Equal(t, slots.Slot{Job: "a job/1", Group: "g", Path: "g/rank-0/0", GroupWorldSize: 1, Step: 7,
		Saved: 1.5, Bytes: 4101}, held[0].Snapshots[0])
	assert.Contains(t, held[0].Snapshots[1].Incomplete, "it is being written")

	of := held[0].Address + "/snapshots/a%20job%2F1/g/rank-0/"
	code, body := get(t, of+"0")
	assert.Equal(t, http.StatusOK, code)
	assert.True(t, string(want) == body, "the slot's bytes")
	code, body = get(t, of+"0", "Range", "bytes=4096-4097")
	assert.Equal(t, http.StatusPartialContent, code)
	assert.Equal(t, "st", body)
	code, body = get(t, held[0].Address+"/snapshots")
	assert.Equal(t, http.StatusOK, code)
	assert.Contains(t, body, `"step":7`)
	code, _ = get(t, of+"2")
	assert.Equal(t, http.StatusNotFound, code)
	code, body = get(t, of+"0", "Origin", "http://evil.example")
	assert.Equal(t, http.StatusForbidden, code)
	assert.Contains(t, body, "a request of a browser is refused")
}

// Between two reports ranks ask the keeper itself: a list is that of the moment, and all of it is served.
func TestAListHasWhatWasWrittenSinceTheLastReport(t *testing.T) {
	at := startLighthouse(t, auth.Security{})
	h, disk := newHost(t), t.TempDir()
	h.slot("1", "g", 0, 0, 7, nil)
	h.job("1", at, auth.Security{})
	h.slot("2", "g", 0, 0, 9, nil)
	h.job("2", "http://127.0.0.1:9", auth.Security{})
	h.start()
	of := keepers(t, at, 1)[0].Address
	for step := int64(8); step < 20; step++ {
		stored := fmt.Sprintf("parts-of-step-%d", step)
		h.write(filepath.Join(disk, stored), h.slot("1", "g", 0, int((step+1)%2), step, nil))
		h.stored("1", disk, map[string]int64{stored: step})
		var listed []slots.Slot
		code, body := get(t, of+"/snapshots")
		require.Equal(t, http.StatusOK, code)
		require.NoError(t, json.Unmarshal([]byte(body), &listed))
		steps := []int64{}
		for _, s := range listed {
			if s.Job == "1" {
				steps = append(steps, s.Step)
			}
		}
		assert.ElementsMatch(t, []int64{step, step, step - 1}, steps)
		code, _ = get(t, of+"/snapshots/1/"+stored)
		assert.Equal(t, http.StatusOK, code)
	}
}

func TestAJobIsServedWithItsOwnTokenAlone(t *testing.T) {
	h := newHost(t)
	one := auth.Security{TokenFile: fttest.File(t, "one")}
	two := auth.Security{TokenFile: fttest.File(t, "two")}
	atOne, atTwo := startLighthouse(t, one), startLighthouse(t, two)
	h.slot("1", "g", 0, 0, 7, nil)
	h.slot("2", "g", 0, 0, 8, nil)
	h.slot("none", "g", 0, 0, 9, nil) // without settings
	h.job("1", atOne, one)
	h.job("2", atTwo, two)
	h.start()
	first, second := keepers(t, atOne, 1)[0], keepers(t, atTwo, 1)[0]
	require.NotEqual(t, first.Address, second.Address)
	require.Len(t, first.Snapshots, 1)
	for _, path := range []string{"/snapshots", "/snapshots/1/g/rank-0/0", "/", "/snapshots/../keeper.lock"} {
		code, body := get(t, first.Address+path)
		assert.Equal(t, http.StatusUnauthorized, code, path)
		assert.Contains(t, body, "TORCHFT_TOKEN_FILE")
		code, body = get(t, first.Address+path, "Authorization", "Bearer two")
		assert.Equal(t, http.StatusUnauthorized, code, path)
		assert.Contains(t, body, "the token is not the job's")
	}
	code, _ := get(t, first.Address+"/snapshots/1/g/rank-0/0", "Authorization", "Bearer one")
	assert.Equal(t, http.StatusOK, code)
	for _, job := range []string{"2", "none"} {
		code, _ = get(t, first.Address+"/snapshots/"+job+"/g/rank-0/0", "Authorization", "Bearer one")
		assert.Equal(t, http.StatusNotFound, code, job)
	}
	_, body := get(t, second.Address+"/snapshots", "Authorization", "Bearer two")
	assert.NotContains(t, body, `"job":"1"`)
}

func TestTLS(t *testing.T) {
	ca := fttest.NewCA(t)
	var security auth.Security
	security.TLSCert, security.TLSKey = ca.Issue("127.0.0.1")
	security.TLSCA, security.TLSClientCA = ca.File, ca.File
	h := newHost(t)
	at := startLighthouse(t, auth.Security{TLSCert: security.TLSCert, TLSKey: security.TLSKey})
	h.slot("1", "g", 0, 0, 7, nil)
	h.job("1", at, security)
	h.start()
	client := web(t)
	client.Transport.(*http.Transport).TLSClientConfig = fttest.Trusting(t, ca.File)
	var answer lighthouse.KeepersAnswer
	require.Eventually(t, func() bool {
		resp := request(t, client, at+"/api/v1/keepers") //nolint:bodyclose // request closes it with the test
		require.NoError(t, json.NewDecoder(resp.Body).Decode(&answer))
		return len(answer.Keepers) == 1
	}, patience, 20*time.Millisecond)
	require.True(t, strings.HasPrefix(answer.Keepers[0].Address, "https://"))
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, answer.Keepers[0].Address+"/snapshots", nil)
	require.NoError(t, err)
	_, err = client.Do(req) //nolint:bodyclose // there is none
	require.Error(t, err, "a client without a certificate is refused")
}

// Whatever a request names, only regular files of slots below the root are read.
func TestNothingOutsideOfTheRootIsRead(t *testing.T) {
	at := startLighthouse(t, auth.Security{})
	h := newHost(t)
	secret := newHost(t)
	secret.slot("1", "g", 0, 0, 7, []byte("secret"))
	h.job("1", at, auth.Security{})
	h.slot("1", "g", 0, 0, 7, nil)
	outside := secret.rank("1", "g", 0)
	require.NoError(t, os.Symlink(filepath.Join(outside, "0"), filepath.Join(h.rank("1", "g", 0), "1")))
	require.NoError(t, os.Symlink(outside, h.rank("1", "g", 1)))
	require.NoError(t, os.Symlink(filepath.Dir(outside), filepath.Join(h.root, "1", "link")))
	require.NoError(t, os.MkdirAll(h.rank("1", "g", 2), 0o700))
	require.NoError(t, syscall.Mkfifo(filepath.Join(h.rank("1", "g", 2), "0"), 0o600))
	require.NoError(t, os.MkdirAll(filepath.Join(h.rank("1", "g", 3), "0"), 0o700))
	h.start()
	held := keepers(t, at, 1)[0]
	assert.Len(t, held.Snapshots, 1, "no link, no pipe and no folder is a slot: %v", held.Snapshots)
	for _, path := range []string{"1/g/rank-0/1", "1/g/rank-1/0", "1/link/rank-0/0", "1/g/rank-2/0",
		"1/g/rank-3/0", "1/g/rank-0/lock", "..%2f1/g/rank-0/0", "1/..%2f..%2f..%2fetc/rank-0/0",
		"%2e%2e/%2e%2e/%2e%2e/etc", "1/g/rank-00/0", "1/g/rank--1/0", "1/g/rank-0/%00"} {
		code, body := get(t, held.Address+"/snapshots/"+path)
		assert.Equal(t, http.StatusNotFound, code, path)
		assert.NotContains(t, body, "secret")
	}
}

const large = 64 << 20 // bytes: more than the buffers of a connection

func TestASlowReaderHoldsUpNobodyAndIsCutOff(t *testing.T) {
	at := startLighthouse(t, auth.Security{})
	h := newHost(t)
	h.job("1", at, auth.Security{})
	want := h.slot("1", "g", 0, 0, 7, make([]byte, large))
	h.start(func(cfg *Config) { cfg.sendTimeout = 5 * time.Second })
	of := keepers(t, at, 1)[0].Address + "/snapshots/1/g/rank-0/0"
	var slow []*http.Response
	for range 8 {
		slow = append(slow, request(t, web(t), of)) //nolint:bodyclose // with the test
	}
	code, body := get(t, of)
	assert.Equal(t, http.StatusOK, code)
	assert.Len(t, body, len(want))
	require.Eventually(t, func() bool { return openFiles(t, h.rank("1", "g", 0)) == 0 }, patience,
		20*time.Millisecond)
	for _, resp := range slow {
		n, err := io.Copy(io.Discard, resp.Body)
		require.Error(t, err)
		assert.Less(t, n, int64(large))
	}
}

// openFiles returns how many descriptors of this process are files below a folder.
func openFiles(t *testing.T, folder string) (n int) {
	fds, err := filepath.Glob("/proc/self/fd/*")
	require.NoError(t, err)
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && strings.HasPrefix(to, folder) {
			n++
		}
	}
	return n
}

func TestOneKeeperForARoot(t *testing.T) {
	h := newHost(t).start()
	_, err := New(Config{Root: h.root, Keep: time.Hour})
	running := (*RunningError)(nil)
	require.ErrorAs(t, err, &running)
	assert.EqualError(t, err, fmt.Sprintf("a keeper of %s runs already: process %d", h.root, os.Getpid()))
	h.Shutdown()
	h.Shutdown() // does nothing
	h.start()
}

func TestBadSettings(t *testing.T) {
	open := t.TempDir()
	require.NoError(t, os.Chmod(open, 0o777)) //nolint:gosec // the folder of the test
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(newHost(t).root, link))
	for want, cfg := range map[string]Config{
		`root is ""`:                {Keep: 1},
		"no such file or directory": {Root: filepath.Join(open, "nothing"), Keep: 1},
		"keep is 0s":                {Root: open},
		`bind is "x"`:               {Root: open, Keep: 1, Bind: "x"},
		"no other one may write":    {Root: open, Keep: 1},
		"it must be a folder of":    {Root: link, Keep: 1},
	} {
		_, err := New(cfg)
		assert.ErrorContains(t, err, want)
	}
}

func TestSlotsOfAJobAreKeptForAWhileAfterItsLastTrainer(t *testing.T) {
	h := newHost(t)
	h.slot("1", "g", 0, 0, 7, nil)
	h.slot("2", "g", 0, 0, 7, nil)
	for _, job := range []string{"1", "2"} {
		h.write(filepath.Join(h.rank(job, "g", 0), "lock"), nil)
	}
	trainer, err := os.Open(filepath.Join(h.rank("1", "g", 0), "lock"))
	require.NoError(t, err)
	defer trainer.Close()
	require.NoError(t, flock(trainer))
	ended := make(chan struct{})
	h.start(func(cfg *Config) { cfg.Keep, cfg.OnEnd = 10*time.Millisecond, func() { close(ended) } })
	there := func(job string) bool {
		_, err := os.Stat(filepath.Join(h.root, job))
		return err == nil
	}
	require.Eventually(t, func() bool { return !there("2") }, patience, 10*time.Millisecond)
	assert.True(t, there("1"), "its trainer lives")
	select {
	case <-h.Ended():
		require.Fail(t, "the keeper ended with slots of a live trainer")
	default:
	}
	require.NoError(t, trainer.Close())
	for _, end := range []<-chan struct{}{ended, h.Ended()} {
		select {
		case <-end:
		case <-time.After(patience):
			require.Fail(t, "the keeper does not end")
		}
	}
	assert.False(t, there("1"))
}

func TestTheKeeperEndsWithItsFolder(t *testing.T) {
	h := newHost(t).start()
	require.NoError(t, os.RemoveAll(h.root))
	select {
	case <-h.Ended():
	case <-time.After(patience):
		require.Fail(t, "the keeper does not end")
	}
}

// A job that begins again may have another lighthouse; one that hangs holds up no other.
func TestANewLighthouseHearsAtOnce(t *testing.T) {
	silent := startSilent(t)
	h := newHost(t)
	h.slot("1", "g", 0, 0, 7, nil)
	h.job("1", silent, auth.Security{})
	h.slot("2", "g", 0, 0, 8, nil)
	second := startLighthouse(t, auth.Security{})
	h.job("2", second, auth.Security{})
	h.start()
	keepers(t, second, 1)
	first := startLighthouse(t, auth.Security{})
	h.job("1", first, auth.Security{})
	held := keepers(t, first, 1)
	require.Len(t, held[0].Snapshots, 1)
	assert.EqualValues(t, 7, held[0].Snapshots[0].Step)
	require.NoError(t, os.RemoveAll(filepath.Join(h.root, "1")))
	h.write(filepath.Join(h.root, "2", "job.json"), []byte("{"))
	require.Eventually(t, func() bool { return h.log.Count("the settings of a job are not understood") > 0 },
		patience, 20*time.Millisecond)
}

// startSilent returns the address of a server that accepts connections and never answers.
func startSilent(t *testing.T) string {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = lis.Close() })
	return "http://" + lis.Addr().String()
}

func TestTheWriterRunsWhileASlotIsDueOnDisk(t *testing.T) {
	h := newHost(t)
	out := filepath.Join(t.TempDir(), "pid")
	h.slot("1", "g", 0, 0, 7, nil)
	h.start(func(cfg *Config) {
		cfg.Writer = []string{"sh", "-c", `echo $$ "$0" > ` + out + ".new; mv " + out + ".new " + out + "; exec sleep 1000"}
	})
	h.slot("1", "g", 0, 1, 8, nil, "disk", map[string]any{"folder": "/ckpt"})
	var pid int
	var root string
	require.Eventually(t, func() bool {
		text, err := os.ReadFile(out)
		if err != nil {
			return false
		}
		_, err = fmt.Sscan(string(text), &pid, &root)
		return err == nil
	}, patience, 20*time.Millisecond)
	assert.Equal(t, h.root, root)
	priority, err := syscall.Getpriority(syscall.PRIO_PROCESS, pid)
	require.NoError(t, err)
	assert.Equal(t, 1, priority, "the system call returns 20 minus the nice value")
	h.Shutdown()
	assert.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH, "it ends with the keeper")
}

func TestListNeedsNoKeeper(t *testing.T) {
	h := newHost(t)
	h.slot("a/b", "g:1", 3, 1, 7, nil, "group_world_size", 4)
	held, err := List(h.root)
	require.NoError(t, err)
	require.Len(t, held.Snapshots, 1)
	assert.Equal(t, "g:1/rank-3/1", held.Snapshots[0].Path)
	held, err = List(filepath.Join(h.root, "nothing"))
	require.NoError(t, err)
	assert.Equal(t, slots.Held{Snapshots: []slots.Slot{}}, held)
}

func TestWhatTheWriterSaysIsTold(t *testing.T) {
	h := newHost(t)
	at := startLighthouse(t, auth.Security{})
	h.job("1", at, auth.Security{})
	h.slot("1", "g", 0, 0, 7, nil)
	h.write(filepath.Join(h.root, "1", "disk.json"),
		[]byte(`{"/ckpt": {"written": 3, "writing": null, "nbytes": 0, "problem": "full", "since": 1.5}}`))
	h.start()
	want := []slots.Disk{{Job: "1", Folder: "/ckpt", Written: 3, Problem: "full", Since: 1.5}}
	assert.Equal(t, want, keepers(t, at, 1)[0].Disks)
	require.NoError(t, os.Remove(filepath.Join(h.root, "1", "disk.json")))
	require.NoError(t, os.Symlink("/etc/hostname", filepath.Join(h.root, "1", "disk.json")))
	held, err := List(h.root)
	require.NoError(t, err)
	assert.Empty(t, held.Disks, "no link is followed")
}

// stored writes what the ranks of a job have stored in a folder: one slot of group g for each path.
func (h *host) stored(job, folder string, steps map[string]int64) {
	told := []map[string]any{}
	for path, step := range steps {
		told = append(told, map[string]any{"path": path, "group": "g", "group_rank": 0, "group_world_size": 1,
			"step": step, "quorum": 0, "saved": 1.5, "bytes": 9, "share": []int{0, 2, 2}})
	}
	text, err := json.Marshal(map[string]any{"folder": folder, "slots": told})
	require.NoError(h.t, err)
	h.write(filepath.Join(h.root, url.PathEscape(job), "stored.json"), text)
}

func TestSlotsOnADiskAreServedIfTheRanksHaveNamedThem(t *testing.T) {
	at := startLighthouse(t, auth.Security{})
	h, disk := newHost(t), t.TempDir()
	want := h.slot("a job", "g", 0, 0, 7, []byte("state"))
	good, link, into := "parts-of-step-7/g/rank-0", "parts-of-step-7/g/link", "linked/g/rank-0"
	h.write(filepath.Join(disk, good), want)
	h.write(filepath.Join(disk, "parts-of-step-7/g/other"), want)
	outside := filepath.Join(t.TempDir(), "slot")
	require.NoError(t, os.WriteFile(outside, want, 0o600))
	require.NoError(t, os.Symlink(outside, filepath.Join(disk, link)))
	require.NoError(t, os.Symlink("parts-of-step-7", filepath.Join(disk, "linked")))
	absolute := "../" + filepath.Base(filepath.Dir(outside)) + "/slot"
	h.stored("a job", disk, map[string]int64{good: 7, link: 5, into: 5, absolute: 5, "nowhere": 5})
	h.job("a job", at, auth.Security{})
	h.start()
	held := keepers(t, at, 1)[0]
	require.Len(t, held.Snapshots, 6)
	of := held.Address + "/snapshots/a%20job/"
	code, body := get(t, of+good)
	assert.Equal(t, http.StatusOK, code)
	assert.True(t, string(want) == body, "the slot's bytes")
	for path, why := range map[string]string{
		link:                      "path escapes from parent",
		into:                      "linked is no folder",
		"nowhere":                 "no such file or directory",
		"parts-of-step-7/g/other": "no such slot",
		"..%2F" + absolute[3:]:    "path escapes from parent",
	} {
		code, body := get(t, of+path)
		assert.NotEqual(t, http.StatusOK, code, path)
		assert.Contains(t, body, why, path)
	}
	code, _ = get(t, held.Address+"/snapshots/another/"+good)
	assert.Equal(t, http.StatusNotFound, code)
}

func TestTheWriterHearsWhichStepAllHostsHaveStored(t *testing.T) {
	at := startLighthouse(t, auth.Security{})
	h := newHost(t)
	h.job("a job", at, auth.Security{})
	h.stored("a job", t.TempDir(), map[string]int64{"a": 5, "b": 7})
	h.start()
	file := filepath.Join(h.root, "a%20job", "complete.json")
	require.Eventually(t, func() bool {
		text, err := os.ReadFile(file) //nolint:gosec // a file of this test
		return err == nil && string(text) == `{"step": 7}`
	}, patience, 20*time.Millisecond)
}

func TestALighthouseElsewhereOpensAllInterfaces(t *testing.T) {
	k := &Keeper{}
	for addresses, local := range map[string]bool{"http://127.0.0.1:1": true, "http://localhost:1": true,
		"http://[::1]:1, http://127.0.0.1:2": true, "http://127.0.0.1:1,http://a:1": false, "http://10.0.0.1:1": false,
		"": false, "%": false} {
		assert.Equal(t, local, k.keyOf(settings{Lighthouse: addresses}).loopback, addresses)
	}
	k.cfg.Bind = "[::]:29520"
	assert.False(t, k.keyOf(settings{Lighthouse: "http://127.0.0.1:1"}).loopback)
}
