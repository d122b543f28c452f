package replica

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"path/filepath"
	"slices"
	"time"

	"github.com/hashicorp/raft"
	"go.etcd.io/bbolt"
)

// store is the disk of a node: Raft's log, its votes, and the snapshots.
type store interface {
	raft.LogStore
	raft.StableStore
	raft.SnapshotStore
	Close() error
}

const (
	logFile    = "raft.db"
	keepsFor   = time.Second // for how long a directory that another process uses is waited for
	keepsSnaps = 2
)

var (
	bucketLog   = []byte("log")
	bucketVotes = []byte("votes")
	// errNotFound has the text that Raft expects.
	errNotFound = errors.New("not found")
)

// boltStore is a store in a directory. Each value has a checksum: Raft ends the process if it reads a damaged
// entry. (raft-boltdb has no checksums, and its last release, v2.3.1, does not build with the metrics of raft
// v1.8.)
type boltStore struct {
	db *bbolt.DB
	*raft.FileSnapshotStore
}

func openStore(dir string, log *slog.Logger) (store, error) {
	path := filepath.Join(dir, logFile)
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: keepsFor})
	if errors.Is(err, bbolt.ErrTimeout) { //nolint:staticcheck // its replacement has other values
		return nil, fmt.Errorf("%s is in use by another process", path)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		_, logErr := tx.CreateBucketIfNotExists(bucketLog)
		_, votesErr := tx.CreateBucketIfNotExists(bucketVotes)
		return errors.Join(logErr, votesErr)
	})
	var snapshots *raft.FileSnapshotStore
	if err == nil {
		snapshots, err = raft.NewFileSnapshotStoreWithLogger(dir, keepsSnaps, raftLogger(log))
	}
	if err != nil {
		_ = db.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return &boltStore{db, snapshots}, nil
}

func (b *boltStore) Close() error { return b.db.Close() }

// seal returns a value with a checksum of the key and the value in front of it.
func seal(key, value []byte) []byte {
	sum := crc32.NewIEEE()
	_, _ = sum.Write(key)
	_, _ = sum.Write(value)
	return append(binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(value)), sum.Sum32()), value...)
}

func unseal(key, sealed []byte) ([]byte, error) {
	if len(sealed) < 4 || !slices.Equal(sealed, seal(key, sealed[4:])) {
		return nil, fmt.Errorf("the record %q is damaged: its checksum is wrong", key)
	}
	return slices.Clone(sealed[4:]), nil // bbolt's memory is valid only in the transaction
}

func number(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

func (b *boltStore) Get(key []byte) (value []byte, err error) {
	err = b.db.View(func(tx *bbolt.Tx) error {
		sealed := tx.Bucket(bucketVotes).Get(key)
		if sealed == nil {
			return errNotFound
		}
		value, err = unseal(key, sealed)
		return err
	})
	return value, err
}

func (b *boltStore) Set(key, value []byte) error {
	return b.db.Update(func(tx *bbolt.Tx) error { return tx.Bucket(bucketVotes).Put(key, seal(key, value)) })
}

func (b *boltStore) GetUint64(key []byte) (uint64, error) {
	value, err := b.Get(key)
	if err != nil {
		return 0, err
	}
	if len(value) != 8 {
		return 0, fmt.Errorf("the record %q is damaged: it has %d bytes, not 8", key, len(value))
	}
	return binary.BigEndian.Uint64(value), nil
}

func (b *boltStore) SetUint64(key []byte, value uint64) error { return b.Set(key, number(value)) }

func (b *boltStore) edge(end func(*bbolt.Cursor) (key, value []byte)) (index uint64, err error) {
	err = b.db.View(func(tx *bbolt.Tx) error {
		if key, _ := end(tx.Bucket(bucketLog).Cursor()); len(key) == 8 {
			index = binary.BigEndian.Uint64(key)
		}
		return nil
	})
	return index, err
}

func (b *boltStore) FirstIndex() (uint64, error) { return b.edge((*bbolt.Cursor).First) }
func (b *boltStore) LastIndex() (uint64, error)  { return b.edge((*bbolt.Cursor).Last) }

func (b *boltStore) GetLog(index uint64, to *raft.Log) error {
	key := number(index)
	return b.db.View(func(tx *bbolt.Tx) error {
		log := tx.Bucket(bucketLog)
		sealed := log.Get(key)
		if sealed == nil {
			first, _ := log.Cursor().First()
			last, _ := log.Cursor().Last()
			if string(first) < string(key) && string(key) < string(last) {
				return fmt.Errorf("the log is damaged: the entry %d is missing", index)
			}
			return raft.ErrLogNotFound
		}
		value, err := unseal(key, sealed)
		if err == nil && len(value) < 17 {
			err = fmt.Errorf("the entry %d is damaged: it has %d bytes", index, len(value))
		}
		if err != nil {
			return err
		}
		*to = raft.Log{
			Index: index, Term: binary.BigEndian.Uint64(value), Type: raft.LogType(value[8]),
			AppendedAt: time.Unix(0, int64(binary.BigEndian.Uint64(value[9:]))), //nolint:gosec // as written
			Data:       value[17:],
		}
		return nil
	})
}

func (b *boltStore) StoreLog(l *raft.Log) error { return b.StoreLogs([]*raft.Log{l}) }

func (b *boltStore) StoreLogs(logs []*raft.Log) error {
	return b.db.Update(func(tx *bbolt.Tx) error {
		for _, l := range logs {
			value := binary.BigEndian.AppendUint64(nil, l.Term)
			at := uint64(l.AppendedAt.UnixNano()) //nolint:gosec // read back the same way
			value = binary.BigEndian.AppendUint64(append(value, byte(l.Type)), at)
			key := number(l.Index)
			if err := tx.Bucket(bucketLog).Put(key, seal(key, append(value, l.Data...))); err != nil {
				return err
			}
		}
		return nil
	})
}

func (b *boltStore) DeleteRange(from, to uint64) error {
	return b.db.Update(func(tx *bbolt.Tx) error {
		for index := from; index <= to; index++ {
			if err := tx.Bucket(bucketLog).Delete(number(index)); err != nil {
				return err
			}
		}
		return nil
	})
}
