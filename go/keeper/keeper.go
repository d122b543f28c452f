// Package keeper is the process of a host that outlives trainers: it lists the slots in the memory of its
// host, serves them to ranks on other hosts, and tells the lighthouses of its jobs what it holds. It writes
// nothing into slots. What a slot holds is decided in package slots.
package keeper

import (
	"cmp"
	"errors"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/slots"
)

const (
	// scanEvery is how often all slots are listed: a new lighthouse hears of this keeper then.
	scanEvery = 500 * time.Millisecond
	// idle is how long a keeper waits for the ranks of a job, and for another job.
	idle = time.Minute
)

// Config has the settings of a keeper.
type Config struct {
	// Root is the folder of all slots of this user on this host.
	Root string
	// Bind is host:port to listen on. Empty: a free port, of the loopback interface for jobs whose lighthouse
	// is there, else of all interfaces.
	Bind string
	// Hostname is the host in the announced address of a port on all interfaces.
	Hostname string
	// Keep is how long the slots of a job are kept after its last trainer has ended.
	Keep time.Duration
	// Writer is the command that writes slots to disk, to which Root is added; empty: none is started.
	Writer []string
	// OnEnd is called when the keeper ends by itself.
	OnEnd func()
	// Logger is slog.Default() if nil.
	Logger *slog.Logger
	// Network is real TCP if nil.
	Network rpc.Network

	sendTimeout time.Duration // for an answer; a reader asks for 64 MiB at a time; a minute if 0
}

// Keeper is a running keeper.
type Keeper struct {
	cfg   Config
	log   *slog.Logger
	root  *os.Root
	lock  *os.File
	stop  chan struct{}
	once  sync.Once
	ended chan struct{} // closed when nothing was left, or after Shutdown
	tasks sync.WaitGroup

	// Only run uses these, and New before it.
	busy      time.Time            // when there was last something to keep
	lived     map[string]time.Time // when a trainer was last found alive, by the folder of its job
	failed    map[key]string       // why a port was not opened, as logged
	bad       map[string]string    // why the settings of a job are not understood, as logged
	servers   map[key]*server
	reporting map[target]func() // ends the reports
	reports   sync.WaitGroup
	writing   writer

	mu   sync.Mutex
	jobs []job
}

// New starts a keeper. It returns *RunningError if another one keeps this root. End it with Shutdown.
func New(cfg Config) (*Keeper, error) {
	cfg.Logger, cfg.Network = cmp.Or(cfg.Logger, slog.Default()), cmp.Or(cfg.Network, rpc.TCP)
	cfg.sendTimeout = cmp.Or(cfg.sendTimeout, time.Minute)
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	root, lock, err := open(cfg.Root)
	if err != nil {
		return nil, err
	}
	k := &Keeper{
		cfg: cfg, log: cfg.Logger, root: root, lock: lock,
		stop: make(chan struct{}), ended: make(chan struct{}),
		busy: time.Now(), lived: map[string]time.Time{}, failed: map[key]string{}, bad: map[string]string{},
		servers: map[key]*server{}, reporting: map[target]func(){},
	}
	k.scan(time.Now())
	rpc.Go(&k.tasks, k.log, "keeper", func() {
		defer k.close()
		if k.run() && cfg.OnEnd != nil {
			cfg.OnEnd()
		}
	})
	return k, nil
}

// Validate returns an error that names the first invalid setting.
func (c Config) Validate() error {
	if c.Root == "" {
		return errors.New(`root is "": a folder is needed`)
	}
	if c.Keep <= 0 {
		return errors.New("keep is " + c.Keep.String() + ": it must be more than 0")
	}
	if c.Bind != "" {
		return rpc.ValidateBind("bind", c.Bind)
	}
	return nil
}

// Ended is closed when this keeper has ended by itself, or after Shutdown.
func (k *Keeper) Ended() <-chan struct{} { return k.ended }

// Address returns the folder that this keeper keeps: it has a port for each set of settings.
func (k *Keeper) Address() string { return k.cfg.Root }

