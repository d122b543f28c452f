package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/membership/lighthouses"
	"github.com/torchft/torchft/go/quorum"
)

// comeback is the result of a benchmark in which a lighthouse with many groups is killed and restarted, and
// all groups reconnect at once, as managers do (lighthouses.Member).
type comeback struct {
	Groups int     `json:"groups"`
	AwayS  float64 `json:"away_s"` // time without a lighthouse
	// from the moment when it listens again until half of the groups are connected
	HalfMS   float64 `json:"half_ms"`
	AllMS    float64 `json:"all_ms"`    // until all are connected
	CPUMS    float64 `json:"cpu_ms"`    // of the lighthouse, until all are connected
	MemoryMB float64 `json:"memory_mb"` // resident, after the reconnection
	PeakMB   float64 `json:"peak_mb"`
}

// returning has groups that each keep a stream open, and open a new one when it breaks.
type returning struct {
	mu      sync.Mutex
	in      int         // groups that are connected
	since   []time.Time // when each group was connected after the last forget
	changed chan struct{}
}

func (r *returning) came(in int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.in += in
	if in > 0 {
		r.since = append(r.since, time.Now())
	}
	close(r.changed)
	r.changed = make(chan struct{})
}

// wait returns when n groups are connected.
func (r *returning) wait(ctx context.Context, n int) error {
	for {
		r.mu.Lock()
		in, changed := r.in, r.changed
		r.mu.Unlock()
		if in == n {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%d groups are connected, not %d: %w", in, n, ctx.Err())
		}
	}
}

func (r *returning) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.since = nil
}

// attend keeps a group's stream open.
func (r *returning) attend(ctx context.Context, group *lighthouses.Member) {
	for failed := 1; ctx.Err() == nil; failed++ {
		in := false
		_ = group.Attend(ctx, time.Second, func() {
			if !in {
				in, failed = true, 0
				r.came(1)
			}
		}, func() quorum.Doing { return quorum.Doing{Phase: quorum.Training} })
		if in {
			r.came(-1)
		}
		rpc.Pause(ctx, failed)
	}
}

// measureComeback kills and restarts a lighthouse. The command is completed by --bind and a few other
// options.
func measureComeback(
	ctx context.Context, command string, groups int, away time.Duration,
) (c comeback, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	bind, err := freePort()
	if err != nil {
		return c, err
	}
	first, err := startLighthouse(ctx, command, bind, groups)
	if err != nil {
		return c, err
	}
	defer end(first)
	r := &returning{changed: make(chan struct{})}
	members := make([]*lighthouses.Member, groups)
	attending, stop := context.WithCancel(ctx)
	var all sync.WaitGroup
	defer func() {
		stop()
		all.Wait()
	}()
	if err := inParallel(groups, func(i int) (err error) {
		members[i], err = lighthouses.Join(ctx, "http://"+bind, newMember(i).GetReplicaId(), requestTimeout,
			rpc.Dialing{})
		return err
	}); err != nil {
		return c, err
	}
	for _, member := range members {
		all.Go(func() { r.attend(attending, member) })
	}
	if err := r.wait(ctx, groups); err != nil {
		return c, err
	}

	end(first)
	if err := r.wait(ctx, 0); err != nil {
		return c, err
	}
	r.forget()
	time.Sleep(away)
	second, err := startLighthouse(ctx, command, bind, groups)
	if err != nil {
		return c, err
	}
	defer end(second)
	listens := time.Now()
	if err := r.wait(ctx, groups); err != nil {
		return c, err
	}
	used := usage(second.Process.Pid)
	slices.SortFunc(r.since, time.Time.Compare)
	return comeback{
		Groups: groups, AwayS: away.Seconds(),
		HalfMS: milliseconds(r.since[len(r.since)/2].Sub(listens)),
		AllMS:  milliseconds(r.since[len(r.since)-1].Sub(listens)),
		CPUMS:  milliseconds(used.cpu), MemoryMB: used.memoryMB, PeakMB: used.peakMB,
	}, nil
}

func freePort() (bind string, err error) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return lis.Addr().String(), lis.Close()
}

// end kills a process with SIGKILL, and waits for it.
func end(process *exec.Cmd) {
	_ = process.Process.Kill()
	_ = process.Wait()
}

// startLighthouse returns when the process has printed that it listens.
func startLighthouse(ctx context.Context, command, bind string, groups int) (*exec.Cmd, error) {
	args := append(strings.Fields(command), "--bind", bind, "--min_replicas", strconv.Itoa(groups),
		"--state_dir", "")
	c := exec.CommandContext(ctx, args[0], args[1:]...)
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || !strings.Contains(line, "listening") {
		_ = c.Process.Kill()
		return nil, errors.Join(fmt.Errorf("%q does not listen: its output was %q", command, line), err,
			c.Wait())
	}
	return c, nil
}

func printComeback(s settings) error {
	c, err := measureComeback(context.Background(), s.comeback, s.groups, s.away)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(c)
}
