package heal

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Settings of a Fetch. Zero values stand for defaults.
type Settings struct {
	BlockSize  int64
	Streams    int           // number of streams to each source
	Unchecked  bool          // transfer without checksums
	StallAfter time.Duration // a stream that receives nothing for this time is closed
	Window     int64         // blocks in a window; required if some of the memory is on a device
}

// Role determines which blocks a target takes from a source.
type Role int

const (
	// Assigned is the source that the quorum assigns to the target, which takes over its state.
	Assigned Role = iota
	// Additional is any other source. The target takes a block from it only if the block has the checksum
	// that the assigned source has announced.
	Additional
	roles
)

// Fetch fills memory from one or more sources. If all of them fail, received blocks are kept, and a source
// that is added later delivers the missing ones.
type Fetch struct {
	settings Settings
	layout   Layout
	memory   *Memory
	queue    *queue
	windows  *windows
	received atomic.Int64
	retries  retries

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	worked func() // the result of Working; it may be called more than once
	lives  sync.WaitGroup

	asksSums chan struct{} // a semaphore: one stream at a time asks the assigned source for its checksums

	mu       sync.Mutex
	sums     []uint32      // those of the blocks that the assigned source has announced; nil before
	changed  chan struct{} // closed and replaced when a source ends
	running  int
	assigned *source
	digest   string
	failure  error   // final: another source would not help
	failed   []error // one error for each source that ended before it had finished
}

// NewFetch prepares a transfer into memory; nothing is fetched before a source is added.
func NewFetch(memory *Memory, settings Settings) (*Fetch, error) {
	layout, err := NewLayout(memory.Sizes(), settings.BlockSize)
	if err != nil {
		return nil, err
	}
	if settings.Streams <= 0 {
		settings.Streams = layout.Streams()
	}
	if settings.StallAfter <= 0 {
		settings.StallAfter = 10 * time.Second
	}
	f := &Fetch{settings: settings, layout: layout, memory: memory, retries: defaultRetries,
		asksSums: make(chan struct{}, 1), changed: make(chan struct{})}
	if f.windows, err = newWindows(&f.layout, memory.away, settings.Window); err != nil {
		return nil, err
	}
	f.queue = newQueue(layout.Blocks(), f.windows.staged)
	f.ctx, f.cancel = context.WithCancel(context.Background())
	f.worked = Working()
	return f, nil
}

// Add starts to fetch from a source.
func (f *Fetch) Add(address, secret string, role Role) error {
	raw, err := hex.DecodeString(secret)
	if err != nil || len(raw) != secretSize {
		return errors.New("the secret is malformed")
	}
	if role != Assigned && f.settings.Unchecked {
		return errors.New("an additional source needs checksums, and this transfer has none")
	}
	s := &source{fetch: f, address: address, secret: raw, role: role}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ctx.Err() != nil {
		return errors.New("the transfer is closed")
	}
	f.running++
	if role == Assigned {
		f.assigned = s
		f.queue.setSourceFailed(false)
	}
	f.lives.Add(1)
	go s.run()
	return nil
}

// Stage provides host memory for the next window. If it is the memory of an earlier window, that window ends:
// the caller has copied it to the device. Stage returns the number of the new window, or -1 if none is left.
func (f *Fetch) Stage(address, length int64) (window int64, err error) {
	memory, err := region(address, length)
	if err != nil {
		return 0, err
	}
	if len(memory) == 0 {
		return 0, errors.New("the memory of the stage is empty")
	}
	opened, blocks, err := f.windows.open(memory)
	f.queue.add(blocks)
	return int64(opened), err
}

// Status is the progress of a transfer.
type Status struct {
	Done     bool     `json:"done"`
	Running  bool     `json:"running"` // a source is being read
	Received int64    `json:"received"`
	Total    int64    `json:"total"`
	Digest   string   `json:"digest"`
	Failure  string   `json:"failure"` // final: another source would not help
	Failed   []string `json:"failed"`  // the errors of sources that ended before they had finished
	Full     []int    `json:"full"`    // windows to be copied to a device
}

