package lighthouse

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/slots"
)

// The lighthouse knows what the keepers of a job's hosts hold, so that a rank finds a snapshot that its own
// host lacks. It is kept in memory: keepers repeat their reports every two seconds (package keeper). Only the
// newest step, and the hosts that hold it, are kept with the state of the job, since these may be missing
// after all groups have failed (copies in package quorum).

const (
	// keeperDeadline is how long a report counts: as long as five of them.
	keeperDeadline = 10 * time.Second
	// mostReport bounds a report, in bytes. A slot takes some 250, and a host has two for each rank.
	mostReport = 256 << 10
	// mostKeepers bounds the keepers of all jobs together.
	mostKeepers = 4096
	// longestName bounds the names in a report, in bytes: that of a file is no longer.
	longestName = 255
	// longestPath bounds the names of folders, in bytes: that of Linux has at most as many.
	longestPath = 4096
)

const wantedReport = `{"address": "http://host:port", "host": "...", "snapshots": []}`

func checkReport(r slots.Report) error {
	if _, err := rpc.ParseAddress("address", r.Address); err != nil {
		return err
	}
	for _, name := range []string{r.Address, r.Host} {
		if len(name) > longestName {
			return fmt.Errorf("a name has %d bytes: allowed are %d", len(name), longestName)
		}
	}
	for _, s := range r.Snapshots {
		if len(s.Job) > longestName || len(s.Group) > longestName || len(s.Incomplete) > mostBody ||
			len(s.Path) > mostBody {
			return fmt.Errorf("the name of a slot has more than %d bytes", longestName)
		}
		if !slots.ValidShare(s.Share) {
			return fmt.Errorf("share is %v: allowed are a part, the number of parts, and that of its own",
				s.Share)
		}
	}
	for _, d := range r.Disks {
		if len(d.Job) > longestName || len(d.Folder) > longestPath || len(d.Problem) > mostBody {
			return fmt.Errorf("the name of a folder has more than %d bytes", longestPath)
		}
	}
	return nil
}

// keepers are the reports by job and address of the keeper.
type keepers struct {
	began time.Time // when this lighthouse began to listen

	mu sync.Mutex
	of map[string]map[string]told
	n  int
}

type told struct {
	slots.Report
	at time.Time
}

// hear records a report. It returns an error if there are too many keepers.
func (k *keepers) hear(job string, r slots.Report, now time.Time) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.forget(now)
	if _, known := k.of[job][r.Address]; !known {
		if k.n >= mostKeepers {
			return fmt.Errorf("this lighthouse hears %d keepers, which is the limit", k.n)
		}
		k.n++
	}
	if k.of == nil {
		k.of = map[string]map[string]told{}
	}
	if k.of[job] == nil {
		k.of[job] = map[string]told{}
	}
	k.of[job][r.Address] = told{r, now}
	return nil
}

// forget removes reports that are too old. The caller holds mu.
func (k *keepers) forget(now time.Time) {
	for job, all := range k.of {
		for address, h := range all {
			if now.Sub(h.at) >= keeperDeadline {
				delete(all, address)
				k.n--
			}
		}
		if len(all) == 0 {
			delete(k.of, job)
		}
	}
}

// all returns the present reports about a job, in the order of the hosts.
func (k *keepers) all(job string, now time.Time) []told {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.forget(now)
	found := make([]told, 0, len(k.of[job]))
	for _, h := range k.of[job] {
		found = append(found, h)
	}
	slices.SortFunc(found, func(a, b told) int {
		return cmp.Or(cmp.Compare(a.Host, b.Host), cmp.Compare(a.Address, b.Address))
	})
	return found
}

// KeepersAnswer is the answer to GET /api/v1/keepers.
type KeepersAnswer struct {
	// For how long this lighthouse has listened to keepers: within their interval it may not know all.
	ListeningMS int64        `json:"listening_ms"`
	Keepers     []KeeperHeld `json:"keepers"`
}

// KeeperAnswer is the answer to the report of a keeper.
type KeeperAnswer struct {
	// By job: the newest step of which all hosts together have all on disks that only they see.
	Complete map[string]int64 `json:"complete,omitempty"`
}

// KeeperHeld is what one keeper holds of a job.
type KeeperHeld struct {
	slots.Report
	AgeMS int64 `json:"age_ms"` // of its report
}

