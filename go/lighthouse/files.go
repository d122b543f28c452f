package lighthouse

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
)

// diskTime bounds each wait for the disk. A system call on a hanging disk cannot be interrupted: its
// goroutine is left behind.
const diskTime = 2 * time.Second

// disk has the operations of the operating system that files use.
type disk struct {
	read func(dir string, log *slog.Logger) (states map[string][]byte, err error)
	// no effect if it ends after ctx; an empty text removes the file
	write func(ctx context.Context, path string, text []byte) error
}

// files are a store of a lighthouse without a cluster: one file for each job in a directory that is locked
// for this process.
type files struct {
	dir  string
	log  *slog.Logger
	disk disk

	mu     sync.Mutex
	states map[string][]byte        // what the files should hold
	free   map[string]chan struct{} // by job: has a value while a write runs
}

// openFiles reads the states of all jobs, and passes them to restore. If the disk does not answer within
// diskTime, it returns before that.
func openFiles(dir string, log *slog.Logger, disk disk, restore func(states map[string][]byte)) *files {
	f := &files{dir: dir, log: log, disk: disk, states: map[string][]byte{}, free: map[string]chan struct{}{}}
	read := make(chan struct{})
	var alone sync.WaitGroup // not the server's tasks: nothing waits for a hanging disk
	rpc.Go(&alone, log, "the states on disk", func() {
		defer close(read)
		states, err := disk.read(dir, log)
		if err != nil {
			log.Warn("torchft: the states of the jobs on disk cannot be read, and are ignored",
				"state_dir", dir, "error", err)
		}
		f.mu.Lock()
		for job, text := range states {
			if f.states[job] == nil { // no newer one was kept meanwhile
				f.states[job] = text
			}
		}
		f.mu.Unlock()
		restore(states)
	})
	select {
	case <-read:
	case <-time.After(diskTime):
		log.Warn("torchft: the states of the jobs on disk were not read, since the disk does not answer; "+
			"the jobs begin without them", "state_dir", dir, "waited", diskTime)
	}
	return f
}

// States returns the states of all jobs. Do not change them.
func (f *files) States() map[string][]byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.states)
}

// Propose writes the state of a job to its file. It ends within diskTime: while an earlier write of the job
// hangs, it fails.
func (f *files) Propose(_ uint64, job string, state []byte) error {
	f.mu.Lock()
	f.states[job] = state
	if len(state) == 0 {
		delete(f.states, job)
	}
	free := f.free[job]
	if free == nil {
		free = make(chan struct{}, 1)
		f.free[job] = free
	}
	f.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), diskTime)
	defer cancel()
	path := filepath.Join(f.dir, job+fileOfState)
	done := make(chan error, 1)
	select {
	case free <- struct{}{}:
		var alone sync.WaitGroup
		rpc.Go(&alone, f.log, "a file of a state", func() {
			defer func() { <-free }()
			done <- f.disk.write(ctx, path, state)
		})
	case <-ctx.Done():
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%s: the disk does not answer", path)
	}
}

const (
	fileOfState = ".state"
	damaged     = ".corrupt" // appended to the name of a file that cannot be understood
)

// readStates reads the states of all jobs in a directory. It removes what interrupted writes have left.
func readStates(dir string, log *slog.Logger) (map[string][]byte, error) {
	states := map[string][]byte{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return states, err
	}
	for _, entry := range entries {
		info, err := entry.Info()
		if err != nil || !info.Mode().IsRegular() {
			continue
		}
		name := entry.Name()
		path := filepath.Join(dir, name)
		job, is := strings.CutSuffix(name, fileOfState)
		switch {
		case is:
			text, err := os.ReadFile(path) //nolint:gosec // the operator's directory
			if err != nil {
				log.Warn("torchft: the state of the job on disk cannot be read, and is ignored", "file", path,
					"error", err)
			} else if _, err := decodeState(text, job); err != nil {
				now := time.Now()
				_ = os.Chtimes(path, now, now) // it is kept for keepFilesFor from now on
				log.Warn("torchft: the state of the job on disk is damaged, and is ignored", "file", path,
					"error", err, "moved_to", path+damaged,
					"moved", os.Rename(path, path+damaged) == nil)
			} else {
				states[job] = text
			}
		case strings.Contains(name, fileOfState+".") && strings.HasSuffix(name, ".tmp"),
			strings.HasSuffix(name, fileOfState+damaged) && time.Since(info.ModTime()) > keepFilesFor:
			err := os.Remove(path)
			log.Info("torchft: an old file is removed from the state directory", "file", name,
				"removed", err == nil)
		}
	}
	return states, nil
}

// writeFile replaces a file: a crash leaves the old content or the new one.
func writeFile(ctx context.Context, path string, text []byte) (err error) {
	if len(text) == 0 {
		return os.Remove(path)
	}
	temporary, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*.tmp")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(temporary.Name())
		}
	}()
	_, err = temporary.Write(text)
	err = errors.Join(err, temporary.Sync(), temporary.Close())
	if err == nil {
		err = ctx.Err() // a newer state, or another lighthouse, may have replaced the file since
	}
	if err == nil {
		err = os.Rename(temporary.Name(), path)
	}
	if err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
