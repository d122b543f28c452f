//go:build linux

package main

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
)

// insideEnv is set in the process that runs a test in namespaces of its own.
const insideEnv = "TEST_INSIDE_NAMESPACES"

// onHosts runs a test in another process, in a network and a mount namespace of its own, where it may do
// anything. There each lighthouse is on a host of its own, whose disk has 1 MiB, and the groups are on
// another one. It needs user namespaces, but not root.
func onHosts(t *testing.T, test func(t *testing.T, c *cluster, hosts *hosts)) {
	if os.Getenv(insideEnv) != "" {
		h := newHosts(t)
		dir := t.TempDir()
		for i := range h.addresses {
			disk := filepath.Join(dir, fmt.Sprint(i))
			require.NoError(t, os.Mkdir(disk, 0o700))
			command(t, "mount", "-t", "tmpfs", "-o", "size=1m", "none", disk)
			t.Cleanup(func() { command(t, "umount", "--lazy", disk) })
		}
		test(t, start(t, h.addresses, dir, "10.29.5.10", h.prefixes), h)
		return
	}
	unshare := []string{"--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child",
		"--mount-proc"}
	if out, err := exec.CommandContext(t.Context(), "unshare", append(unshare, "ip", "link", "add", "name", "test", "type", "bridge")...).CombinedOutput(); err != nil { //nolint:gosec // constants
		testmain.Skip(t, "namespaces with a bridge cannot be made here: ", err, ": ", string(out))
	}
	inside := exec.CommandContext(t.Context(), "unshare", append(unshare, os.Args[0], "-test.v", fmt.Sprint("-test.timeout=", *soak+5*time.Minute), "-test.run=^"+t.Name()+"$", fmt.Sprint("-soak=", *soak), fmt.Sprint("-seed=", *seed), fmt.Sprint("-failures=", *failures))...) //nolint:gosec // this test
	inside.Env = append(os.Environ(), insideEnv+"=1")
	out, err := inside.CombinedOutput()
	t.Logf("%s", out)
	require.NoError(t, err)
	require.Contains(t, string(out), "--- PASS: "+t.Name())
}

func command(t *testing.T, words ...string) {
	t.Helper()
	out, err := exec.Command(words[0], words[1:]...).CombinedOutput() //nolint:gosec // constants
	require.NoError(t, err, "%s: %s", words, out)
}

// hosts are the hosts of three lighthouses: network namespaces behind a bridge. A cut of the traffic between
// hosts closes no connection, and sends no error: frames go to a network card that does not exist.
type hosts struct {
	t         *testing.T
	addresses []string
	prefixes  [][]string // of commands on a host
}

func newHosts(t *testing.T) *hosts {
	h := &hosts{t: t}
	for _, words := range []string{
		"link set lo up", "link add name groups type bridge", "address add 10.29.5.10/24 dev groups",
		"link set groups up",
	} {
		command(t, append([]string{"ip"}, strings.Fields(words)...)...)
	}
	own, err := os.Readlink("/proc/self/ns/net")
	require.NoError(t, err)
	for i := range 3 {
		// the namespace lasts as long as a process is in it
		holder := exec.Command("unshare", "--net", "sleep", "1000")
		require.NoError(t, holder.Start())
		t.Cleanup(func() {
			_ = holder.Process.Kill()
			_ = holder.Wait()
		})
		pid := strconv.Itoa(holder.Process.Pid)
		for other := own; other == own || other == ""; {
			other, _ = os.Readlink("/proc/" + pid + "/ns/net")
		}
		h.prefixes = append(h.prefixes, []string{"nsenter", "--target", pid, "--net"})
		h.addresses = append(h.addresses, "http://"+net.JoinHostPort(h.ip(i), "29510"))
		command(t, "ip", "link", "add", link(i), "master", "groups", "type", "veth", "peer", "name", "eth0",
			"netns", pid)
		command(t, "ip", "link", "set", link(i), "up")
		h.on(i, "link set lo up")
		h.on(i, "link set eth0 address "+card(i))
		h.on(i, "address add "+h.ip(i)+"/24 dev eth0")
		h.on(i, "link set eth0 up")
	}
	h.heal()
	return h
}

