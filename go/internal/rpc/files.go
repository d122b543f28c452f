package rpc

import (
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"
)

// lookAgain is how long something read from files is believed without a look at them.
const lookAgain = time.Second

// watched is what was read from files. It is read again when they change, so that tokens and certificates can be
// renewed under a running job. While they cannot be used (a file that is being written), what was read before holds.
type watched[T any] struct {
	log   *slog.Logger
	paths []string
	read  func() (T, error)

	mu     sync.Mutex
	value  T
	seen   []os.FileInfo
	looked time.Time
	failed bool
}

// watch reads for the first time, which must succeed.
func watch[T any](log *slog.Logger, paths []string, read func() (T, error)) (*watched[T], error) {
	w := &watched[T]{log: log, paths: paths, read: read, seen: stat(paths), looked: time.Now()}
	var err error
	w.value, err = read()
	return w, err
}

func (w *watched[T]) get() T {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.looked) < lookAgain {
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
			w.log.Error("torchft: what was read before is used on", "error", err)
		}
		w.failed = true
		return w.value
	}
	w.value, w.seen, w.failed = value, found, false
	w.log.Info("torchft: read again", "files", w.paths)
	return w.value
}

// stat has nil in place of a file that is not there.
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

// warned are the secrets whose permissions were complained about, once in a process.
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
