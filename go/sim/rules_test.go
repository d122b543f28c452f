package sim

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// The rules, with the texts of docs/internals/correctness.md.
const (
	ruleOneSet    = "one member set for each quorum_id"
	ruleIDs       = "ids never fall"
	ruleMajority  = "off the fast path no quorum without a majority of the healthy"
	ruleMembers   = "a quorum has exactly the members that wait, each once"
	ruleBroadcast = "a quorum reaches all members that wait for it"
	ruleHeal      = "a group that is behind heals to max_step, from a member of its quorum at that step"
	ruleEqual     = "groups that commit a step in one quorum hold equal states"
	ruleOwn       = "each contribution to an average has gradients of the contributor's own weights"
	ruleKept      = "a failure costs no step that a live group has computed"
	ruleOnce      = "no step is committed again by a replay"
	ruleDivisor   = "all contributors to an average divide by the same number, and cut the batch alike"
	ruleVote      = "a group commits only what all its ranks voted for in the same attempt"
	ruleForms     = "enough connected members form a quorum within a bounded time"
	ruleCause     = "a group counts as failed for a true cause, never by the report of one other"
	ruleRelease   = "a group that left is kept until no other is in its last step"
	ruleLoses     = "a fault costs at most the documented number of steps"
	ruleProgress  = "a connected group commits within a bounded time"
	ruleNewcomer  = "a healthy newcomer that keeps asking is in a quorum within two rounds"
	ruleStale     = "a request that arrives after a newer one of its member is refused"
	ruleWaiters   = "every waiter is answered once, by its deadline"
	ruleBehind    = "a quorum behind the job waits for the members that were ahead"
	ruleUnshown   = "a group that claims a quorum and does not show it does not stop the others"
	ruleMemory    = "memory is bounded by live members"
	ruleDrained   = "a group that was asked to leave learns it with its next quorum, all ranks with the " +
		"same one"
	ruleFinished = "a training that begins after a completed one is no regression"
	ruleReported = "a failure reaches all members of its quorum"
	ruleSoon     = "after a failure the others have a quorum as soon as it can be known"
	ruleTogether = "groups that reach each other and the lighthouse train in one quorum within a bounded " +
		"time"
	ruleEarly = "a call ends before its deadline with an error only if something of its own group failed"
	ruleCalm  = "while nothing fails, no step is lost and no call ends with an error"
)

// slack is how long messages and timers may delay a report.
const slack = time.Second

// quiet is how long no fault may have changed which groups are healthy at the lighthouse, before rules about
// that are checked.
func (j *judge) quiet() time.Duration { return j.policy.HeartbeatTimeout + 2*time.Second }

func (j *judge) clear() bool {
	return j.up && j.unclear == 0 && j.now-max(j.blurred, j.restarted) > j.quiet()
}

// arrived reports whether a pending request has reached the lighthouse. One that was sent while the
// lighthouse could not be reached, or soon afterwards, may be on a connection whose end its client notices
// only after 20 s.
func (j *judge) arrived(l *life) bool {
	reachable := max(j.blurred, j.restarted)
	return l.pending && j.now-l.askedAt > slack &&
		(l.askedAt > reachable+j.quiet() || j.now-reachable > 25*time.Second)
}

// doubt is a breach of a rule that a report may explain which is on its way still: it is confirmed a moment
// later.
type doubt struct {
	at      time.Duration
	confirm func()
}

func (j *judge) doubt(confirm func()) { j.doubts = append(j.doubts, doubt{j.now + slack, confirm}) }

