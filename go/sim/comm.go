package sim

import (
	"time"

	"github.com/torchft/torchft/go/quorum"
)

// commKey identifies a process group: there is one for each quorum_id and group rank.
type commKey struct {
	quorumID int64
	plane    int
}

// comm is a process group: the ranks with one group rank in all groups of a quorum. A collective ends when all of them have reached it.
// If one does not, the others wait until their timeout, a broken connection or an abort.
type comm struct {
	key     commKey
	members []place
	ready   int // members that have arrived at the open collective
	joined  int // members that are in the process group
	aborted bool
	total   uint64 // of the contributions so far
	head    *rank  // the first contributor; the others are compared with it
	commits [4]commit
	recent  int
}

// place is the place of a member in the process group. r is nil before it joins and after it leaves.
type place struct {
	id     string
	r      *rank
	number uint64 // of the rank's pending call of the collective, 0 if there is none
	closed bool
	done   time.Duration // when the previous collective ends for this member
}

// commit is the state of the first rank that committed a step here.
type commit struct {
	step   int64
	digest uint64
	by     string
}

func (r *rank) joinComm(q *quorum.Quorum) {
	w := r.g.w
	key := commKey{q.ID, r.index}
	c := w.comms[key]
	if c == nil {
		c = &comm{key: key, members: make([]place, 0, len(q.Members))}
		for i := range q.Members {
			c.members = append(c.members, place{id: q.Members[i].ReplicaID})
		}
		w.comms[key] = c
	}
	for i := range c.members {
		if p := &c.members[i]; p.id == r.g.id && p.r == nil && !p.closed {
			p.r, r.comm, r.member = r, c, i
			c.joined++
			return
		}
	}
	w.broken(ruleOneSet, "%s is not among those that already met in quorum %d", r.g.id, q.ID)
	r.comm, r.member = c, -1
	c.aborted = true
}

// leaveComm breaks the connections of a rank. Its peers in a collective notice that, unless its host vanished.
func (r *rank) leaveComm(silent bool) {
	c, w := r.comm, r.g.w
	if c == nil || r.member < 0 {
		return
	}
	if !silent {
		c.abort(r)
	}
	p := &c.members[r.member]
	if p.number != 0 {
		c.ready--
	}
	if r.g.killed {
		c.breaks(w, r, silent)
	}
	p.r, p.number, p.closed = nil, 0, true
	r.comm = nil
	if c.joined--; c.joined == 0 {
		delete(w.comms, c.key)
	}
}

// breaks makes a collective fail for the members that have not received the data of a killed member yet. For the others it is
// complete.
func (c *comm) breaks(w *world, by *rank, silent bool) {
	for i := range c.members {
		if p := &c.members[i]; p.r != nil && p.r != by && p.number == 0 && p.done > w.now && !silent {
			p.r.flaky = true
		}
	}
}

func (c *comm) arrive(r *rank) {
	w := r.g.w
	if c.aborted || r.errored && r.heal == nil {
		c.abort(r)
		w.after(w.Delay, event{kind: rankReduced, g: r.g, rank: int16(r.index), id: r.number})
		return
	}
	c.members[r.member].number = r.number
	c.ready++
	if r.participates() {
		w.check.contributes(c, r)
		c.total += r.gradient
		if c.head == nil {
			c.head = r
		}
	}
	if c.ready == len(c.members) {
		c.complete(w)
	}
}

// complete ends the collective for each member, after a different time for each. A member that does not receive the data of another
// one keeps waiting.
func (c *comm) complete(w *world) {
	for i := range c.members {
		p := &c.members[i]
		if w.cuts > 0 && !c.allReach(w, p.r.g.slot) {
			continue
		}
		p.r.sum = c.total
		p.done = w.now + w.delay(p.r.g.slot)
		w.push(event{at: p.done, kind: rankReduced, ok: true, g: p.r.g, rank: int16(p.r.index), id: p.number})
		p.number = 0
		c.ready--
	}
	if c.ready == 0 {
		c.total, c.head = 0, nil
	}
}

// allReach reports whether the data of all members reaches a slot.
func (c *comm) allReach(w *world, slot int) bool {
	for i := range c.members {
		if !w.sends(c.members[i].r.g.slot, slot) {
			return false
		}
	}
	return true
}

// abort ends the process group for all of its members: the collectives of the members that can be reached fail.
func (c *comm) abort(by *rank) {
	if c == nil || c.aborted {
		return
	}
	c.aborted = true
	w := by.g.w
	for i := range c.members {
		p := &c.members[i]
		if p.r == nil || p.r == by || p.number == 0 || !w.sends(by.g.slot, p.r.g.slot) {
			continue
		}
		w.after(w.delay(p.r.g.slot), event{kind: rankReduced, g: p.r.g, rank: int16(p.r.index), id: p.number})
	}
}

// peerFailed aborts the rank's collectives of a quorum in which a member has failed: they cannot complete any more.
func (r *rank) peerFailed(quorumID int64) {
	c, w := r.comm, r.g.w
	if c == nil || r.member < 0 || c.key.quorumID != quorumID || c.aborted {
		return
	}
	c.abort(r)
	if p := &c.members[r.member]; p.number != 0 {
		w.after(w.delay(r.g.slot), event{kind: rankReduced, g: r.g, rank: int16(r.index), id: p.number})
	}
}
