package lighthouse

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/rendezvous"
)

const (
	// diskTime bounds each wait for the disk: a job's first request waits for the state, and the lighthouse's end for the last write. A system call on a hanging disk cannot be interrupted, so the goroutine of the keeper
	// is left behind if it has not ended by then.
	diskTime = 2 * time.Second
	// writeAgain is the pause before a write is retried.
	writeAgain = time.Second
)

// disk has the operations of the operating system that a keeper uses.
type disk struct {
	read  func(path string) ([]byte, error)
	write func(path string, s state, wanted func() bool) error
}

// keeper reads the state of a job from disk, and writes the latest one, on a separate goroutine and without holding a lock: a slow
// disk blocks only this goroutine.
type keeper struct {
	path  string
	log   *slog.Logger
	disk  disk
	read  chan struct{} // closed when the state has been read
	late  chan struct{} // closed when the job may begin: the state has been read, or diskTime has passed
	left  atomic.Bool   // nothing waits for the last write any more: it is discarded if it ends later
	wake  chan struct{} // capacity 1
	quit  chan struct{}
	ended chan struct{} // closed when the goroutine has ended

	mu      sync.Mutex
	pending *state    // the state to be written, nil: none
	since   time.Time // since when a read or write is pending; zero if none is
	err     error     // of the last read or write
	logged  bool      // err has been logged
}

func newKeeper(path string, log *slog.Logger, disk disk) *keeper {
	return &keeper{
		path: path, log: log, disk: disk, since: time.Now(),
		read: make(chan struct{}), late: make(chan struct{}), wake: make(chan struct{}, 1), quit: make(chan struct{}), ended: make(chan struct{}),
	}
}

// keep starts to read the state of a job from disk, and to write it there from then on.
func (j *job) keep() {
	k := newKeeper(filepath.Join(j.cfg.StateDir, j.name+".state"), j.log, j.cfg.disk)
	j.keeper = k
	var alone sync.WaitGroup // not the server's tasks: Shutdown must not wait for a hanging disk for longer than waitForLast does
	rpc.Go(&alone, j.log, "state on disk", func() { k.run(j.recallFrom) })
	rpc.Go(&j.server.tasks, j.log, "the first state on disk", k.waitForFirst)
	rpc.Go(&j.server.tasks, j.log, "the last state on disk", k.waitForLast)
}

// recallFrom continues the job from the content of its file.
func (j *job) recallFrom(path string, text []byte, err error) {
	switch {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		j.log.Warn("torchft: the state of the job on disk cannot be read, and is ignored", "file", path, "error", err)
	default:
		s, err := decodeState(text, j.name)
		if err != nil {
			aside, now := path+".corrupt", time.Now()
			// It is kept for keepFilesFor from now on. Before it has its new name, so that a sweep does not find it with the old time.
			_ = os.Chtimes(path, now, now)
			j.log.Warn("torchft: the state of the job on disk is damaged, and is ignored", "file", path, "error", err, "moved_to", aside,
				"moved", os.Rename(path, aside) == nil)
			return
		}
		if !s.ended() {
			j.log.Info("torchft: the job continues from its state on disk", "quorum_id", s.Past.ID, "step", s.Past.Step, "members", len(s.Past.Members))
		}
		j.restore(s)
		if s.Highest > 0 { // the job has had a quorum
			_ = j.feed(quorum.Recalled{Past: s.Past, Highest: s.Highest}) // step has logged an error
		}
	}
}

// restore restores the parts of a state that do not belong to the quorum machine. If the disk answers late, nodes may have registered
// already: then their rendezvous is kept.
func (j *job) restore(s state) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.kept.Highest == 0 {
		j.kept.Highest, j.kept.Past = s.Highest, s.Past
	}
	if j.rendezvous.Nodes() == 0 {
		j.kept.Rendezvous = s.Rendezvous
		j.rendezvous = rendezvous.NewMachine(j.cfg.rendezvousTiming(), s.Rendezvous, time.Now())
		j.place(rendezvous.Woken{})
	}
}