// formed checks a quorum when the first of its members receives it: at that time, the field asked of each
// member is still the request that this quorum answers.
func (j *judge) formed(q *quorum.Quorum) {
	bound := j.policy.HeartbeatTimeout + j.timeout
	after, ids := int64(0), []string{}
	// a smaller step may be sent (quorum/behind.go)
	silent := slices.ContainsFunc(q.Members, func(m quorum.Member) bool { return m.CommittedQuorumID == 0 })
	for i := range q.Members {
		m := &q.Members[i]
		l := j.byID[m.ReplicaID]
		switch {
		case l == nil:
			j.broken(ruleMembers, "quorum %d has %s, which never started", q.ID, m.ReplicaID)
			return
		case i > 0 && m.ReplicaID <= ids[i-1]:
			j.broken(ruleMembers, "quorum %d has %s twice or not in order", q.ID, m.ReplicaID)
		case l.killed && j.now-l.ended > bound && (j.paused > l.ended+bound || j.now-j.held > bound):
			j.broken(ruleMembers, "%s is in quorum %d and failed %s before", l.id, q.ID, j.now-l.ended)
		case m.Step != l.asked.Step && (!silent || m.Step+1 != l.asked.Step) ||
			m.CommitFailures != l.asked.CommitFailures:
			j.broken(ruleStale,
				"%s is in quorum %d with step %d and %d failures, and asks with step %d and %d failures",
				l.id, q.ID, m.Step, m.CommitFailures, l.asked.Step, l.asked.CommitFailures)
		}
		if l.quorum != nil && l.quorum.ID != q.ID {
			after = max(after, l.quorum.ID)
		}
		if l.unansweredFrom == 0 && l.pending && j.clear() {
			l.unansweredFrom = j.now
		}
		ids = append(ids, l.id)
	}
	if q.ID < after { // not the largest id of all groups: others may already have received later quorums
		j.broken(ruleIDs, "quorum %d comes after quorum %d", q.ID, after)
	}
	if before, known := j.quorums[q.ID]; known && !slices.Equal(before, ids) {
		j.broken(ruleOneSet, "quorum %d had %v, and now has %s", q.ID, before, describe(q))
	}
	j.quorums[q.ID] = ids
	j.due(q, ids)
	j.before, j.last, j.reached, j.lastTime = j.last, ids, 0, j.now
	for i := range q.Members {
		j.reached = max(j.reached, q.Members[i].Step)
	}
}

// due checks that a quorum waited for those for which it has to wait, and has the members that it has to
// have.
func (j *judge) due(q *quorum.Quorum, ids []string) {
	if len(ids) < j.policy.MinReplicas {
		j.broken(ruleMajority, "quorum %d has %d members, min_replicas is %d", q.ID, len(ids),
			j.policy.MinReplicas)
	}
	in := func(id string) bool { return slices.Contains(ids, id) }
	if most := j.policy.MaxReplicas; most > 0 && len(ids) > most {
		j.broken(ruleMajority, "quorum %d has %d members, max_replicas is %d", q.ID, len(ids), most)
	}
	shrinks := slices.ContainsFunc(j.places, func(p place) bool { return p.l != nil && p.l.asked.ShrinkOnly })
	now := j.now
	if !j.clear() || shrinks {
		// such a request, also of a group that is in no quorum, keeps all newcomers out
		return
	}
	waited, joining, former := time.Duration(0), time.Duration(0), false
	for _, id := range ids {
		since := now - j.byID[id].askedAt
		waited = max(waited, since)
		if slices.Contains(j.last, id) {
			joining, former = max(joining, since), true
		}
	}
	if !former {
		joining = waited
	}
	// groups that are healthy and not in the quorum; those among them that were in the previous one
	var missing, ahead []*life
	for i := range j.places {
		l := j.places[i].l
		if l == nil || in(l.id) || l.asks == 0 || l.out == l.asks || l.leaving || j.upstream.has(i) ||
			j.standsBy(l, len(ids)) {
			continue
		}
		missing = append(missing, l)
		if slices.Contains(j.last, l.id) {
			ahead = append(ahead, l)
		}
		if j.arrived(l) {
			if l.missed++; l.missed >= 2 {
				j.doubt(func() {
					j.broken(ruleNewcomer, "%s waits since %s, and quorum %d of %s is the second without it",
						l.id, l.askedAt, q.ID, now)
				})
			}
		}
	}
	if len(j.last) == 0 || !slices.ContainsFunc(j.last, func(id string) bool { return !in(id) }) {
		return // the fast path
	}
	alive := func(of []*life) (n int, still string) {
		for _, l := range of {
			if !l.killed && l.out != l.asks && !l.leaving {
				n, still = n+1, l.id
			}
		}
		return n, still
	}
	asking := slices.ContainsFunc(missing, func(l *life) bool { return l.pending })
	step, reached := int64(0), j.reached
	for i := range q.Members {
		step = max(step, q.Members[i].Step)
	}
	j.doubt(func() {
		n, still := alive(missing)
		if n == 0 || asking {
			return
		}
		if n >= len(ids) {
			j.broken(ruleMajority, "quorum %d of %s has %d members, and %d others are healthy", q.ID, now,
				len(ids), n)
		}
		if joining < j.policy.JoinTimeout {
			j.broken(ruleMajority, "quorum %d of %s does not wait for %s, which is healthy and has not asked",
				q.ID, now, still)
		}
		if m, still := alive(ahead); m > 0 && step < reached && waited < j.policy.HeartbeatTimeout {
			j.broken(ruleBehind, "quorum %d of %s continues at step %d, and %s of the one before, which "+
				"was at step %d, is alive", q.ID, now, step, still, reached)
		}
	})
}

