package auth

import (
	"log/slog"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
)

const (
	// statEvery is how long a value read from files is used before the files are checked for changes.
	statEvery = time.Second
	// diskTime is how long a call waits for such a check. A server also uses these values while it accepts
	// connections: a disk that does not answer must not stop it.
	diskTime = 250 * time.Millisecond
)

// Watched is a value read from files. It is read again when they change, so that tokens and certificates can
// be renewed while a job runs. While the files are invalid, the last valid value is used: a file that is
// being written must not break calls.
//
// gRPC's certprovider/pemfile does this for certificates only, and its errors name no setting: tokens would
// need Watched all the same.
type Watched[T any] struct {
	log   *slog.Logger
	paths []string
	read  func() (T, error)

	seen   []os.FileInfo // only check uses seen and failed
	failed bool

	mu       sync.Mutex
	value    T
	looked   time.Time     // when the last check began
	checking chan struct{} // closed when the check ends, nil while there is none
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
	if checking := w.begin(); checking != nil {
		select {
		case <-checking:
		case <-time.After(diskTime):
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.value
}

// begin starts a check if one is due. It returns nil if there is none to wait for.
func (w *Watched[T]) begin() (checking <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch age := time.Since(w.looked); {
	case w.checking != nil && age >= diskTime, w.checking == nil && age < statEvery:
		return nil
	case w.checking == nil:
		w.looked, w.checking = time.Now(), make(chan struct{})
		go w.check()
	}
	return w.checking
}

// check reads the files if they have changed. No lock is held meanwhile, and only one check runs at a time.
func (w *Watched[T]) check() {
	defer func() {
		if r := recover(); r != nil {
			w.log.Error("torchft: internal error", "in", "reading files", "panic", r)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		close(w.checking)
		w.checking = nil
	}()
	found := stat(w.paths)
	if slices.EqualFunc(found, w.seen, unchanged) {
		return
	}
	value, err := w.read()
	if err != nil {
		if !w.failed {
			w.log.Error("torchft: files changed and cannot be read; their last valid content stays in use",
				"error", err)
		}
		w.failed = true
		return
	}
	w.seen, w.failed = found, false
	w.mu.Lock()
	w.value = value
	w.mu.Unlock()
	w.log.Info("torchft: files changed and were read again", "files", w.paths)
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
	if err != nil {
		return
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !exposed(info.Mode(), ok && int(stat.Uid) != os.Geteuid()) {
		return
	}
	if _, before := warned.LoadOrStore(path, true); !before {
		log.Warn("torchft: other users of this host can read a secret; chmod 600 it", "setting", setting,
			"file", path, "mode", info.Mode().Perm().String())
	}
}

// exposed reports whether others than the owner can read a file. One that belongs to another user is read by
// its group: so Kubernetes gives the files of a Secret, which are root's, to the pod's group.
func exposed(mode os.FileMode, ofOther bool) bool {
	others := os.FileMode(0o077)
	if ofOther {
		others = 0o007
	}
	return mode.Perm()&others != 0
}
