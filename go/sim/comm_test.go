package sim

import (
	"time"

	"github.com/torchft/torchft/go/torchftpb"
)

// comm is a process group, with its present collective. The job's mu guards it.
type comm struct {
	key     planeKey
	members []string
	waiting map[string]*waiter
	aborted bool
	total   uint64 // sum of the contributions to the collective so far
}

type waiter struct {
	r        *rank
	finished chan bool
	sum      uint64
	complete bool // all have contributed, and the last data is on its way to this rank
}

// joinComm connects a rank to the members of a quorum, if its id is new.
func (r *rank) joinComm(res *torchftpb.ManagerQuorumResponse) {
	key := planeKey{res.GetQuorumId(), r.index}
	if r.comm != nil && r.comm.key == key {
		return
	}
	r.leaveComm(false)
	comms := r.g.j.comms
	if comms[key] == nil {
		comms[key] = &comm{key: key, members: res.GetReplicaIds(), waiting: map[string]*waiter{}}
	}
	r.comm = comms[key]
}

// leaveComm breaks the connections of a rank. Its peers notice that, unless its host has vanished.
func (r *rank) leaveComm(silent bool) {
	c := r.comm
	if c == nil {
		return
	}
	delete(c.waiting, r.g.life.id)
	if !silent {
		c.abort(r)
	}
	r.comm = nil
}

// reduce waits until all ranks have reached the collective, one of them aborts the process group, or the
// timeout is over.
func (r *rank) reduce() (sum uint64, ok bool) {
	var w *waiter
	var c *comm
	fails := false
	r.note(func(*judge) {
		fails, r.flaky = r.flaky, false
		c = r.comm
		r.model.computed()
		if c.aborted || r.model.errored && r.model.heal == nil {
			c.abort(r)
			return
		}
		w = &waiter{r: r, finished: make(chan bool, 1)}
		c.waiting[r.g.life.id] = w
		c.total += r.model.contribute()
		c.complete()
	})
	if w == nil {
		return 0, false
	}
	select {
	case ok = <-w.finished:
	case <-r.ctx.Done():
	case <-time.After(r.g.j.setup.timeout):
		r.note(func(*judge) { r.model.timedOut() })
	}
	r.note(func(*judge) {
		if c.waiting[r.g.life.id] == w {
			delete(c.waiting, r.g.life.id)
		}
		if ok = ok && !fails; !ok {
			c.abort(r)
		}
		sum = w.sum
	})
	return sum, ok
}

// complete ends the collective if all ranks have reached it, and no link between them is cut: for each rank
// after a different time.
func (c *comm) complete() {
	for i, id := range c.members {
		if c.waiting[id] == nil || c.waiting[id].complete {
			return
		}
		for _, other := range c.members[:i] {
			if !c.waiting[id].r.g.j.judge.connected(id, other) {
				return
			}
		}
	}
	for _, id := range c.members {
		w := c.waiting[id]
		w.sum, w.complete = c.total, true
		j := w.r.g.j
		j.after(j.upTo(j.setup.delay), func() {
			j.note(func(*judge) { c.end(w, true) })
		})
	}
	c.total = 0
}

// end ends the collective for a rank.
func (c *comm) end(w *waiter, ok bool) {
	select {
	case w.finished <- ok:
		if c.waiting[w.r.g.life.id] == w {
			delete(c.waiting, w.r.g.life.id)
		}
	default:
	}
}

// abort ends the process group, and its collective with an error for the ranks that the aborting rank can
// reach. Without the data of a failed member, also ranks fail for which the collective was about to complete.
func (c *comm) abort(by *rank) {
	if c.aborted {
		return
	}
	c.aborted = true
	for id, w := range c.waiting {
		if id != by.g.life.id && by.g.j.judge.connected(id, by.g.life.id) &&
			(!w.complete || by.g.life.killed) {
			c.end(w, false)
		}
	}
}
