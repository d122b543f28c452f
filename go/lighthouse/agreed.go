package lighthouse

import (
	"errors"
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
	pending  *state   // the newest state that is not proposed yet, nil if there is none
	runs     bool     // run does: a state is proposed, or answers are given
	owed     []func() // answers that wait for the pending state
	inFlight []func() // answers that wait for the proposed state, or for the answers before them
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
	if !a.runs {
		a.runs = true
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
	case a.runs:
		a.inFlight = append(a.inFlight, do)
	default:
		return false
	}
	return true
}

var errAnswer = errors.New("an answer failed with an internal error")

func (a *agreed) run() {
	err := errAnswer // if an answer panics
	defer func() {
		if err != nil {
			a.fail()
			a.lost(err)
		}
	}()
	for {
		due, s := a.next()
		for _, do := range due {
			do()
		}
		switch {
		case s == nil && len(due) == 0:
			err = nil
			return
		case s == nil:
			continue // answers may have been added meanwhile
		}
		var text []byte
		if text, err = s.encode(); err == nil {
			err = a.propose(text)
		}
		if err != nil {
			return
		}
		err = errAnswer
	}
}

// next returns the answers for which the log has the state now, and the state that is to be proposed after them.
func (a *agreed) next() (due []func(), s *state) {
	a.mu.Lock()
	defer a.mu.Unlock()
	due, s = a.inFlight, a.pending
	a.inFlight, a.owed, a.pending = a.owed, nil, nil
	a.runs = s != nil || len(due) > 0
	return due, s
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
		j.mu.Lock() // for the timers
		defer j.mu.Unlock()
		_ = j.step(quorum.Recalled{Past: s.Past, Highest: s.Highest}) // step has logged an error
	}
}

// onceKept calls do, with mu held: in a cluster once the log has the present state, otherwise at once. The caller holds mu.
func (j *job) onceKept(do func()) {
	if !j.agreed.once(func() {
		j.mu.Lock()
		defer j.mu.Unlock()
		do()
	}) {
		do()
	}
}