// standsBy reports whether a group is held back while a quorum of this size trains.
func (j *judge) standsBy(l *life, members int) bool {
	return j.policy.MaxReplicas > 0 && members >= j.policy.MaxReplicas && !slices.Contains(j.last, l.id)
}

// soon checks that the first quorum after a failure is not late: the other members only have to complete or
// abort their step.
func (j *judge) soon(l *life, q *quorum.Quorum) {
	f := j.failed
	if f == nil || l.learned > f.ended {
		return
	}
	due := j.known + 3*j.compute/2 + 3*j.tick + slack
	if j.replay {
		due += slack
	}
	if j.now > due && j.load == 0 && len(q.Members) >= j.slots-1 && j.slots-1 >= j.policy.MinReplicas {
		j.broken(ruleSoon, "%s has quorum %d %s after %s has failed, which can be known after %s", l.id, q.ID,
			j.now-f.ended, f.id, j.known-f.ended)
	}
	j.failed = nil
}

// behind returns the largest step of a quorum, and whether a member has to heal in it.
func behind(id string, q *quorum.Quorum) (maxStep int64, is bool) {
	known, newest, own := true, int64(-1), -1
	for i := range q.Members {
		m := &q.Members[i]
		maxStep = max(maxStep, m.Step)
		known = known && m.CommittedQuorumID != 0
		if m.ReplicaID == id {
			own = i
		}
	}
	for i := range q.Members {
		if m := &q.Members[i]; m.Step == maxStep {
			newest = max(newest, m.CommittedQuorumID)
		}
	}
	m := &q.Members[own]
	return maxStep, m.Step < maxStep || known && m.CommittedQuorumID != newest
}

// answered checks a rank's result of a quorum.
func (j *judge) answered(r *model, a *torchftpb.ManagerQuorumResponse) {
	l, q := r.l, r.l.quorum
	maxStep, behind := l.maxStep, l.behind
	if r.attempt == l.attempt { // the group trains on in the quorum
		maxStep, behind = r.step, false
	}
	switch {
	case a.GetQuorumId() != q.ID:
		j.broken(ruleHeal, "%s receives quorum %d, the latest it asked for is %d", r, a.GetQuorumId(), q.ID)
	case a.GetMaxStep() != maxStep:
		j.broken(ruleHeal, "%s takes %d for max_step of quorum %d, it is %d", r, a.MaxStep, q.ID, maxStep)
	case behind && !a.GetHeal():
		j.broken(ruleHeal, "%s is behind in quorum %d and is not to heal", r, q.ID)
	case a.GetHeal() && a.RecoverSrcReplicaRank == nil:
		j.broken(ruleHeal, "%s shall heal in quorum %d, and has no source", r, q.ID)
	}
	if a.RecoverSrcReplicaRank != nil {
		source := a.GetRecoverSrcReplicaRank()
		if source < 0 || source >= int64(len(q.Members)) {
			j.broken(ruleHeal, "%s shall heal from replica rank %d, quorum %d has %d", r, source, q.ID,
				len(q.Members))
			return
		}
		m := &q.Members[source]
		if m.Step != maxStep || m.Address != a.GetRecoverSrcManagerAddress() || m.ReplicaID == l.id {
			j.broken(ruleHeal, "%s shall heal in quorum %d from %s, at step %d, max_step is %d", r, q.ID,
				m.ReplicaID, m.Step, maxStep)
		}
	}
	j.drained(r, a)
}

// drained checks that a group that was asked to leave learns it with its next quorum that does not stand, and
// all of its ranks with the same one.
func (j *judge) drained(r *model, a *torchftpb.ManagerQuorumResponse) {
	l := r.l
	switch {
	case a.GetDraining() && !l.wanted && !l.hinted:
		j.broken(ruleDrained,
			"%s learns with quorum %d that it is its last, and its group was not asked to leave", r,
			a.GetQuorumId())
	case !a.GetDraining() && !l.quorum.Stands && l.wanted && l.wantedAt+slack < l.askedAt &&
		l.learned > l.askedAt:
		j.broken(ruleDrained,
			"%s does not learn with quorum %d that it is its last, and its group was asked to leave at %s", r,
			a.GetQuorumId(), l.wantedAt)
	case l.told.attempt == l.attempt && l.told.last != a.GetDraining():
		j.broken(ruleDrained,
			"%s learns with quorum %d whether it is its last: %t, and others of its group did otherwise", r,
			a.GetQuorumId(), a.GetDraining())
	}
	l.told.attempt, l.told.last = l.attempt, a.GetDraining()
}

