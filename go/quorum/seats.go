package quorum

import (
	"cmp"
	"fmt"
	"slices"
)

// seats holds newcomers back while as many groups train as the policy wants (MaxReplicas). Such a standby
// keeps its request pending. It is let in when a member of the latest quorum fails or leaves, and the failed
// group is a standby when it has come back. If an operator lowers the number (Limited), the members that
// train stay, and one that leaves is not replaced.
//
// Invariants:
//
//  1. A standby is in no count of the roster, and no candidate: no decision waits for it or includes it, and
//     it is no reason to call the next quorum.
//  2. A member of the latest quorum is never held back.
//  3. Once a member has reported that its training is complete, nobody is let in while one of that quorum
//     lives: its end leaves no seat, and a newcomer would train on alone. If the last of them fails before it
//     reports that, there is no end of the training, and the next one is not held back.
type seats struct {
	*core
	taken bool // a member of the latest quorum has reported that its training is complete
}

// assign decides which newcomers are held back. It reports whether a request was let in.
func (s *seats) assign() (letIn bool) {
	most := s.policy.MaxReplicas
	if most == 0 || s.roster.newcomers.Len() == 0 {
		return false
	}
	free := most - s.roster.counts.present
	if s.taken && s.roster.counts.present > 0 {
		free = 0
	}
	for _, r := range s.roster.inOrderOfSeats() {
		held := free <= 0
		free--
		if held == r.held {
			continue
		}
		s.roster.update(r, s.now, func() { r.held = held })
		letIn = letIn || r.candidate()
	}
	return letIn
}

// inOrderOfSeats returns the live newcomers, first those that are to be let in first: those with the largest
// step, whose weights the job needs after the loss of all groups or of the lighthouse; then those that ask.
func (s *roster) inOrderOfSeats() (in []*record) {
	for e := s.newcomers.Front(); e != nil; e = e.Next() {
		if r := e.Value.(*record); r.alive() {
			in = append(in, r)
		}
	}
	asks := func(r *record) int {
		if r.waiting() {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(in, func(a, b *record) int {
		return cmp.Or(cmp.Compare(b.reports(), a.reports()), cmp.Compare(asks(a), asks(b)))
	})
	return in
}

// reports returns the step that a member reported last.
func (r *record) reports() int64 {
	if r.waiting() {
		return r.member().Step
	}
	return r.step
}

// completes records that a member has ended its training.
func (s *seats) completes(e ShuttingDown) {
	if r := s.roster.members[e.ReplicaID]; r != nil && r.previous && e.Finished {
		s.taken = true
	}
}

// end refuses the standbys: the training is complete.
func (s *seats) end() {
	s.taken = false
	for _, r := range s.roster.inOrderOfSeats() {
		if r.held {
			s.refusePending(r, Ended,
				"the training has ended: it is complete, and this standby is not needed")
		}
	}
}

// StandsBy returns why a member is held back, for the error at the deadline of its request and for people;
// empty if it is not.
func (m *Machine) StandsBy(replicaID string) string {
	r := m.roster.members[replicaID]
	if r == nil || !r.held {
		return ""
	}
	return fmt.Sprintf("this group waits as a standby: %s, max_replicas is %d",
		memberCount(m.roster.counts.healthy), m.policy.MaxReplicas)
}

// isNewcomer puts a member into the list of those that are not in the latest quorum, or removes it.
func (s *roster) isNewcomer(r *record) {
	is := r.pulse != nil && !r.previous
	switch {
	case is && r.newcomer == nil:
		r.newcomer = s.newcomers.PushBack(r)
	case !is && r.newcomer != nil:
		s.newcomers.Remove(r.newcomer)
		r.newcomer = nil
	}
	r.held = r.held && is && r.out == ""
}
