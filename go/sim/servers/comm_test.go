package servers

import (
	"time"

	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/sim"
)

// commKey identifies a process group: there is one for each quorum_id and group rank.
type commKey struct {
	quorumID int64
	plane    int
}

// comm is a process group, with its present collective. The job's mu guards it.
type comm struct {
	key     commKey
	members []string
	waiting map[string]*waiter
	aborted bool
	total   uint64 // sum of the contributions to the collective so far
}

type waiter struct {
	r        *rank
	finished chan bool
	sum      uint64
}

// joinComm connects a rank to the members of a quorum, if its id is new.
func (r *rank) joinComm(res *recovery.Result) {
	key := commKey{res.QuorumID, r.index}
	if r.comm != nil && r.comm.key == key {
		return
	}
	r.leaveComm(false)
	comms := r.g.j.comms
	if comms[key] == nil {
		comms[key] = &comm{key: key, members: res.ReplicaIDs, waiting: map[string]*waiter{}}
	}
	r.comm = comms[key]
}

// leaveComm breaks the connections of a rank. Its peers notice that, unless its host has vanished.
func (r *rank) leaveComm(silent bool) {
	c := r.comm
	if c == nil {
		return
	}
	delete(c.waiting, r.g.id)
	if !silent {
		c.abort(r)
	}
	r.comm = nil
}

// reduce waits until all ranks have reached the collective, one of them aborts the process group, or the timeout is over.
func (r *rank) reduce() (sum uint64, ok bool) {
	var w *waiter
	var c *comm
	flaky := false
	r.note(func(*sim.Judge) {
		flaky, r.flaky = r.flaky, false
		c = r.comm
		if c.aborted || r.model.Errored() && !r.model.Heals() {
			c.abort(r)
			return
		}
		w = &waiter{r: r, finished: make(chan bool, 1)}
		c.waiting[r.g.id] = w
		c.total += r.model.Contribute()
		c.complete()
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
		delete(c.waiting, r.g.id)
		if ok = ok && !flaky; !ok {
			c.abort(r)
		}
		sum = w.sum
	})
	return sum, ok
}

// complete ends the collective for all ranks if all have reached it, and no link between them is cut.
func (c *comm) complete() {
	for i, id := range c.members {
		if c.waiting[id] == nil {
			return
		}
		for _, other := range c.members[:i] {
			if !c.waiting[id].r.g.j.judge.Connected(id, other) {
				return
			}
		}
	}
	for id, w := range c.waiting {
		w.sum = c.total
		c.end(w.r, true)
		delete(c.waiting, id)
	}
	c.total = 0
}

// end ends the collective for a rank that waits in it.
func (c *comm) end(r *rank, ok bool) {
	if w := c.waiting[r.g.id]; w != nil {
		select {
		case w.finished <- ok:
		default:
		}
	}
}

// abort ends the process group, and its collective with an error for the ranks that the aborting rank can reach.
func (c *comm) abort(by *rank) {
	if c.aborted {
		return
	}
	c.aborted = true
	for id, w := range c.waiting {
		if id != by.g.id && by.g.j.judge.Connected(id, by.g.id) {
			c.end(w.r, false)
		}
	}
}