// hasCause checks that a group which is reported as failed has failed, or that a fault may be the cause.
func (j *judge) hasCause(l *life, reason string) {
	known := l.killed || l.leaving || !j.clear() || j.now-l.began < j.quiet() ||
		l.erred > 0 && (j.now-l.erred < j.quiet() || l.erred >= l.learned)
	stuck := j.policy.EjectStalledAfter > 0
	if stuck && !slices.ContainsFunc(l.ranks,
		func(r *model) bool { return r.phase != reducing || j.now-r.arrived < 2*slack }) {
		stuck = false // all of its ranks wait for others
	}
	if !known && !stuck {
		j.broken(ruleCause, "%s counts as failed: %s, which is not so", l.id, reason)
	}
}

// released checks, when a group that left may end, that no live group is in its last step, unless the
// lighthouse has formed the next quorum without that one.
func (j *judge) released(l *life) {
	now := j.start.Add(j.now)
	for _, id := range j.last {
		o := j.byID[id]
		if o == l || o.killed || o.leaving || o.pending || o.quorum == nil || !j.clear() || o.out == o.asks ||
			!o.quorum.Created.Equal(l.quorum.Created) {
			continue
		}
		j.doubt(func() {
			if !slices.ContainsFunc(j.created,
				func(c time.Time) bool { return c.After(l.quorum.Created) && !c.After(now) }) {
				j.broken(ruleRelease, "%s left at %s and may end, and %s is still in its last step", l.id,
					now.Sub(j.start), id)
			}
		})
	}
}

// unreleased checks, when a group that left was not told in time that it may end, that another one is in its
// last step.
func (j *judge) unreleased(l *life, err error) {
	if !j.clear() || slices.ContainsFunc(j.last, func(id string) bool {
		o := j.byID[id]
		return o != l && !o.killed && !o.leaving && !j.arrived(o)
	}) {
		return
	}
	j.waits("%s has left, and is not released: %v", l.id, err)
}

// regressed checks a warning of the lighthouse that the job regresses: not after all members of the previous
// quorum have completed their training.
func (j *judge) regressed(quorumID int64) {
	j.logf("quorum %d is reported to regress", quorumID)
	if len(j.before) == 0 || !j.clear() || slices.ContainsFunc(j.before,
		func(id string) bool { return !j.byID[id].announced }) {
		return
	}
	j.broken(ruleFinished, "quorum %d is reported to regress behind a job of which nothing is left", quorumID)
}

// ticked checks what holds at any time. It is called often.
func (j *judge) ticked(remembered *dashboard.Status) {
	j.doubts = slices.DeleteFunc(j.doubts, func(d doubt) bool {
		if d.at > j.now {
			return false
		}
		d.confirm()
		return true
	})
	for _, l := range j.lives {
		if l.unansweredFrom > 0 && !l.killed && l.pending && j.now-l.unansweredFrom > 2*slack && j.clear() &&
			j.rough == 0 {
			j.broken(ruleBroadcast, "%s is in a quorum of %s and gets no answer", l.id, l.unansweredFrom)
		}
	}
	j.remembers(remembered)
	j.overdue()
	j.progress()
}

// remembers checks how many groups the lighthouse remembers, and that it does not hold requests of ended
// ones.
func (j *judge) remembers(s *dashboard.Status) {
	if s == nil || !j.clear() {
		return
	}
	if deserted := j.alive(); deserted > 0 && j.now-deserted < 25*time.Second {
		// a lighthouse that hears nobody cannot tell a silence from its own: the connections have to break
		return
	}
	for _, m := range s.Members {
		l := j.byID[m.ReplicaID]
		if old := j.now - l.ended; l.killed &&
			old > j.policy.HeartbeatTimeout+j.policy.SuspectGrace+3*j.tick+slack && !m.InQuorum &&
			(!m.Waiting || old > 25*time.Second) {
			j.broken(ruleMemory, "the lighthouse remembers %s, which ended %s before", l.id, old)
		}
	}
}

// alive returns when there was no live group last; 0: there always was one.
func (j *judge) alive() time.Duration {
	if slices.ContainsFunc(j.places, func(p place) bool { return p.l != nil }) {
		return j.deserted
	}
	j.deserted = j.now
	return j.now
}

