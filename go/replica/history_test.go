package replica_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
	"github.com/torchft/torchft/go/replica"
)

// step is what a leader did with the state of a job: it read it, or replaced the one that it knew.
type step struct {
	read     bool
	from, to string
	unknown  bool // the outcome
}

// register is the state of one job. A step with an unknown outcome ends with the history, and may have had no
// effect.
var register = porcupine.Model{
	Init: func() any { return "" },
	Step: func(state, input, output any) (bool, any) {
		s := input.(step)
		switch {
		case s.read:
			return output == state, state
		case s.from == state:
			return true, s.to
		}
		return s.unknown, state
	},
}

// history collects the steps of all leaders.
type history struct {
	mu    sync.Mutex
	began time.Time
	steps []porcupine.Operation
}

func (h *history) now() int64 { return int64(time.Since(h.began)) }

func (h *history) add(client int, called int64, s step, result any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	ended := h.now()
	if s.unknown {
		ended = int64(24 * time.Hour)
	}
	h.steps = append(h.steps, porcupine.Operation{ClientId: client, Input: s, Call: called, Output: result,
		Return: ended})
}

// serve does what a lighthouse does: while it leads, it reads the state, and replaces it by the next.
func (h *history) serve(t *testing.T, client int, n *replica.Node, random *rand.Rand, end <-chan struct{}) {
	var lead replica.Lead
	known := ""
	for i := 0; ; i++ {
		select {
		case lead = <-n.Leadership():
			known = string(n.States()["job"])
		case <-end:
			return
		case <-time.After(time.Duration(random.IntN(60)) * time.Millisecond):
		}
		if !lead.Leads {
			continue
		}
		called := h.now()
		if random.IntN(3) == 0 {
			if n.Verify(t.Context(), lead.Term) == nil {
				h.add(client, called, step{read: true}, string(n.States()["job"]))
			}
			continue
		}
		next := step{from: known, to: fmt.Sprintf("%d/%d/%d", client, lead.Term, i)}
		err := n.Propose(lead.Term, "job", []byte(next.to))
		next.unknown = errors.Is(err, replica.ErrUnknown)
		if err == nil || next.unknown {
			h.add(client, called, next, nil)
		}
		if err == nil {
			known = next.to
		} else {
			lead.Leads = false // it would begin anew
		}
	}
}

// In random histories with failures, the states of a job are linearizable: all leaders report one sequence.
func TestTheStatesOfAJobAreOneSequence(t *testing.T) {
	runs := 12
	switch {
	case testmain.Race():
		runs = 3 // more of them have crashed the race detector
	case testmain.Full():
		runs = 300
	}
	steps, longest := 0, 0
	for seed := range runs {
		synctest.Test(t, func(t *testing.T) {
			h := randomHistory(t, uint64(seed)) //nolint:gosec // small
			steps += len(h.steps)
			longest = max(longest, len(h.steps))
			result, _ := porcupine.CheckOperationsVerbose(register, h.steps, 0)
			require.Equal(t, porcupine.Ok, result, "seed %d", seed)
		})
	}
	t.Logf("%d histories with %d steps", runs, steps)
	require.Greater(t, steps, 50*runs)
}

func randomHistory(t *testing.T, seed uint64) *history {
	random := rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // for a test
	names := []string{"a", "b", "c", "d", "e"}[:3+2*random.IntN(2)]
	w := newWorld(t, names...)
	h := &history{began: time.Now()}
	var tasks sync.WaitGroup
	ends := make([]chan struct{}, len(names))
	start := func(i int) {
		n := w.hosts[i].start()
		ends[i] = make(chan struct{})
		end, random := ends[i], rand.New(rand.NewPCG(seed, random.Uint64())) //nolint:gosec // for a test
		tasks.Go(func() { h.serve(t, i, n, random, end) })
	}
	for i := range names {
		start(i)
	}
	var undo []func()
	for time.Since(h.began) < 40*time.Second {
		time.Sleep(time.Duration(random.IntN(1500)) * time.Millisecond)
		i, j := random.IntN(len(names)), random.IntN(len(names))
		switch what := random.IntN(10); {
		case what < 3 && w.hosts[i].node != nil:
			close(ends[i])
			if random.IntN(3) == 0 {
				w.hosts[i].close()
			} else {
				w.hosts[i].kill()
			}
		case what < 3:
			start(i)
		case what < 6 && i != j:
			w.network.Sever(names[i], names[j])
			undo = append(undo, func() { w.network.Heal(names[i], names[j]) })
		case what < 7:
			w.network.Pause(names[i])
			undo = append(undo, func() { w.network.Resume(names[i]) })
		case what == 7 && w.hosts[i].node != nil:
			_ = w.hosts[i].node.Snapshot()
		default:
			for _, one := range undo {
				one()
			}
			undo = nil
			for i := range names {
				if w.hosts[i].node == nil {
					start(i)
				}
			}
		}
	}
	for i := range names {
		if w.hosts[i].node != nil {
			close(ends[i])
		}
	}
	tasks.Wait()
	for _, one := range undo {
		one()
	}
	for _, host := range w.hosts {
		if host.node == nil {
			host.start()
		}
	}
	settle(t, "the cluster recovers, whatever failed", func() bool {
		for _, host := range w.hosts {
			if s := host.node.Status(); s.Leader == "" || s.Leader != w.hosts[0].node.Status().Leader ||
				s.Trouble != "" {
				return false
			}
		}
		return true
	})
	return h
}
