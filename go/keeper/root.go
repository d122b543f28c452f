package keeper

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/slots"
)

const (
	lockName     = "keeper.lock"
	settingsName = "job.json"
	disksName    = "disk.json" // of the writer: torchft/checkpointing/snapshots/due.py
	storedName   = "stored.json"
	completeName = "complete.json"
	rankPrefix   = "rank-"
	rankLock     = "lock"
	// mostSettings bounds the file with a job's settings, and those of its writer, in bytes.
	mostSettings = 1 << 20
	// lockWait is how long a keeper waits for the lock: one that ends holds it for a moment more.
	lockWait = time.Second
)

// settings are written by the ranks of a job (torchft/_keeper.py).
type settings struct {
	Lighthouse string `json:"lighthouse"` // addresses, with commas between them
	Job        string `json:"job"`        // the lighthouse's name of the job
	auth.Security
}

// job is the folder of a job.
type job struct {
	name     string
	folder   string
	settings settings
	bad      string // why the settings are not understood
	key      key
	slots.Held
	storedIn string    // the folder of slots on a disk
	ranks    bool      // whether it has folders of ranks: a rank makes its own when it begins
	changed  time.Time // when a file of it last changed
}

// RunningError says that another keeper runs.
type RunningError struct {
	Root string
	Who  string // the content of its lock
}

func (e *RunningError) Error() string {
	return fmt.Sprintf("a keeper of %s runs already: %s", e.Root, e.Who)
}

// open opens the root, which must be there, and takes its lock. A root that was removed while a keeper begins
// is not made again.
func open(folder string) (root *os.Root, lock *os.File, err error) {
	info, err := os.Lstat(folder)
	if err != nil {
		return nil, nil, fmt.Errorf("root is %q: %w", folder, err)
	}
	if own, ok := info.Sys().(*syscall.Stat_t); !info.IsDir() || info.Mode().Perm()&0o022 != 0 ||
		ok && int(own.Uid) != os.Getuid() {
		return nil, nil, fmt.Errorf("root is %q: it must be a folder of this user, and no other one may "+
			"write to it", folder)
	}
	if root, err = os.OpenRoot(folder); err != nil {
		return nil, nil, fmt.Errorf("root is %q: %w", folder, err)
	}
	lock, err = root.OpenFile(lockName, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		_ = root.Close()
		return nil, nil, err
	}
	for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		if err = flock(lock); err == nil {
			break
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) || time.Since(began) > lockWait {
			who, _ := io.ReadAll(io.LimitReader(lock, 200))
			_, _ = lock.Close(), root.Close()
			if errors.Is(err, syscall.EWOULDBLOCK) {
				err = &RunningError{folder, strings.TrimSpace(string(who))}
			}
			return nil, nil, err
		}
	}
	err = errors.Join(lock.Truncate(0), writeAt(lock, fmt.Sprintf("process %d\n", os.Getpid())))
	return root, lock, err
}

func writeAt(f *os.File, text string) error {
	_, err := f.WriteAt([]byte(text), 0)
	return err
}

func flock(f *os.File) error { return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) }

// owns reports whether the lock still lies in the root: somebody may have removed the folder.
func (k *Keeper) owns() bool {
	own, err := k.lock.Stat()
	there, thereErr := os.Lstat(filepath.Join(k.cfg.Root, lockName))
	return err == nil && thereErr == nil && os.SameFile(own, there)
}

// list returns the jobs in a root, in the order of their folders. It follows no symbolic link.
func list(root *os.Root) []job {
	jobs := []job{}
	for _, folder := range folders(root, ".") {
		name, err := url.PathUnescape(folder)
		if err != nil {
			continue
		}
		j := job{name: name, folder: folder}
		j.readSettings(root)
		j.Disks = slots.ReadDisks(name, readText(root, path.Join(folder, disksName)))
		// The disk itself is not looked at here: it may hang.
		stored := slots.ReadStored(name, readText(root, path.Join(folder, storedName)))
		j.storedIn, j.Snapshots = stored.Folder, stored.Slots
		j.addSlots(root)
		jobs = append(jobs, j)
	}
	return jobs
}

// readText returns the text of a file of a job; empty: there is none. What is cut off is not understood.
func readText(root *os.Root, path string) []byte {
	f, _, err := openFile(root, path)
	if err != nil {
		return nil
	}
	defer f.Close()
	text, _ := io.ReadAll(io.LimitReader(f, mostSettings))
	return text
}