// Wait returns when the transfer is done or failed, no source is left, a window is full, or ctx ends.
func (f *Fetch) Wait(ctx context.Context) Status {
	for {
		f.mu.Lock()
		changed, settled := f.changed, f.running == 0 || f.failure != nil || f.digest != ""
		f.mu.Unlock()
		if settled || len(f.windows.full()) > 0 {
			return f.Status()
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return f.Status()
		}
	}
}

// Status returns the progress without waiting.
func (f *Fetch) Status() Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := Status{
		Done: f.digest != "", Running: f.running > 0, Received: f.received.Load(), Total: f.layout.Total,
		Digest: f.digest,
		Failed: []string{},
	}
	if f.failure != nil {
		s.Failure = f.failure.Error()
	}
	for _, err := range f.failed {
		s.Failed = append(s.Failed, err.Error())
	}
	// After Done was read: if Done is true, Full has all windows that were ever filled.
	s.Full = f.windows.full()
	return s
}

// Close ends the transfer. After it has returned nothing writes to the memory.
func (f *Fetch) Close() {
	f.mu.Lock() // Add checks ctx under this lock, so no source is added after cancel
	f.cancel()
	f.mu.Unlock()
	f.queue.close()
	f.lives.Wait()
	f.worked()
}

// finish compares the checksums of the blocks when all of them have arrived.
func (f *Fetch) finish(assigned []uint32) {
	mine := digest(&f.layout, f.queue.crcs)
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.settings.Unchecked:
		f.digest = "unchecked"
	case !slices.Equal(f.queue.crcs, assigned):
		f.failure = fmt.Errorf("the state has the digest %s here and %s at the source", mine,
			digest(&f.layout, assigned))
	default:
		f.digest = mine
	}
	f.wake()
}

// arrived records a block that is complete in memory and has been checked.
func (f *Fetch) arrived(block int, crc uint32) {
	full := f.windows.arrived(block)
	f.queue.arrived(block, crc)
	if full {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.wake()
	}
}

// place returns the memory for a part of a block.
func (f *Fetch) place(block int, span Span) []byte {
	if memory := f.memory.regions[span.Region]; memory != nil {
		return memory[span.Offset : span.Offset+span.Length]
	}
	return f.windows.place(block, span)
}

func (f *Fetch) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.failure == nil {
		f.failure = err
	}
	f.wake()
	f.queue.close()
}

// wake makes pending calls of Wait check the progress again. The caller holds mu.
func (f *Fetch) wake() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// ended records that all streams of a source have ended.
func (f *Fetch) ended(s *source, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.running--
	if s == f.assigned {
		f.queue.setSourceFailed(true)
	}
	if err != nil {
		f.failed = append(f.failed, err)
	}
	f.wake()
}

// assignedSums returns the checksums that the assigned source announces. Only the streams of additional
// sources need them: one stream requests the checksums, and the others wait for its result. No lock is held
// meanwhile. So the streams of the assigned source continue, and may complete the state before the checksums
// arrive.
func (f *Fetch) assignedSums() ([]uint32, error) {
	select {
	case f.asksSums <- struct{}{}:
	case <-f.ctx.Done():
		return nil, f.ctx.Err()
	}
	defer func() { <-f.asksSums }()
	f.mu.Lock()
	sums, s := f.sums, f.assigned
	f.mu.Unlock()
	if sums != nil {
		return sums, nil
	}
	if s == nil {
		return nil, errors.New("the assigned source is not known")
	}
	sums, err := s.announced(f.queue.over)
	if err != nil {
		err = fmt.Errorf("checksums of %s: %w", s.address, err)
	}
	return sums, err
}

// announced asks the source for the checksums of its blocks, and records them. A failed request is not
// repeated once done is closed.
func (s *source) announced(done <-chan struct{}) ([]uint32, error) {
	f := s.fetch
	st := &stream{source: s}
	defer st.close()
	sums := make([]uint32, 0, f.layout.Blocks())
	err := s.again(done, func() (bool, error) {
		before := len(sums)
		for len(sums) < cap(sums) {
			n := min(sumsAtOnce, cap(sums)-len(sums))
			raw, err := st.ask(request{op: opSums, block: uint32(len(sums)), expected: uint32(n)}, int64(4*n))
			if err != nil {
				st.close()
				return len(sums) > before, err
			}
			if len(raw) != 4*n {
				return false, fmt.Errorf("%d checksums instead of %d", len(raw)/4, n)
			}
			for ; len(raw) > 0; raw = raw[4:] {
				sums = append(sums, binary.LittleEndian.Uint32(raw))
			}
		}
		return true, nil
	})
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sums = sums
	return sums, nil
}

