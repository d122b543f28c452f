package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/replica"
)

// argsEnv has the arguments of torchft_lighthouse if this test is to run as one.
const argsEnv = "TEST_LIGHTHOUSE_ARGS"

// process is a real process of torchft_lighthouse: this test's executable, which calls main.
type process struct {
	t       *testing.T
	address string
	args    string
	prefix  []string // of the command: runs it on a host of its own
	dir     string
	command *exec.Cmd // nil while it does not run
	stopped bool
	launch  func(*exec.Cmd) error
}

// start starts the process with the state directory that it had before.
func (l *process) start() {
	if l.command != nil {
		return
	}
	command := append(slices.Clone(l.prefix), os.Args[0])
	l.command = exec.Command(command[0], command[1:]...) //nolint:gosec // this test
	l.command.Env = append(os.Environ(), argsEnv+"="+l.args)
	log, err := os.OpenFile(l.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(l.t, err)
	defer func() { require.NoError(l.t, log.Close()) }()
	l.command.Stdout, l.command.Stderr = log, log
	require.NoError(l.t, l.launch(l.command))
}

func (l *process) logFile() string { return l.dir + ".log" }

func (l *process) log() string {
	text, _ := os.ReadFile(l.logFile())
	return string(text)
}

func (l *process) signal(sig syscall.Signal) {
	if l.command == nil {
		return
	}
	require.NoError(l.t, l.command.Process.Signal(sig))
	l.stopped = sig == syscall.SIGSTOP
}

// end ends the process with a signal, and returns when it has ended.
func (l *process) end(sig syscall.Signal) {
	if l.command == nil {
		return
	}
	_ = l.command.Process.Signal(sig)
	_ = l.command.Wait()
	l.command, l.stopped = nil, false
}

// answers reports whether the process can be asked.
func (l *process) answers() bool { return l.command != nil && !l.stopped }

// status returns what a lighthouse says about its cluster; the zero value if it does not answer.
func (c *cluster) status(l *process) (status replica.Status) {
	if !l.answers() {
		return replica.Status{}
	}
	resp, err := c.web.Get(l.address + "/cluster")
	if err != nil {
		return replica.Status{}
	}
	defer func() { _ = resp.Body.Close() }()
	_ = json.NewDecoder(resp.Body).Decode(&status)
	return status
}

// healthy returns how many groups a lighthouse counts as healthy.
func (c *cluster) healthy(l *process) int {
	var status struct {
		Healthy int `json:"healthy"`
	}
	resp, err := c.web.Get(l.address + "/status?job=job")
	if err != nil {
		return 0
	}
	defer func() { _ = resp.Body.Close() }()
	_ = json.NewDecoder(resp.Body).Decode(&status)
	return status.Healthy
}

// cluster is three lighthouses, or a single one, and groups that train.
type cluster struct {
	t   *testing.T
	all []*process
	web *http.Client
	*job
}

// free returns addresses of free ports.
func free(t *testing.T) (list []string) {
	for range 3 {
		lis, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer func() { require.NoError(t, lis.Close()) }()
		list = append(list, "http://"+lis.Addr().String())
	}
	return list
}

// start starts lighthouses at these addresses, and groups, and returns when all groups train together. The
// command of each lighthouse begins with a prefix, if there are any; their state directories are in dir.
func start(t *testing.T, list []string, dir, hostname string, prefixes [][]string) *cluster {
	c := &cluster{t: t, web: &http.Client{Timeout: time.Second,
		Transport: &http.Transport{DisableKeepAlives: true}}}
	for i, address := range list {
		l := &process{t: t, address: address, dir: filepath.Join(dir, fmt.Sprint(i)),
			launch: (*exec.Cmd).Start}
		if prefixes != nil {
			l.prefix = prefixes[i]
		}
		l.args = "--min_replicas=1 --bind=" + strings.TrimPrefix(address, "http://") + " --state_dir=" + l.dir
		if len(list) > 1 {
			l.args += " --cluster=" + strings.Join(list, ",") + " --advertise=" + address
		}
		l.start()
		c.all = append(c.all, l)
	}
	c.job = newJob(t, strings.Join(list, ","), hostname)
	t.Cleanup(func() {
		c.end()
		for _, l := range c.all {
			l.end(syscall.SIGKILL)
			if t.Failed() {
				t.Logf("the log of %s:\n%s", l.address, l.log())
			}
		}
	})
	c.begin(4)
	c.steps(5)
	return c
}

// until waits for a condition.
func (c *cluster) until(what string, condition func() bool) time.Duration {
	c.t.Helper()
	began := time.Now()
	for !condition() {
		if time.Since(began) > 90*time.Second {
			c.t.Fatalf("90 s passed before: %s\n%s", what, c.describe())
		}
		time.Sleep(2 * time.Millisecond)
	}
	return time.Since(began)
}

// leader waits until one of the lighthouses that answer leads, and returns it and the others, whether they
// answer or not.
func (c *cluster) leader() (leader *process, followers []*process) {
	c.t.Helper()
	c.until("one leads", func() bool {
		leader = nil
		for _, l := range c.all {
			if s := c.status(l); s.Leader == l.address && s.Trouble == "" {
				leader = l
			}
		}
		return leader != nil
	})
	for _, l := range c.all {
		if l != leader {
			followers = append(followers, l)
		}
	}
	return leader, followers
}

// steps waits until all groups have committed more steps in a quorum of all of them, and returns how long
// that took.
func (c *cluster) steps(more int) time.Duration {
	c.t.Helper()
	before := c.lowest()
	return c.until("more steps of all groups", func() bool { return c.together(before + int64(more)) })
}

// settled waits until all lighthouses follow one leader, which all reach.
func (c *cluster) settled() {
	c.t.Helper()
	c.until("all follow one leader", func() bool {
		first := c.status(c.all[0]).Leader
		for _, l := range c.all {
			if s := c.status(l); s.Leader == "" || s.Leader != first || s.Trouble != "" {
				return false
			}
		}
		return true
	})
}

// bounded returns a context for a call.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, time.Minute)
}