// List returns what is held below a root, whether or not a keeper runs; nothing if there is no such folder.
func List(folder string) (slots.Held, error) {
	found := slots.Held{Snapshots: []slots.Slot{}}
	root, err := os.OpenRoot(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return found, nil
	}
	if err != nil {
		return found, err
	}
	defer func() { _ = root.Close() }()
	for _, j := range list(root) {
		found.Snapshots = append(found.Snapshots, j.Snapshots...)
		found.Disks = append(found.Disks, j.Disks...)
	}
	return found, nil
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// addSlots lists the slots of a job in memory.
func (j *job) addSlots(root *os.Root) {
	for _, folder := range folders(root, j.folder) {
		group, err := url.PathUnescape(folder)
		if err != nil {
			continue
		}
		for _, of := range folders(root, path.Join(j.folder, folder)) {
			text, ok := strings.CutPrefix(of, rankPrefix)
			rank, err := strconv.ParseInt(text, 10, 64)
			if !ok || err != nil || rank < 0 || strconv.FormatInt(rank, 10) != text {
				continue
			}
			j.ranks = true
			for _, slot := range []string{"0", "1"} {
				at := path.Join(folder, of, slot)
				j.add(root, slots.Slot{Job: j.name, Group: group, GroupRank: rank, Path: at})
			}
		}
	}
}

// add lists what lies at the path of a slot, if there is a file.
func (j *job) add(root *os.Root, at slots.Slot) {
	f, info, err := openFile(root, path.Join(j.folder, at.Path))
	if err != nil {
		return
	}
	defer f.Close()
	page := make([]byte, slots.PageSize)
	n, err := f.ReadAt(page, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return
	}
	s := slots.Read(at, page[:n], info.Size())
	j.Snapshots = append(j.Snapshots, s)
	// a file that is written through a mapping need not get a newer time
	j.changed = later(later(j.changed, info.ModTime()), time.UnixMilli(int64(1000*s.Saved)))
}

// folders returns the names of the folders in a folder, in order.
func folders(root *os.Root, in string) []string {
	entries, err := fs.ReadDir(root.FS(), in)
	if err != nil {
		return nil
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names
}

// open opens a slot of a job. On a disk it follows no link below the folder of the job's checkpoints.
func (k *Keeper) open(j job, of slots.Slot) (*os.File, error) {
	root, file := k.root, path.Join(j.folder, of.Path)
	if of.Stored {
		disk, err := os.OpenRoot(j.storedIn)
		if err != nil {
			return nil, err
		}
		defer func() { _ = disk.Close() }()
		root, file = disk, of.Path
		for at := path.Dir(file); at != "."; at = path.Dir(at) {
			if info, err := root.Lstat(at); err != nil || !info.IsDir() {
				return nil, errors.Join(fmt.Errorf("%s is no folder", at), err)
			}
		}
	}
	f, _, err := openFile(root, file)
	return f, err
}

// openFile opens a regular file for reading. Neither a symbolic link nor a pipe in its place does harm.
func openFile(root *os.Root, path string) (*os.File, fs.FileInfo, error) {
	f, err := root.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is no regular file", path)
	}
	if err != nil {
		_ = f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

// readSettings reads the settings of a job. Without a usable file they are empty, and the slots of the job
// are served to nobody.
func (j *job) readSettings(root *os.Root) {
	f, info, err := openFile(root, path.Join(j.folder, settingsName))
	if err != nil {
		return
	}
	defer f.Close()
	j.changed = info.ModTime()
	if err := json.NewDecoder(io.LimitReader(f, mostSettings)).Decode(&j.settings); err != nil {
		j.settings, j.bad = settings{}, err.Error()
	}
}

// keyOf returns the port that serves jobs with these settings.
func (k *Keeper) keyOf(s settings) key {
	local := s.Lighthouse != "" && k.cfg.Bind == ""
	for address := range strings.SplitSeq(s.Lighthouse, ",") {
		u, err := url.Parse(strings.TrimSpace(address))
		host := ""
		if err == nil {
			host = u.Hostname()
		}
		local = local && (host == "localhost" || auth.IsLoopback(host))
	}
	return key{s.Security, local}
}

// isComplete tells a job's writer which step all hosts together have on disks: it deletes older ones.
func (k *Keeper) isComplete(name string, step int64) {
	folder := ""
	k.mu.Lock()
	for _, j := range k.jobs {
		if j.name == name {
			folder = j.folder
		}
	}
	k.mu.Unlock()
	file, text := path.Join(folder, completeName), fmt.Sprintf("{\"step\": %d}", step)
	if folder == "" || string(readText(k.root, file)) == text {
		return
	}
	err := k.root.WriteFile(file+".new", []byte(text), 0o600)
	if err == nil {
		err = k.root.Rename(file+".new", file)
	}
	if err != nil {
		k.log.Warn("torchft: the writer does not hear which step is complete", "job", name, "error", err)
	}
}

// expire removes the slots of jobs of which no trainer has lived for a while.
func (k *Keeper) expire(now time.Time) {
	k.mu.Lock()
	jobs := slices.Clone(k.jobs)
	k.mu.Unlock()
	for _, j := range jobs {
		keep := k.cfg.Keep
		if !j.ranks {
			keep = min(keep, idle) // it has finished
		}
		if now.Sub(later(j.changed, k.lived[j.folder])) < keep {
			continue
		}
		switch removed, err := remove(k.root, j.folder); {
		case err != nil:
			k.log.Warn("torchft: the snapshots of a job cannot be removed", "job", j.name, "error", err)
			k.lived[j.folder] = now
		case removed:
			k.log.Info("torchft: the snapshots of a job are removed: no trainer of it has lived for a while",
				"job", j.name, "keep", k.cfg.Keep)
			delete(k.lived, j.folder)
		default:
			k.lived[j.folder] = now
		}
	}
}

// remove removes the folder of a job, unless one of its trainers lives. A trainer holds the lock of its rank
// while it lives; the locks are held here until all is removed.
func remove(root *os.Root, folder string) (removed bool, err error) {
	for _, group := range folders(root, folder) {
		for _, rank := range folders(root, path.Join(folder, group)) {
			f, _, err := openFile(root, path.Join(folder, group, rank, rankLock))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return false, err
			}
			defer f.Close()
			if err := flock(f); errors.Is(err, syscall.EWOULDBLOCK) {
				return false, nil
			} else if err != nil {
				return false, err
			}
		}
	}
	return true, root.RemoveAll(folder)
}