// source is a group from which the state is fetched.
type source struct {
	fetch   *Fetch
	address string
	secret  []byte
	role    Role

	mu    sync.Mutex
	over  error // why the source is not asked again: a withdrawnError, slowError or wrongError
	wrong int   // blocks from it that differ from those of the assigned source
}

func (s *source) run() {
	f := s.fetch
	defer f.lives.Done()
	errs := make([]error, f.settings.Streams)
	var streams sync.WaitGroup
	for i := range errs {
		streams.Go(func() {
			defer recovered(&errs[i])
			errs[i] = s.stream()
		})
	}
	streams.Wait()
	err := s.conclude(errs)
	if err != nil {
		err = fmt.Errorf("%s: %w", s.address, err)
	}
	f.ended(s, err)
}

// conclude returns why a source ended early. If the state is complete, it finishes the transfer.
func (s *source) conclude(errs []error) (err error) {
	defer recovered(&err)
	if err := s.reason(errs); err != nil {
		return err
	}
	f := s.fetch
	f.mu.Lock()
	sums := f.sums
	f.mu.Unlock()
	switch {
	case sums != nil || f.settings.Unchecked:
	case s.role != Assigned:
		return errIncomplete
	default: // a stream that has asked for them may wait for the answer
		if sums, err = s.announced(nil); err != nil {
			return err
		}
	}
	f.finish(sums)
	return nil
}

// recovered turns a panic into an error, since a panic must not end the training.
func recovered(err *error) {
	if p := recover(); p != nil {
		slog.Error("checkpoint transfer: internal error", "panic", p, "stack", string(debug.Stack()))
		*err = fmt.Errorf("a bug in torchft (panic): %v", p)
	}
}

// reason returns why a source ended without finishing: its own reason, or the first error of its streams.
func (s *source) reason(errs []error) error {
	if s.fetch.queue.complete() {
		return nil // other sources delivered what was missing
	}
	if over := s.isOver(); over != nil {
		return over
	}
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return errIncomplete
}

func (s *source) isOver() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.over
}

// end records why the source is not asked again; the first reason counts.
func (s *source) end(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over == nil {
		s.over = err
	}
	return s.over
}

// gaveWrong counts a block that differs from the assigned source's. It returns an error after mostGarbled
// such blocks.
func (s *source) gaveWrong(block int) error {
	s.mu.Lock()
	s.wrong++
	count := s.wrong
	s.mu.Unlock()
	if count < mostGarbled {
		return nil
	}
	return s.end(wrongError{count, block})
}

const sumsAtOnce = 1024

// again calls work until it succeeds, or has failed too often in a row without progress. It does not count
// that the source was busy. A pause ends early, with the error, when done is closed: then the work is no
// longer needed.
func (s *source) again(done <-chan struct{}, work func() (progress bool, err error)) error {
	failed := 0
	for {
		progress, err := work()
		if err == nil {
			return nil
		}
		var pause time.Duration
		var busy busyError
		again := errors.As(err, &busy)
		if again {
			pause = busy.retryAfter
		} else {
			if failed++; progress {
				failed = 1
			}
			pause, again = s.fetch.retries.after(failed)
		}
		if !again || s.isOver() != nil || s.fetch.ctx.Err() != nil {
			return err
		}
		select {
		case <-time.After(pause):
		case <-done:
			return err
		case <-s.fetch.ctx.Done():
			return s.fetch.ctx.Err()
		}
	}
}

// stream fetches blocks until none is left. It reconnects when the connection breaks.
func (s *source) stream() error {
	st := &stream{source: s}
	defer st.close()
	return s.again(s.fetch.queue.over, func() (bool, error) {
		before := st.arrived
		err := st.fetch()
		if err != nil {
			st.close()
		}
		return st.arrived > before, err
	})
}