// serveKeepers takes the report of a keeper about the job in the query, or lists those of the job. A job
// needs no members for it: snapshots outlive them.
func (s *Server) serveKeepers(w http.ResponseWriter, r *http.Request) {
	job, now := cmp.Or(r.URL.Query().Get("job"), rpc.DefaultJob), time.Now()
	switch r.Method {
	case http.MethodGet:
		answer := KeepersAnswer{now.Sub(s.listeningSince()).Milliseconds(), []KeeperHeld{}}
		for _, h := range s.keepers.all(job, now) {
			answer.Keepers = append(answer.Keepers, KeeperHeld{h.Report, now.Sub(h.at).Milliseconds()})
		}
		dashboard.Answer(w, answer)
	case http.MethodPost:
		if !s.admits(w, r, "the list of keepers", "`torchft keeper`") {
			return
		}
		var said slots.Report
		code, err := readBody(w, r, mostReport, wantedReport, &said)
		if err == nil {
			code, err = http.StatusBadRequest, cmp.Or(rpc.ValidateJob("job", job), checkReport(said))
		}
		if err == nil {
			code, err = http.StatusServiceUnavailable, s.keepers.hear(job, said, now)
		}
		if j := s.find(job); err == nil && j != nil {
			err = j.hears(now)
		}
		if err != nil {
			dashboard.Refuse(w, code, err)
			return
		}
		var all []slots.Slot
		for _, h := range s.keepers.all(job, now) {
			all = append(all, h.Snapshots...)
		}
		dashboard.Answer(w, KeeperAnswer{slots.Complete(said.Snapshots, all)})
	default:
		w.Header().Set("Allow", "GET, POST")
		dashboard.Refuse(w, http.StatusMethodNotAllowed,
			errors.New(r.Method+" "+r.URL.Path+" is not allowed; allowed: GET, POST"))
	}
}

// listeningSince returns when this lighthouse began to get the reports of all keepers: in a cluster those go
// to the leader.
func (s *Server) listeningSince() time.Time {
	since := s.keepers.began
	if status := s.cluster.status(); status != nil {
		if led := time.Now().Add(-time.Duration(status.SinceMS) * time.Millisecond); led.After(since) {
			since = led
		}
	}
	return since
}

// hears tells the machine of a job what keepers report: not at each report, of which a large job has many.
func (j *job) hears(now time.Time) error {
	j.mu.Lock()
	due := now.Sub(j.heard) >= time.Second
	if due {
		j.heard = now
	}
	j.mu.Unlock()
	if !due {
		return nil
	}
	return j.feed(j.server.keepers.copied(j.name, now))
}

// copied returns what the keepers of a job hold, for its machine.
func (k *keepers) copied(job string, now time.Time) (e quorum.Copied) {
	all := k.all(job, now)
	var held []slots.Slot
	for _, h := range all {
		e.Reporting = append(e.Reporting, h.Host)
		held = append(held, h.Snapshots...)
	}
	newest, found := slots.Newest(held)
	if !found {
		return e
	}
	e.Step, e.Quorum = newest.Step, newest.Quorum
	for _, h := range all {
		if slices.ContainsFunc(h.Snapshots, newest.Has) && !slices.Contains(e.Hosts, h.Host) {
			e.Hosts = append(e.Hosts, h.Host)
		}
	}
	return e
}

// snapshots summarizes what the keepers of a job hold.
func (k *keepers) snapshots(job string, now time.Time) (sum dashboard.Snapshots) {
	var held slots.Held
	parts := map[string]bool{} // jobs whose hosts have parts of checkpoints
	for _, h := range k.all(job, now) {
		sum.Hosts++
		held.Snapshots, held.Disks = append(held.Snapshots, h.Snapshots...), append(held.Disks, h.Disks...)
	}
	for _, s := range held.Snapshots {
		if !s.Stored {
			sum.Bytes += s.Bytes
		} else {
			parts[s.Job] = true
		}
		if s.Incomplete != "" {
			sum.Incomplete++
		}
	}
	if newest, found := slots.Newest(held.Snapshots); found {
		sum.Step = &newest.Step
	}
	complete := slots.Complete(held.Snapshots, held.Snapshots)
	for _, d := range held.Disks {
		written := d.Written
		if parts[d.Job] {
			written = -1
			if step, found := complete[d.Job]; found {
				written = step // whatever a host has written of others
			}
		}
		if written >= 0 && (sum.Checkpoint == nil || written > *sum.Checkpoint) {
			sum.Checkpoint = &written
		}
	}
	if worst, found := slots.Trouble(held.Disks); found {
		sum.Problem = worst.Problem
		sum.ProblemMS = max(0, now.UnixMilli()-int64(1000*worst.Since))
	}
	return sum
}
