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
	// begin asks for the quorum of a step. It does not wait for the answer.
	begin(step int64) error
	// wait returns how many bytes the answer had.
	wait() (bytes int, err error)
	// keep lets it keep its answers for check.
	keep()
	// check asks what the last answer said.
	check() (members int, steps int64)
	// alive says that the group is alive, and returns when to say it again.
	alive(ctx context.Context) (time.Duration, error)
	close()
}

// kinds make a group of some name, connected.
var kinds = map[string]func(ctx context.Context, lighthouse string, member *torchftpb.QuorumMember) (group, error){
	"upstream": newUpstream,
	"ours":     newOurs,
}

func kindNames() []string { return slices.Sorted(maps.Keys(kinds)) }

// newMember is a group as a real one describes itself.
func newMember(i int) *torchftpb.QuorumMember {
	return &torchftpb.QuorumMember{
		ReplicaId:    fmt.Sprintf("train_ddp_%05d:%08x-7c1e-4b52-9d0a-%012x", i, i*2654435761, i*40503),
		Address:      fmt.Sprintf("http://node-%05d.cluster.local:%d", i, 30000+i%20000),
		StoreAddress: fmt.Sprintf("node-%05d.cluster.local:29500", i),
		WorldSize:    8,
		Data:         `{"backend": "gloo"}`,
	}
}

// workers is how many goroutines connect, and send the requests of a round.
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
	r.FastestMS, r.RoundMS, r.SlowestMS = milliseconds(all[0]), milliseconds(all[len(all)/2]), milliseconds(all[len(all)-1])
	if s.idle > 0 {
		r.IdleSeconds = s.idle.Seconds()
		r.IdleCPU, err = idle(ctx, groups, s)
	}
	return r, err
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

// inParallel runs something for each i below n, on some goroutines, and returns the first error.
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

// checked are the groups whose answers are looked at.
func checked(groups []group) []group { return []group{groups[0], groups[len(groups)-1]} }

// round lets every group ask at once, and returns how long it took until all had their answers.
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
		return 0, 0, err // those that wait end with the process
	}
	all.Wait()
	took = time.Since(start)
	errs <- nil
	if err := <-errs; err != nil {
		return 0, 0, err
	}
	for _, g := range checked(groups) {
		if members, steps := g.check(); members != len(groups) || steps != step*int64(len(groups)) {
			return 0, 0, fmt.Errorf("the quorum has %d members at %d steps in sum, not %d at step %d", members, steps, len(groups), step)
		}
	}
	return took, received.Load(), nil
}

// idle lets the groups do nothing but be alive, and returns how many cores that costs the lighthouse.
func idle(ctx context.Context, groups []group, s settings) (cores float64, err error) {
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	failed := make(chan error, len(groups))
	for i, g := range groups {
		all.Go(func() {
			pause := time.Duration(i) * time.Second / time.Duration(len(groups)) // not all at once
			for {
				select {
				case <-ctx.Done():
					return
				case <-time.After(pause):
				}
				var err error
				if pause, err = g.alive(ctx); err != nil {
					if ctx.Err() == nil {
						failed <- err
					}
					return
				}
			}
		})
	}
	time.Sleep(2 * time.Second) // until all have found their pace
	before, start := usage(s.pid), time.Now()
	time.Sleep(s.idle)
	after, took := usage(s.pid), time.Since(start)
	cancel()
	all.Wait()
	close(failed)
	return float64(after.cpu-before.cpu) / float64(took), <-failed
}