func (h *hosts) ip(i int) string { return fmt.Sprintf("10.29.5.%d", 11+i) }
func link(i int) string          { return fmt.Sprintf("lighthouse%d", i) }
func card(i int) string          { return fmt.Sprintf("02:00:00:00:00:%02x", 11+i) }

// on calls the command ip on a host.
func (h *hosts) on(i int, words string) {
	h.t.Helper()
	command(h.t, append(append(append([]string{}, h.prefixes[i]...), "ip"), strings.Fields(words)...)...)
}

// cut drops what one lighthouse sends to another one.
func (h *hosts) cut(from, to int) {
	h.on(from, "neighbor replace "+h.ip(to)+" lladdr 02:00:00:00:00:fe dev eth0 nud permanent")
}

// vanish drops all traffic of a host.
func (h *hosts) vanish(i int) { command(h.t, "ip", "link", "set", link(i), "down") }

// heal undoes all cuts.
func (h *hosts) heal() {
	for i := range 3 {
		command(h.t, "ip", "link", "set", link(i), "up")
		for other := range 3 {
			if other != i {
				h.on(i, "neighbor replace "+h.ip(other)+" lladdr "+card(other)+" dev eth0 nud permanent")
			}
		}
	}
}

// index returns the host of a lighthouse.
func (c *cluster) index(l *process) int {
	for i := range c.all {
		if c.all[i] == l {
			return i
		}
	}
	panic("no lighthouse of this cluster")
}

// The groups reach all lighthouses all the time, or all but the one whose host vanished.
func TestALeaderThatIsCutOffCostsNoStep(t *testing.T) {
	testmain.Slow(t)
	onHosts(t, func(t *testing.T, c *cluster, hosts *hosts) {
		for _, one := range []struct {
			how string
			cut func(leader int, others [2]int)
		}{
			{"from the other lighthouses", func(leader int, others [2]int) {
				for _, other := range others {
					hosts.cut(leader, other)
					hosts.cut(other, leader)
				}
			}},
			{"so that the others do not hear it", func(leader int, others [2]int) {
				for _, other := range others {
					hosts.cut(leader, other)
				}
			}},
			{"so that it does not hear the others", func(leader int, others [2]int) {
				for _, other := range others {
					hosts.cut(other, leader)
				}
			}},
			{"from one other", func(leader int, others [2]int) {
				hosts.cut(leader, others[0])
				hosts.cut(others[0], leader)
			}},
			{"from all", func(leader int, _ [2]int) { hosts.vanish(leader) }},
		} {
			c.settled()
			since := c.attempts()
			leader, followers := c.leader()
			one.cut(c.index(leader), [2]int{c.index(followers[0]), c.index(followers[1])})
			t.Logf("the leader is cut off %s: the next steps took %s", one.how, c.steps(50))
			hosts.heal()
			c.settled()
			c.steps(3)
			c.noStepIsLost(since)
		}
		c.check()
	})
}

// A lighthouse whose disk is full leaves its cluster when it has to write. The job trains all the time.
func TestALighthouseWhoseDiskIsFullLeaves(t *testing.T) {
	testmain.Slow(t)
	onHosts(t, func(t *testing.T, c *cluster, _ *hosts) {
		for _, leads := range []bool{true, false} {
			c.settled()
			leader, followers := c.leader()
			full := followers[0]
			if leads {
				full = leader
			}
			filler := filepath.Join(full.dir, "filler")
			require.ErrorIs(t, os.WriteFile(filler, make([]byte, 2<<20), 0o600), syscall.ENOSPC)
			changes := 0
			c.until("it has left", func() bool {
				c.restartGroup(changes % 4)
				changes++
				c.steps(1)
				return c.status(full).Trouble != ""
			})
			t.Logf("it has left after %d changes: %s", changes, c.status(full).Trouble)
			assert.Contains(t, c.status(full).Trouble, "no space left on device")
			resp, err := c.web.Get(full.address + "/readyz")
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			assert.Equal(t, http.StatusServiceUnavailable, resp.StatusCode)
			c.steps(10)
			c.restartGroup(0)
			c.steps(10)

			require.NoError(t, os.Remove(filler))
			full.end(syscall.SIGTERM)
			full.start()
			c.settled()
			c.steps(3)
		}
		c.check()
	})
}
