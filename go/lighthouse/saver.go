package lighthouse

import (
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/rendezvous"
)

// writeAgain is the pause before a write to disk is retried.
const writeAgain = time.Second

// store has the latest state of each job: the log of a cluster (replica.Node), or a directory (files).
type store interface {
	States() map[string][]byte
	// Propose replaces the state of a job, or removes it if the state is empty. It returns when the log or
	// the disk has it.
	Propose(term uint64, job string, state []byte) error
}

// saver keeps the state of a job in the store, so that the next leader, or the restarted lighthouse,
// continues from it.
//
// Invariant in a cluster: nobody hears of a quorum, or of a round of the rendezvous, before the log has it.
// The job passes each new state to keep, and then each answer to once. Without a cluster nothing waits for
// the disk: it may fail or hang.
type saver struct {
	log     *slog.Logger
	tasks   *sync.WaitGroup
	propose func(state []byte) error
	lost    func(err error) // called if the log does not get a state: this lighthouse does not lead any more
	disk    <-chan struct{} // not nil without a cluster: writes are retried until it is closed

	mu       sync.Mutex
	pending  *state   // the newest state that is not proposed yet, nil if there is none
	runs     bool     // run does: a state is proposed, or answers are given
	waiting  []func() // answers that wait for the pending state
	inFlight []func() // answers that wait for the proposed state, or for the answers before them
	failed   bool

	since time.Time // since when the newest state is not on disk; zero if it is
	err   error     // of the last write to disk
}

// keep proposes a state. It does not block. States that follow each other quickly are proposed together.
func (k *saver) keep(s state) {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pending = &s
	if k.since.IsZero() {
		k.since = time.Now()
	}
	if !k.runs {
		k.runs = true
		rpc.Go(k.tasks, k.log, "the state of a job", k.run)
	}
}

// once calls do, on another goroutine, when the log has all states that were passed to keep, and returns
// true. If nothing has to wait for the log, it returns false, and does not call do.
func (k *saver) once(do func()) (later bool) {
	if k == nil || k.disk != nil {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.failed: // the job is being closed, which answers all that wait
		return true
	case k.pending != nil:
		k.waiting = append(k.waiting, do)
	case k.runs:
		k.inFlight = append(k.inFlight, do)
	default:
		return false
	}
	return true
}

var errAnswer = errors.New("an answer failed with an internal error")

func (k *saver) run() {
	err := errAnswer // if an answer panics
	defer func() {
		if err != nil {
			k.fail()
			k.lost(err)
		}
	}()
	for {
		due, s := k.next()
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
			err = k.propose(text)
		}
		if k.disk != nil && !k.wrote(s, err) || k.disk == nil && err != nil {
			return
		}
		err = errAnswer
	}
}

// next returns the answers whose state the log has now, and the state that is to be proposed after them.
func (k *saver) next() (due []func(), s *state) {
	k.mu.Lock()
	defer k.mu.Unlock()
	due, s = k.inFlight, k.pending
	k.inFlight, k.waiting, k.pending = k.waiting, nil, nil
	k.runs = s != nil || len(due) > 0
	return due, s
}

func (k *saver) fail() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.failed, k.waiting, k.inFlight = true, nil, nil
}

// wrote records the result of a write to disk. After a failure it waits for the next attempt. It returns
// false if there is none: the job has been closed.
func (k *saver) wrote(s *state, err error) bool {
	k.mu.Lock()
	before := k.err
	k.err = err
	switch {
	case k.pending != nil: // a newer state was kept meanwhile
	case err != nil:
		k.pending = s
	default:
		k.since = time.Time{}
	}
	k.mu.Unlock()
	if err == nil {
		if before != nil {
			k.log.Info("torchft: the state of the job is kept on disk again")
		}
		return true
	}
	if before == nil {
		k.log.Warn("torchft: the state of the job is not kept on disk", "error", err)
	}
	select {
	case <-k.disk:
		k.log.Warn("torchft: the last state of the job is not on disk", "error", err)
		return false
	default:
	}
	select {
	case <-k.disk:
	case <-time.After(writeAgain):
	}
	return true
}

// trouble returns why the latest state is not on disk, and for how long it has not been; empty if the last
// write did not fail.
func (k *saver) trouble(now time.Time) (why string, unkept time.Duration) {
	if k == nil {
		return "", 0
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.err == nil {
		return "", 0
	}
	return k.err.Error(), now.Sub(k.since)
}

// begin keeps the state of a new job in the store from now on, and continues from the state there. The caller
// holds the server's lock, and nothing else uses the job yet.
func (j *job) begin(in store) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.saver = &saver{
		log: j.log, tasks: &j.server.tasks,
		propose: func(state []byte) error { return in.Propose(uint64(j.term), j.name, state) },
		lost:    func(err error) { j.server.dropJob(j, err) },
	}
	if j.server.cluster == nil {
		j.saver.disk = j.stop
	}
	j.restore(in.States()[j.name])
}

// restore continues the job from a state in the store, if there is one. If the disk answers late, the job may
// have begun without it: then its own rendezvous and newer quorum are kept, but no quorum id of the state is
// used again. The caller holds mu.
func (j *job) restore(text []byte) {
	if text == nil || j.ended != nil {
		return
	}
	s, err := decodeState(text, j.name)
	if err != nil { // a later version wrote it
		j.log.Error("torchft: the kept state of the job is not understood, and is ignored", "error", err)
		return
	}
	if j.server.cluster == nil && !s.ended() {
		j.log.Info("torchft: the job continues from its state on disk", "quorum_id", s.Past.ID,
			"step", s.Past.Step, "members", len(s.Past.Members))
	}
	if j.kept.Highest == 0 {
		j.kept.Kept = s.Kept
	}
	if j.rendezvous.Nodes() == 0 {
		j.kept.Rendezvous = s.Rendezvous
		j.rendezvous = rendezvous.NewMachine(j.cfg.rendezvousTiming(), s.Rendezvous, time.Now())
		j.place(rendezvous.Woken{})
	}
	if s.Highest > 0 { // the job has had a quorum
		_ = j.step(quorum.Recalled{Kept: s.Kept}) // step has logged an error
		reported := j.server.keepers.copied(j.name, time.Now())
		_ = j.step(quorum.Copied{Copies: s.Copies, Reporting: reported.Reporting})
		_ = j.step(reported)
	}
}

// onceKept calls do, with mu held: in a cluster once the log has the present state, otherwise at once. The
// caller holds mu.
func (j *job) onceKept(do func()) {
	if !j.saver.once(func() {
		j.mu.Lock()
		defer j.mu.Unlock()
		do()
	}) {
		do()
	}
}
