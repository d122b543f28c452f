package replica

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"sync"

	"github.com/hashicorp/raft"
)

// machine is what Raft replicates: the states by job.
type machine struct {
	bad func(error) // called for an entry that cannot be read

	mu     sync.Mutex
	states map[string][]byte
}

// entry returns the command that replaces the state of a job, from the leader of a term.
func entry(term uint64, job string, state []byte) []byte {
	b := binary.AppendUvarint(binary.AppendUvarint(nil, term), uint64(len(job)))
	return append(append(b, job...), state...)
}

func decodeEntry(b []byte) (term uint64, job string, state []byte, err error) {
	term, n := binary.Uvarint(b)
	b = b[max(n, 0):]
	length, m := binary.Uvarint(b)
	if n <= 0 || m <= 0 || length > uint64(len(b)-m) {
		return 0, "", nil, errors.New("it is damaged, or of another version of this program")
	}
	b = b[m:]
	return term, string(b[:length]), b[length:], nil
}

// Apply returns ErrNotLeading for an entry whose proposer led in another term: it may be older than what that
// leader wrote since.
func (m *machine) Apply(l *raft.Log) any {
	term, job, state, err := decodeEntry(l.Data)
	if err != nil {
		err = fmt.Errorf("the entry %d of the log cannot be read: %w", l.Index, err)
		m.bad(err)
		return err
	}
	if term != l.Term {
		return ErrNotLeading
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(state) == 0 {
		delete(m.states, job)
	} else {
		m.states[job] = state
	}
	return nil
}

func (m *machine) copy() map[string][]byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.states)
}

// Snapshot and Restore keep the states as JSON.
func (m *machine) Snapshot() (raft.FSMSnapshot, error) { return snapshot(m.copy()), nil }

func (m *machine) Restore(from io.ReadCloser) error {
	states := map[string][]byte{}
	if err := json.NewDecoder(from).Decode(&states); err != nil {
		return fmt.Errorf("the snapshot cannot be read: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.states = states
	return nil
}

type snapshot map[string][]byte

func (s snapshot) Persist(to raft.SnapshotSink) error { return json.NewEncoder(to).Encode(s) }
func (snapshot) Release()                             {}