// overdue checks that the groups that ask are not kept waiting if they are enough.
func (j *judge) overdue() {
	if !j.clear() || j.upstream != 0 {
		return
	}
	asking, healthy, waited := 0, 0, time.Duration(0)
	for _, l := range j.lives {
		switch {
		case l.killed && j.now-l.ended > j.quiet() || l.leaving:
		case l.killed:
			healthy++ // perhaps still
		case l.asked.ShrinkOnly || l.claimed:
			j.excused = j.now
			return
		case j.arrived(l) && j.attached(l.slot):
			if since := j.now - max(l.askedAt, j.excused); asking == 0 || slices.Contains(j.last, l.id) {
				waited = max(waited, since)
			}
			asking++
			healthy++
		default:
			healthy++
		}
	}
	// Members with an earlier step wait for those ahead, for the heartbeat timeout at most.
	if asking >= j.policy.MinReplicas && 2*asking > healthy &&
		waited > max(j.policy.JoinTimeout, j.policy.HeartbeatTimeout)+j.policy.HeartbeatTimeout+2*slack {
		j.broken(ruleForms, "%d of %d groups wait for %s, and there is no quorum", asking, healthy, waited)
	}
}

// progress checks that groups keep committing while the network and the groups do not change. The conditions
// are that the groups are connected to each other and to the lighthouse, and that they are at least
// min_replicas and more than half of the healthy ones.
func (j *judge) progress() {
	bound := j.bound()
	if j.rough > 0 || !j.up || j.now-j.changed <= bound {
		return
	}
	connected, healthy := 0, 0
	for i := range j.places {
		if j.places[i].l != nil && j.places[i].cutUp == 0 {
			healthy++
		}
		if !j.attached(i) {
			continue
		}
		connected++
		for k := range i {
			if j.attached(k) && !j.meet(i, k) {
				return
			}
		}
	}
	if connected < j.policy.MinReplicas || 2*connected <= healthy {
		return
	}
	for i := range j.places {
		l := j.places[i].l
		if j.attached(i) && !j.standsBy(l, len(j.last)) && j.now-max(l.began, l.lastCommit) > bound {
			if j.now-j.lastTime > bound {
				j.broken(ruleForms, "%d groups are connected, and there has been no quorum for %s", connected,
					j.now-j.lastTime)
			}
			j.broken(ruleProgress, "%s has not committed for %s", l.id, j.now-l.lastCommit)
		}
	}
}

// home reports whether each slot has a live group, all of them can reach the lighthouse and each other, and
// no current fault suspends the rules with a time limit (fault.rough).
func (j *judge) home() bool {
	for i := range j.places {
		if !j.up || !j.attached(i) {
			return false
		}
		for k := range i {
			if !j.meet(i, k) {
				return false
			}
		}
	}
	return j.rough == 0
}

// settled reports whether all groups have trained for some steps in one quorum. It must become true within a
// bounded time after the last fault, if all groups can reach the lighthouse.
func (j *judge) settled() bool {
	why, _ := j.apart()
	j.calmed = j.calmed || why == "" && j.rough == 0 && (!j.up || j.home() && j.noticedAll())
	if !j.home() {
		return false
	}
	if late := j.now - j.changed; why != "" && late > j.bound() {
		j.broken(ruleTogether, "%s after the last fault %s", late, why)
	}
	return why == ""
}

// noticedAll reports whether all groups have noticed that the connections to a lighthouse on a host which
// vanished are gone: each has asked since then, or the time has passed after which a connection without
// answers is closed.
func (j *judge) noticedAll() bool {
	since := max(j.restarted, j.changed)
	return j.now-since > 25*time.Second || !slices.ContainsFunc(j.places,
		func(p place) bool { return p.l.askedAt < since })
}

// apart returns the id of the quorum that has exactly the groups of all slots as its members, but for
// standbys, and in which each of them has committed at least three steps. If there is no such quorum, why is
// the reason, and otherwise it is empty.
func (j *judge) apart() (why string, id int64) {
	for i := range j.places {
		l := j.places[i].l
		switch {
		case l == nil:
			return fmt.Sprintf("no group is in slot %d", i), id
		case j.standsBy(l, len(j.last)):
			continue
		case l.in == 0:
			return fmt.Sprintf("%s has committed nothing", l.id), id
		case id != 0 && l.in != id:
			return fmt.Sprintf("%s is in quorum %d, and another group in quorum %d", l.id, l.in, id), id
		case l.steps < 3:
			return fmt.Sprintf("%s has committed %d steps", l.id, l.steps), id
		}
		id = l.in
	}
	if n := len(j.quorums[id]); n != cmp.Or(j.policy.MaxReplicas, j.slots) {
		return fmt.Sprintf("quorum %d has %d members, %d live", id, n, j.slots), id
	}
	return "", id
}

// disturbed handles an error of a call. While the job is calm, an error breaks a rule, since no fault can
// have caused it.
func (j *judge) disturbed(format string, args ...any) {
	if j.calmed {
		j.broken(ruleCalm, format, args...)
	}
}
