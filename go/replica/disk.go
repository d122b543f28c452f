package replica

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// disk is a store that fails for good with its first error: an operation that fails, takes longer than
// diskTimeout, or panics, since bbolt and a file in memory do so if the data is damaged. It calls broken
// once, before that operation returns.
//
// Raft panics if it cannot write its term or read its log. These operations report success after a failure.
// That is safe, because the node must send nothing once broken was called.
type disk struct {
	store
	broken func(error)

	mu  sync.Mutex
	err error // why the disk is not used any more
}

// do runs an operation on a goroutine of its own, since a system call on a hanging disk cannot be
// interrupted. The operation must not write to variables that the caller reads after an error.
func (d *disk) do(what string, operation func() error) error {
	d.mu.Lock()
	err := d.err
	d.mu.Unlock()
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() {
		debug.SetPanicOnFault(true) // a damaged or unreadable file in memory is a fault
		defer func() {
			if r := recover(); r != nil {
				done <- fmt.Errorf("the data is damaged or unreadable: %v", r)
			}
		}()
		done <- operation()
	}()
	err = d.await(done)
	if err == nil || errors.Is(err, raft.ErrLogNotFound) || isNotFound(err) {
		return err
	}
	err = fmt.Errorf("the disk of the state directory failed: %s: %w", what, err)
	d.mu.Lock()
	first := d.err == nil
	if first {
		d.err = err
	}
	d.mu.Unlock()
	if first {
		d.broken(err)
	}
	return err
}

// isNotFound reports whether a key has no value. Raft, too, reads the text.
func isNotFound(err error) bool { return err.Error() == errNotFound.Error() }

// await counts time in parts, so that a process that was stopped does not take its disk for a hanging one.
func (d *disk) await(done <-chan error) error {
	const parts = 8
	tick := time.Tick(diskTimeout / parts)
	for range parts {
		select {
		case err := <-done:
			return err
		case <-tick:
		}
	}
	return fmt.Errorf("timed out after %s: the disk does not answer", diskTimeout)
}

func get[T any](d *disk, what string, operation func() (T, error)) (value T, err error) {
	result := make(chan T, 1)
	err = d.do(what, func() error {
		value, err := operation()
		if err == nil {
			result <- value
		}
		return err
	})
	if err == nil {
		value = <-result
	}
	return value, err
}

func (d *disk) FirstIndex() (uint64, error) { return get(d, "reading the log", d.store.FirstIndex) }
func (d *disk) LastIndex() (uint64, error)  { return get(d, "reading the log", d.store.LastIndex) }

// GetLog returns an entry without effect after a failure.
func (d *disk) GetLog(index uint64, to *raft.Log) error {
	read, err := get(d, "reading the log", func() (l raft.Log, err error) {
		err = d.store.GetLog(index, &l) // not in the return: Go may evaluate l first
		return l, err
	})
	switch {
	case errors.Is(err, raft.ErrLogNotFound):
		return err
	case err != nil:
		read = raft.Log{Index: index, Type: raft.LogNoop}
	}
	*to = read
	return nil
}

func (d *disk) StoreLog(l *raft.Log) error { return d.StoreLogs([]*raft.Log{l}) }

func (d *disk) StoreLogs(logs []*raft.Log) error {
	return d.do("writing the log", func() error { return d.store.StoreLogs(logs) })
}

func (d *disk) DeleteRange(from, to uint64) error {
	return d.do("shortening the log", func() error { return d.store.DeleteRange(from, to) })
}

func (d *disk) Get(key []byte) ([]byte, error) {
	return get(d, "reading a vote or the identity", func() ([]byte, error) { return d.store.Get(key) })
}

func (d *disk) GetUint64(key []byte) (uint64, error) {
	return get(d, "reading the term", func() (uint64, error) { return d.store.GetUint64(key) })
}

func (d *disk) Set(key, value []byte) error {
	return d.do("writing a vote or the identity", func() error { return d.store.Set(key, value) })
}

func (d *disk) SetUint64(key []byte, value uint64) error {
	err := d.do("writing the term", func() error { return d.store.SetUint64(key, value) })
	if string(key) == "CurrentTerm" { // Raft's key
		return nil
	}
	return err
}

func (d *disk) List() ([]*raft.SnapshotMeta, error) {
	return get(d, "listing the snapshots", d.store.List)
}

// Open reads the whole snapshot, so that its reader cannot hang.
func (d *disk) Open(id string) (*raft.SnapshotMeta, io.ReadCloser, error) {
	type snapshot struct {
		meta *raft.SnapshotMeta
		data []byte
	}
	s, err := get(d, "reading a snapshot", func() (s snapshot, err error) {
		meta, from, err := d.store.Open(id)
		if err != nil {
			return s, err
		}
		data, err := io.ReadAll(from)
		return snapshot{meta, data}, errors.Join(err, from.Close())
	})
	return s.meta, io.NopCloser(bytes.NewReader(s.data)), err
}

func (d *disk) Create(
	version raft.SnapshotVersion, index, term uint64, members raft.Configuration, membersIndex uint64,
	via raft.Transport,
) (raft.SnapshotSink, error) {
	return &sink{disk: d, create: func() (raft.SnapshotSink, error) {
		return d.store.Create(version, index, term, members, membersIndex, via)
	}}, nil
}

// sink writes a snapshot to disk when it is complete.
type sink struct {
	bytes.Buffer
	disk   *disk
	create func() (raft.SnapshotSink, error)
	id     string
}

func (s *sink) ID() string    { return s.id }
func (s *sink) Cancel() error { return nil }

func (s *sink) Close() (err error) {
	s.id, err = get(s.disk, "writing a snapshot", func() (string, error) {
		to, err := s.create()
		if err != nil {
			return "", err
		}
		if _, err := to.Write(s.Bytes()); err != nil {
			return "", errors.Join(err, to.Cancel())
		}
		return to.ID(), to.Close()
	})
	return err
}

func (d *disk) Close() error {
	done := make(chan error, 1)
	go func() { done <- d.store.Close() }()
	return d.await(done)
}
