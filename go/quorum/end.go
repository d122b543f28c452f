package quorum

import (
	"fmt"
	"slices"
)

// End is the end of a run: groups have reported that its training is complete. A run is one start of a job by
// its launcher, which gives all of its groups one id. The next start has another id, so that it is not
// refused.
type End struct {
	Run  string `json:"run"`  // empty: there is none
	Step int64  `json:"step"` // the number of committed steps, of the group with the most
}

// ends records that a member has reported the end of its run. It reports whether that was not known.
func (m *memory) ends(e ShuttingDown) bool {
	if !e.Finished || e.End.Run == "" || e.End.Step <= 0 {
		return false
	}
	if m.end.Run == e.End.Run && m.end.Step >= e.End.Step {
		return false
	}
	m.end = e.End
	return true
}

// refuseLate refuses the requests of groups that come back after the end of their run: the others have left,
// and such a group would make all steps again, alone. A request is refused
//
//   - if no member of the latest quorum is alive that has not finished, since that member may train on, and
//     the request is not its own;
//   - and if its step is not beyond the end.
//
// Once a member of the latest quorum has come beyond the end, it is none: the group that reported it has
// ended early, and all others may fail before they have completed the training.
func (m *memory) refuseLate() {
	if m.end.Run == "" {
		return // the usual case, without the cost of a look at each member
	}
	if m.step > m.end.Step || slices.ContainsFunc(m.members,
		func(r *record) bool { return r.step > m.end.Step }) {
		m.end = End{}
		return
	}
	if slices.ContainsFunc(m.members, func(r *record) bool { return r.alive() && !r.finished }) {
		return
	}
	var late []*record
	for _, r := range m.roster.members { // standbys, too
		if r.waiting() && r.run == m.end.Run && r.member().Step <= m.end.Step {
			late = append(late, r)
		}
	}
	slices.SortFunc(late, byID)
	for _, r := range late {
		reason := fmt.Sprintf("the training has ended: it was complete at step %d, before %s came back",
			m.end.Step, r.id)
		m.refusePending(r, Ended, reason)
		m.roster.markFailed(r, "", reason, m.now) // no group waits for it; it is in no step
	}
}
