package auth

import (
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"
)

// statEvery is how long a value read from files is used before the files are checked for changes.
const statEvery = time.Second

// Watched is a value read from files. It is read again when they change, so that tokens and certificates can be renewed while a job
// runs. While the files are invalid, the last valid value is used: a file that is being written must not break calls.
type Watched[T any] struct {
	log   *slog.Logger
	paths []string
	read  func() (T, error)

	mu     sync.Mutex
	value  T
	seen   []os.FileInfo
	looked time.Time
	failed bool
}

// watch reads the files for the first time, and returns an error if that fails.
func watch[T any](log *slog.Logger, paths []string, read func() (T, error)) (*Watched[T], error) {
	w := &Watched[T]{log: log, paths: paths, read: read, seen: stat(paths), looked: time.Now()}
	var err error
	w.value, err = read()
	return w, err
}

// Get returns the value. It checks the files for changes at most once per statEvery.
func (w *Watched[T]) Get() T {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.looked) < statEvery {
		return w.value
	}
	w.looked = time.Now()
	found := stat(w.paths)
	if slices.EqualFunc(found, w.seen, unchanged) {
		return w.value
	}
	value, err := w.read()
	if err != nil {
		if !w.failed {
			w.log.Error("torchft: files changed and cannot be read; their last valid content stays in use", "error", err)
		}
		w.failed = true
		return w.value
	}
	w.value, w.seen, w.failed = value, found, false
	w.log.Info("torchft: files changed and were read again", "files", w.paths)
	return w.value
}

// stat returns nil for a file that does not exist.
func stat(paths []string) []os.FileInfo {
	found := make([]os.FileInfo, len(paths))
	for i, path := range paths {
		if info, err := os.Stat(path); err == nil {
			found[i] = info
		}
	}
	return found
}

func unchanged(a, b os.FileInfo) bool {
	return a != nil && b != nil && os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}

// warned holds the paths of secrets for which this process has logged a warning.
var warned sync.Map

// checkPermissions warns about a secret that others on this host can read.
func checkPermissions(log *slog.Logger, setting, path string) {
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm()&0o077 == 0 {
		return
	}
	if _, before := warned.LoadOrStore(path, true); !before {
		log.Warn("torchft: other users of this host can read a secret; chmod 600 it", "setting", setting, "file", path, "mode", info.Mode().Perm().String())
	}
}
