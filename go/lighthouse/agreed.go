package lighthouse

import (
	"log/slog"
	"sync"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
)

// agreed keeps the state of a job in the log of a cluster, so that the next leader continues from it.
//
// Invariant: nobody hears of a quorum, or of a round of the rendezvous, before the log has it. The job passes each new state to keep,
// and then each answer to once.
type agreed struct {
	log     *slog.Logger
	tasks   *sync.WaitGroup
	propose func(state []byte) error // returns once the log has the state
	lost    func(err error)          // called if it does not: this lighthouse does not lead any more

	mu       sync.Mutex
	pending  *state // the newest state that is not proposed yet, nil if there is none
	proposes bool
	owed     []func() // answers that wait for the pending state
	inFlight []func() // answers that wait for the proposed state
	failed   bool
}

// keep proposes a state. It does not block. States that follow each other quickly are proposed together.
func (a *agreed) keep(s state) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pending = &s
	if !a.proposes {
		a.proposes = true
		rpc.Go(a.tasks, a.log, "state in the log of the cluster", a.run)
	}
}

// once calls do, on another goroutine, when the log has all states that were passed to keep, and returns true. If the log has them
// already, it returns false, and does not call do.
func (a *agreed) once(do func()) (later bool) {
	if a == nil {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.failed: // the job is being closed, which answers all that wait
		return true
	case a.pending != nil:
		a.owed = append(a.owed, do)
	case a.proposes:
		a.inFlight = append(a.inFlight, do)
	default:
		return false
	}
	return true
}

func (a *agreed) run() {
	for {
		s := a.next()
		if s == nil {
			return
		}
		text, err := s.encode()
		if err == nil {
			err = a.propose(text)
		}
		if err != nil {
			a.fail()
			a.lost(err)
			return
		}
		a.answer()
	}
}

// next takes the pending state and the answers that wait for it.
func (a *agreed) next() *state {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.pending
	a.pending = nil
	a.proposes = s != nil
	a.inFlight, a.owed = a.owed, nil
	return s
}

// answer calls the functions that waited for the proposed state. A function that is added meanwhile waits for its turn.
func (a *agreed) answer() {
	for {
		a.mu.Lock()
		due := a.inFlight
		a.inFlight = nil
		a.mu.Unlock()
		if len(due) == 0 {
			return
		}
		for _, do := range due {
			do()
		}
	}
}

func (a *agreed) fail() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.failed, a.owed, a.inFlight = true, nil, nil
}

// agree keeps the state of a new job in the log of the cluster from now on, and continues from what the log has. The caller holds the
// server's lock, and nothing else uses the job yet.
func (j *job) agree(c *cluster) {
	j.agreed = &agreed{
		log: j.log, tasks: &j.server.tasks,
		propose: func(state []byte) error { return c.node.Propose(uint64(j.term), j.name, state) },
		lost:    func(err error) { j.server.dropJob(j, err) },
	}
	text := c.node.States()[j.name]
	if text == nil {
		return
	}
	s, err := decodeState(text, j.name)
	if err != nil { // a later version wrote it
		j.log.Error("torchft: the state of the job in the log of the cluster is not understood, and is ignored", "error", err)
		return
	}
	j.restore(s)
	if s.Highest > 0 {
		_ = j.step(quorum.Recalled{Past: s.Past, Highest: s.Highest}) // step has logged an error
	}
}
