package replica

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	"github.com/torchft/torchft/go/internal/clock"
)

// leading is what a node knows about its leadership. Node.mu guards it.
type leading struct {
	verified     time.Time // when the last verification that succeeded began, by clock.Now
	verifiedTerm uint64
	verifying    chan struct{} // closed when the verification in progress ends; nil: none

	// After a pause of the process, Raft may still read answers that others sent before it, and take them for
	// confirmations. So a pause is followed by a barrier: an entry of the log that nobody can have confirmed
	// before.
	last    time.Time // when pauses were last looked for
	pauses  int
	cleared int // the value of pauses that a barrier has covered
}

// publish replaces the value that Leadership returns. The caller holds the lock.
func (n *Node) publish(l Lead) {
	if l == n.lead || !l.Leads && !n.lead.Leads {
		return
	}
	if !l.Leads {
		l.Term = n.lead.Term
	}
	n.lead = l
	select {
	case <-n.leads:
	default:
	}
	n.leads <- l
}

// Leadership returns a channel with the newest Lead, if it was not received yet. States is complete when
// Lead.Leads is true. A new term may follow without a Lead that ends the one before.
func (n *Node) Leadership() <-chan Lead { return n.leads }

// watch follows Raft's leadership until the node ends.
func (n *Node) watch(r *raft.Raft) {
	changes := make(chan raft.Observation, 16)
	observer := raft.NewObserver(changes, false, func(o *raft.Observation) bool {
		_, is := o.Data.(raft.LeaderObservation)
		return is
	})
	r.RegisterObserver(observer)
	defer r.DeregisterObserver(observer)
	for {
		select {
		case <-n.ctx.Done():
			return
		case leader := <-r.LeaderCh():
			n.changed(r, leader)
		case <-changes:
		}
		n.learn(r)
	}
}

// changed publishes a change of the leadership. A new leader leads when a barrier shows that it has all
// entries that were ever kept.
func (n *Node) changed(r *raft.Raft, leader bool) {
	n.mu.Lock()
	term := r.CurrentTerm()
	if !leader || n.lead.Term != term {
		n.publish(Lead{})
	}
	stopped := n.stopped != nil
	if leader && !stopped {
		n.calls.Add(1)
	}
	n.mu.Unlock()
	if !leader || stopped {
		return
	}
	defer n.calls.Done()
	err := r.Barrier(callTimeout).Error()
	for errors.Is(err, raft.ErrEnqueueTimeout) && leads(r, term) {
		err = r.Barrier(callTimeout).Error()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if err == nil && n.stopped == nil && leads(r, term) {
		n.publish(Lead{Leads: true, Term: term})
	}
}

// learn notes who leads.
func (n *Node) learn(r *raft.Raft) {
	name, _ := r.LeaderWithID()
	n.mu.Lock()
	leader := addressOf(name)
	changed := leader != n.leader
	ending := n.closing || n.stopped != nil
	if changed {
		n.leader, n.since = leader, time.Now()
	}
	n.mu.Unlock()
	switch {
	case !changed:
	case leader == n.cfg.Self: // Leadership tells, when a barrier has confirmed it
	case leader == "" && ending: // as it must be
	case leader == "":
		n.log.Warn("torchft: the cluster has no leader that this lighthouse knows", "self", n.cfg.Self)
	default:
		n.log.Info("torchft: the cluster has a leader", "leader", leader, "self", n.cfg.Self,
			"term", r.CurrentTerm())
	}
}

// Leader returns the address of the leader, empty if none is known, and since when.
func (n *Node) Leader() (address string, since time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.stopped != nil {
		return "", n.since
	}
	return n.leader, n.since
}

// watchPauses notices pauses of the process: it was stopped, or its host suspended.
func (n *Node) watchPauses() {
	tick := time.Tick(leaderLease / 5)
	for {
		select {
		case <-n.ctx.Done():
			return
		case <-tick:
			n.mu.Lock()
			n.look(clock.Now())
			n.mu.Unlock()
		}
	}
}

// look looks for a pause between the last look and now. Only a pause above the lease matters: others elect a
// leader later than that.
func (n *Node) look(now time.Time) {
	if now.Sub(n.last) > leaderLease {
		n.pauses++
	}
	n.last = now
}

// Verify returns nil if this node leads in the term at this moment: a majority has confirmed it within
// leaderLease, measured by a clock that goes on while the host is suspended. Otherwise it asks the others.
// The error is ErrNotLeading or that of ctx.
func (n *Node) Verify(ctx context.Context, term uint64) error {
	asked := clock.Now()
	for {
		r, done, err := n.call(term)
		if err != nil {
			return err
		}
		n.mu.Lock()
		now := clock.Now()
		n.look(now)
		fresh := now.Sub(n.verified) < leaderLease || !n.verified.Before(asked)
		if fresh && n.verifiedTerm == term && n.pauses == n.cleared {
			n.mu.Unlock()
			done()
			return nil
		}
		running := n.verifying
		if running == nil {
			running = make(chan struct{})
			n.verifying = running
			go n.verify(r, done, term, now, n.pauses, running)
		} else {
			done()
		}
		n.mu.Unlock()
		select {
		case <-running:
		case <-ctx.Done():
			return fmt.Errorf("verifying that this lighthouse leads: %w", ctx.Err())
		}
	}
}

// verify asks the others once whether this node leads.
func (n *Node) verify(
	r *raft.Raft, done func(), term uint64, began time.Time, pauses int, ended chan struct{},
) {
	defer done()
	n.mu.Lock()
	paused := pauses != n.cleared
	n.mu.Unlock()
	var err error
	if paused {
		err = r.Barrier(callTimeout).Error()
	} else {
		err = r.VerifyLeader().Error()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.verifying = nil
	close(ended)
	if err != nil || !leads(r, term) {
		if !leads(r, term) {
			n.publish(Lead{}) // before the channel of Raft says so
		}
		return
	}
	n.look(clock.Now())
	if paused {
		n.cleared = pauses
	}
	if n.pauses == n.cleared {
		n.verified, n.verifiedTerm = began, term
	}
}
