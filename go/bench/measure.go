package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/torchft/torchft/go/torchftpb"
)

// requestTimeout is the timeout of every call and connection of a measurement.
const requestTimeout = 5 * time.Minute

// group is one replica group's connection to the lighthouse.
type group interface {
	// begin sends the request for the quorum of a step, without waiting for the answer.
	begin(step int64) error
	// wait receives the answer, and returns its size in bytes.
	wait() (bytes int, err error)
	// keep makes the group keep its answers for check.
	keep()
	// check decodes the last answer.
	check() (members int, steps int64)
	close()
}

// kinds are the constructors of connected groups, by the name of the kind.
var kinds = map[string]func(ctx context.Context, lighthouse string, member *torchftpb.QuorumMember) (group,
	error){
	"upstream": newUpstream,
	"ours":     newOurs,
}

func kindNames() []string { return slices.Sorted(maps.Keys(kinds)) }

// newMember returns a record like that of a real group.
func newMember(i int) *torchftpb.QuorumMember {
	return &torchftpb.QuorumMember{
		ReplicaId:    fmt.Sprintf("train_ddp_%05d:%08x-7c1e-4b52-9d0a-%012x", i, i*2654435761, i*40503),
		Address:      fmt.Sprintf("http://node-%05d.cluster.local:%d", i, 30000+i%20000),
		StoreAddress: fmt.Sprintf("node-%05d.cluster.local:29500", i),
		WorldSize:    8,
		Data:         `{"backend": "gloo"}`,
	}
}

// workers is the number of goroutines that connect the groups, and send the requests of a round.
const workers = 8

func measure(ctx context.Context, s settings) (result, error) {
	r := result{Kind: s.kind, Groups: s.groups}
	start := time.Now()
	groups, err := connect(ctx, s)
	defer func() {
		for _, g := range groups {
			if g != nil {
				g.close()
			}
		}
	}()
	if err != nil {
		return r, err
	}
	r.ConnectMS = milliseconds(time.Since(start))
	for _, g := range checked(groups) {
		g.keep()
	}

	took, bytes, err := round(groups, 0)
	if err != nil {
		return r, fmt.Errorf("the first round: %w", err)
	}
	r.FirstMS, r.FirstBytes = milliseconds(took), float64(bytes)
	var all []time.Duration
	before := usage(s.pid)
	for step := int64(1); len(all) < s.rounds && (len(all) == 0 || time.Since(start) < s.limit); step++ {
		took, bytes, err := round(groups, step)
		if err != nil {
			return r, fmt.Errorf("round %d: %w", step, err)
		}
		all = append(all, took)
		r.RoundBytes += float64(bytes)
	}
	after := usage(s.pid)
	r.Rounds = len(all)
	r.RoundBytes /= float64(len(all))
	r.RoundCPUMS = milliseconds(after.cpu-before.cpu) / float64(len(all))
	r.MemoryMB, r.PeakMB = after.memoryMB, after.peakMB
	slices.Sort(all)
	r.FastestMS, r.RoundMS, r.SlowestMS = milliseconds(all[0]), milliseconds(all[len(all)/2]),
		milliseconds(all[len(all)-1])
	if s.idle > 0 {
		r.IdleSeconds = s.idle.Seconds()
		r.IdleCPU = idle(s)
	}
	return r, nil
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func connect(ctx context.Context, s settings) ([]group, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	groups := make([]group, s.groups)
	return groups, inParallel(len(groups), func(i int) (err error) {
		groups[i], err = kinds[s.kind](ctx, s.lighthouse, newMember(i))
		return err
	})
}

// inParallel calls do for each i below n, on several goroutines, and returns the first error.
func inParallel(n int, do func(i int) error) error {
	var next atomic.Int64
	var all sync.WaitGroup
	errs := make(chan error, workers)
	for range workers {
		all.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				if err := do(i); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	all.Wait()
	close(errs)
	return <-errs
}

// checked returns the groups whose answers are verified.
func checked(groups []group) []group { return []group{groups[0], groups[len(groups)-1]} }

// round sends the requests of all groups at once, and returns the time until all have their answers.
func round(groups []group, step int64) (took time.Duration, bytes int64, err error) {
	var received atomic.Int64
	var all sync.WaitGroup
	errs := make(chan error, len(groups)+1)
	start := time.Now()
	for _, g := range groups {
		all.Go(func() {
			n, err := g.wait()
			if err != nil {
				errs <- err
			}
			received.Add(int64(n))
		})
	}
	if err := inParallel(len(groups), func(i int) error { return groups[i].begin(step) }); err != nil {
		return 0, 0, err // the goroutines above still wait; they end with the process
	}
	all.Wait()
	took = time.Since(start)
	errs <- nil // received if there is no error
	if err := <-errs; err != nil {
		return 0, 0, err
	}
	for _, g := range checked(groups) {
		if members, steps := g.check(); members != len(groups) || steps != step*int64(len(groups)) {
			return 0, 0, fmt.Errorf("the quorum has %d members at %d steps in sum, not %d at step %d",
				members, steps, len(groups), step)
		}
	}
	return took, received.Load(), nil
}

// idle returns the cores that the lighthouse uses while the groups send only heartbeats, as those of kind
// ours do by themselves.
func idle(s settings) (cores float64) {
	time.Sleep(2 * time.Second) // until the heartbeats are spread over time
	before, start := usage(s.pid), time.Now()
	time.Sleep(s.idle)
	return float64(usage(s.pid).cpu-before.cpu) / float64(time.Since(start))
}