// waitForFirst lets the job begin when the state has been read, or after diskTime without it. The quorum of a state that is read later is
// still used if the job has had no newer one. The highest id of that state always counts, so that no id is used twice.
func (k *keeper) waitForFirst() {
	late := time.NewTimer(diskTime)
	defer late.Stop()
	defer close(k.late)
	select {
	case <-k.read:
	case <-k.quit:
	case <-late.C:
		k.log.Warn("torchft: the state of the job on disk was not read, since the disk does not answer; the job begins without it", "file", k.path, "waited", diskTime)
	}
}

// await returns when the job may begin, or when ctx ends.
func (k *keeper) await(ctx context.Context) {
	if k == nil {
		return
	}
	select {
	case <-k.late:
	case <-ctx.Done():
	}
}

// keep queues a state to be written. It does not block.
func (k *keeper) keep(s state) {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pending = &s // replaces an older state that has not been written yet
	if k.since.IsZero() {
		k.since = time.Now()
	}
	k.nudge()
}

func (k *keeper) nudge() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

func (k *keeper) stop() {
	if k != nil {
		close(k.quit)
	}
}

// waitForLast returns when no write is pending, or diskTime after the keeper was stopped.
func (k *keeper) waitForLast() {
	<-k.quit
	late := time.NewTimer(diskTime)
	defer late.Stop()
	select {
	case <-k.ended:
	case <-late.C:
		k.left.Store(true)
		k.log.Warn("torchft: the last state of the job may not be on disk: the disk does not answer", "file", k.path, "waited", diskTime)
	}
}

func (k *keeper) run(recall func(path string, text []byte, err error)) {
	defer close(k.ended)
	text, err := k.disk.read(k.path)
	recall(k.path, text, err)
	close(k.read)
	k.done(nil, nil)
	again := time.NewTimer(writeAgain)
	defer again.Stop()
	for last := false; !last; {
		select {
		case <-k.wake:
		case <-again.C:
		case <-k.quit:
			last = true
		}
		k.mu.Lock()
		s := k.pending
		k.mu.Unlock()
		if s == nil {
			continue
		}
		err := k.disk.write(k.path, *s, func() bool { return !k.left.Load() })
		k.done(s, err)
		again.Reset(writeAgain)
	}
}

// done records the result of a write, or of the first read if s is nil.
func (k *keeper) done(s *state, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.err = err
	switch {
	case err != nil:
		if !k.logged {
			k.log.Warn("torchft: the state of the job is not kept on disk", "file", k.path, "error", err)
		}
		k.logged = true
	case k.pending == s:
		k.pending, k.since = nil, time.Time{}
		if k.logged {
			k.log.Info("torchft: the state of the job is kept on disk again", "file", k.path)
		}
		k.logged = false
	default: // a newer state was queued during the write
		k.since = time.Now()
		k.nudge()
	}
}

// trouble returns why the latest state is not on disk, and for how long it has not been; empty if it is on disk, or if its write has
// been pending for less than diskTime and the last one did not fail.
func (k *keeper) trouble(now time.Time) (why string, unkept time.Duration) {
	if k == nil {
		return "", 0
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.since.IsZero() {
		return "", 0
	}
	unkept = now.Sub(k.since)
	switch {
	case k.err != nil:
		return k.err.Error(), unkept
	case unkept >= diskTime:
		return fmt.Sprintf("%s: the disk does not answer", k.path), unkept
	}
	return "", 0
}

// look logs once that the disk does not answer.
func (k *keeper) look(now time.Time) {
	why, unkept := k.trouble(now)
	if why == "" {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.logged {
		k.logged = true
		k.log.Warn("torchft: the state of the job is not kept on disk", "error", why, "for", unkept.Round(time.Second))
	}
}
