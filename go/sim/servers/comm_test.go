package servers

import (
	"time"

	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/sim"
)

// averageKey identifies a process group: there is one for each quorum_id and group rank.
type averageKey struct {
	quorumID int64
	plane    int
}

// average is a process group, with its present average. The job's mu guards it.
type average struct {
	key     averageKey
	members []string
	waiting map[string]*waiter
	aborted bool
	total   uint64
}

type waiter struct {
	r        *rank
	finished chan bool
	sum      uint64
}

// joinAverage connects a rank to the members of a quorum, if its id is new.
func (r *rank) joinAverage(res *recovery.Result) {
	key := averageKey{res.QuorumID, r.index}
	if r.average != nil && r.average.key == key {
		return
	}
	r.leaveAverage(false)
	averages := r.g.j.averages
	if averages[key] == nil {
		averages[key] = &average{key: key, members: res.ReplicaIDs, waiting: map[string]*waiter{}}
	}
	r.average = averages[key]
}

// leaveAverage breaks the connections of a rank. Its peers notice that, unless its host has vanished.
func (r *rank) leaveAverage(silent bool) {
	a := r.average
	if a == nil {
		return
	}
	delete(a.waiting, r.g.id)
	if !silent {
		a.abort(r)
	}
	r.average = nil
}

// reduce waits until all ranks have reached the average, one aborts it, or the timeout is over.
func (r *rank) reduce() (sum uint64, ok bool) {
	var w *waiter
	var a *average
	flaky := false
	r.note(func(*sim.Judge) {
		flaky, r.flaky = r.flaky, false
		a = r.average
		if a.aborted || r.model.Errored() && !r.model.Heals() {
			a.abort(r)
			return
		}
		w = &waiter{r: r, finished: make(chan bool, 1)}
		a.waiting[r.g.id] = w
		a.total += r.model.Contribute()
		a.complete()
	})
	if w == nil {
		return 0, false
	}
	select {
	case ok = <-w.finished:
	case <-r.ctx.Done():
	case <-time.After(r.g.j.setup.Timeout):
		r.note(func(*sim.Judge) { r.model.TimedOut() })
	}
	r.note(func(*sim.Judge) {
		delete(a.waiting, r.g.id)
		if ok = ok && !flaky; !ok {
			a.abort(r)
		}
		sum = w.sum
	})
	return sum, ok
}

// complete ends the average for all ranks if all have reached it, and no link between them is cut.
func (a *average) complete() {
	for i, id := range a.members {
		if a.waiting[id] == nil {
			return
		}
		for _, other := range a.members[:i] {
			if !a.waiting[id].r.g.j.judge.Connected(id, other) {
				return
			}
		}
	}
	for id, w := range a.waiting {
		w.sum = a.total
		a.end(w.r, true)
		delete(a.waiting, id)
	}
	a.total = 0
}

func (a *average) end(r *rank, ok bool) {
	if w := a.waiting[r.g.id]; w != nil {
		select {
		case w.finished <- ok:
		default:
		}
	}
}

// abort ends the average with an error for the ranks that the aborting one can reach.
func (a *average) abort(by *rank) {
	if a.aborted {
		return
	}
	a.aborted = true
	for id, w := range a.waiting {
		if id != by.g.id && by.g.j.judge.Connected(id, by.g.id) {
			a.end(w.r, false)
		}
	}
}