// Shutdown ends the keeper; the slots stay. It returns when no goroutine of it is left.
func (k *Keeper) Shutdown() {
	k.once.Do(func() { close(k.stop) })
	k.tasks.Wait()
}

// run returns true when the keeper ends by itself, false after Shutdown.
func (k *Keeper) run() bool {
	looks := time.Tick(scanEvery)
	for {
		select {
		case <-k.stop:
			return false
		case now := <-looks:
			if !k.owns() {
				k.log.Info("torchft: the folder of the keeper was removed or replaced", "root", k.cfg.Root)
				return true
			}
			k.scan(now)
			k.expire(now)
			if k.idle(now) {
				// A job that begins writes its settings first, and looks for a keeper then.
				if k.scan(now); k.idle(now) {
					k.log.Info("torchft: the keeper ends: there is nothing to keep", "root", k.cfg.Root)
					return true
				}
			}
		}
	}
}

// close ends everything but the task that calls it.
func (k *Keeper) close() {
	for _, end := range k.reporting {
		end()
	}
	k.reports.Wait()
	for _, s := range k.servers {
		s.close()
	}
	k.writing.end()
	_ = k.root.Close()
	_ = k.lock.Close() // the last: from now on another keeper may begin
	close(k.ended)
}

// scan lists all slots, and follows: which ports are open, which lighthouses are told, whether a writer runs.
func (k *Keeper) scan(now time.Time) {
	wanted, told := map[key]bool{}, map[target]bool{}
	disk := false
	for _, j := range k.look() {
		if j.bad != k.bad[j.folder] {
			if k.bad[j.folder] = j.bad; j.bad != "" {
				k.log.Warn("torchft: the settings of a job are not understood, and its snapshots are served "+
					"to nobody", "job", j.name, "error", j.bad)
			}
		}
		if j.settings.Lighthouse != "" {
			wanted[j.key], told[target{j.settings.Lighthouse, j.settings.Job, j.key}] = true, true
		}
		for _, s := range j.Snapshots {
			disk = disk || s.Folder != ""
		}
		if j.ranks {
			k.busy = now
		}
		k.busy = later(k.busy, j.changed)
	}
	k.follow(wanted, told)
	k.writing.follow(k.cfg, disk, k.log, now)
}

// look lists all jobs, and keeps the list. No older one replaces it.
func (k *Keeper) look() []job {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.jobs = list(k.root)
	for i, j := range k.jobs {
		k.jobs[i].key = k.keyOf(j.settings)
	}
	return slices.Clone(k.jobs)
}

// follow opens and closes ports, and begins and ends reports.
func (k *Keeper) follow(wanted map[key]bool, told map[target]bool) {
	for t, end := range k.reporting {
		if !told[t] {
			delete(k.reporting, t)
			end()
		}
	}
	for of, s := range k.servers {
		if !wanted[of] {
			delete(k.servers, of)
			s.close()
		}
	}
	for of := range wanted {
		if k.servers[of] == nil {
			k.serve(of)
		}
	}
	for t := range told {
		if s := k.servers[t.key]; s != nil && k.reporting[t] == nil {
			k.reporting[t] = k.report(t, s)
		}
	}
}

// held returns what is held of the jobs whose settings a predicate accepts.
func (k *Keeper) held(accepts func(job) bool) slots.Held {
	k.mu.Lock()
	defer k.mu.Unlock()
	found := slots.Held{Snapshots: []slots.Slot{}}
	for _, j := range k.jobs {
		if accepts(j) {
			found.Snapshots = append(found.Snapshots, j.Snapshots...)
			found.Disks = append(found.Disks, j.Disks...)
		}
	}
	return found
}

// idle reports whether there has been nothing to keep for a while.
func (k *Keeper) idle(now time.Time) bool { return now.Sub(k.busy) >= min(idle, k.cfg.Keep) }

// key is what jobs that share a port have in common.
type key struct {
	security auth.Security
	loopback bool
}
