package quorum

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
)

// Digest identifies the cause of an exception that ends a member. Two equal digests are no coincidence: the
// step is in them.
type Digest struct {
	Type  string
	Place string // file, line and function
	Step  int64
	Unit  string // of the batch; empty: it is not known
}

func (d Digest) String() string {
	text := fmt.Sprintf("%s at %s in step %d", d.Type, d.Place, d.Step)
	if d.Unit != "" {
		text += ", unit " + d.Unit
	}
	return text
}

const (
	// mostDigests bounds the exceptions that are remembered.
	mostDigests = 1000
	// mostLives bounds the lives of groups that one of them has ended: errors of the device of one group.
	mostLives = 100
	// A unit of a batch is left out only if it has ended at most mostEnded lives, since it may end them also
	// when it is left out, and with it at most mostOfStep units of a step: else the code is at fault.
	mostEnded, mostOfStep = 4, 2
	// stoppedFor is how long a job without live members and without a run stays stopped. A launcher that
	// starts its groups again has done so by then, and they have learnt why they are refused. The next job is
	// another one.
	stoppedFor = time.Minute
)

// poison decides whether an exception is the fault of the data or the code, so that it would end the job
// again and again.
//
// Invariants:
//
//  1. One exception stops no job, nor do those of several ranks of a group: the process may have been at
//     fault.
//  2. Equal exceptions of two groups stop it, and those of two lives of one group: the second one had the
//     state of a peer or of a checkpoint. An error of a device counts once for each group, since that device
//     may be broken.
//  3. While the job is stopped, no request is accepted. It stays stopped for its run, however late a
//     launcher starts the groups again.
//  4. A unit that the groups ask to leave out instead (Raised.Skip) is named in each quorum at its step, so
//     that all of them leave it out.
type poison struct {
	*core
	seen    []sighting // the oldest first
	verdict string     // why the job stops; empty: it does not
	run     string     // that is stopped; empty: its groups named none
	empty   time.Time  // since when no member has been alive while it is stopped; zero: one is
	skipped []skipped
}

// skipped is a unit of the batch of a step that the groups leave out.
type skipped struct {
	step int64
	unit string // its name; no other step of the training has one of the same name
}

// sighting is an exception, and the members that it has ended.
type sighting struct {
	Digest
	members []string // replica ids, which differ in each life of a group
}

// groupOf returns the name of a group, without the UUID of its life.
func groupOf(replicaID string) string {
	name, _, _ := strings.Cut(replicaID, ":")
	return name
}

// repeats reports whether the members that an exception has ended show that it is one of data or code.
func repeats(members []string, device bool) bool {
	distinct := map[string]bool{}
	for _, id := range members {
		if device {
			id = groupOf(id)
		}
		distinct[id] = true
	}
	return len(distinct) > 1
}

// raised records an exception, and answers whether the job stops.
func (p *poison) raised(e Raised) {
	if p.verdict == "" {
		p.record(e)
	}
	p.do(Judged{e.ReplicaID, p.verdict})
}

// record records an exception, and stops the job if it repeats.
func (p *poison) record(e Raised) {
	at := slices.IndexFunc(p.seen, func(s sighting) bool { return s.Digest == e.Digest })
	if at < 0 {
		if len(p.seen) == mostDigests {
			p.seen = slices.Delete(p.seen, 0, 1)
		}
		p.seen = append(p.seen, sighting{Digest: e.Digest})
		at = len(p.seen) - 1
	}
	s := &p.seen[at]
	if !slices.Contains(s.members, e.ReplicaID) && len(s.members) < mostLives {
		s.members = append(s.members, e.ReplicaID)
	}
	if repeats(s.members, e.Device) && !p.skips(e, s.members) {
		p.verdict = fmt.Sprintf("the job stops: the same exception has ended %s: %s\n%s",
			strings.Join(s.members, " and "), s.Digest, e.Text)
		if r := p.roster.members[e.ReplicaID]; r != nil {
			p.run = r.run
		}
		p.do(Report{What: JobStops, Reason: p.verdict})
		for _, r := range slices.SortedFunc(maps.Values(p.roster.members), byID) {
			p.refusePending(r, Poisoned, p.verdict)
		}
	}
}

// skips lets the groups leave out the unit that has ended members, and reports whether they do.
func (p *poison) skips(e Raised, ended []string) bool {
	if e.Skip == "" || len(ended) > mostEnded {
		return false
	}
	ofStep := 0
	for _, s := range p.skipped {
		if s.unit == e.Skip {
			return true // the member had not received a quorum that names it
		}
		if s.step == e.Digest.Step {
			ofStep++
		}
	}
	if ofStep == mostOfStep {
		return false
	}
	p.leaveOut(skipped{e.Digest.Step, e.Skip})
	p.do(Report{What: UnitSkipped,
		Reason: fmt.Sprintf("a unit is left out: the same exception has ended %s: %s\n%s",
			strings.Join(ended, " and "), e.Digest, e.Text)})
	return true
}

// leaveOut adds a unit to those that are left out.
func (p *poison) leaveOut(unit skipped) {
	p.skipped = append(p.skipped[max(0, len(p.skipped)-mostDigests+1):], unit)
}

// adopted goes on leaving out the units of a quorum that another lighthouse, or an earlier start of this one,
// has formed. A quorum does not tell their steps, so they are named until the end of the training.
func (p *poison) adopted(units []string) {
	for _, unit := range units {
		if !slices.ContainsFunc(p.skipped, func(s skipped) bool { return s.unit == unit }) {
			p.leaveOut(skipped{math.MaxInt64, unit})
		}
	}
}

// leftOut returns the units that are left out at a step, or later.
func (p *poison) leftOut(step int64) (units []string) {
	for _, s := range p.skipped {
		if s.step >= step {
			units = append(units, s.unit)
		}
	}
	return units
}

// refuses reports whether a request of a run is refused, because the job is stopped. One of another run
// begins the next job, if no member of this one is alive.
func (p *poison) refuses(run string) bool {
	if p.run != "" && run != p.run && p.roster.counts.present == 0 {
		p.forget()
	}
	return p.verdict != ""
}

// tick forgets the verdict when the job has ended: the next one may have other data.
func (p *poison) tick() {
	switch {
	case p.verdict == "" || p.run != "":
	case p.roster.counts.healthy > 0:
		p.empty = time.Time{}
	case p.empty.IsZero():
		p.empty = p.now
	case p.now.Sub(p.empty) >= stoppedFor:
		p.forget()
	}
}

// forget drops all exceptions: another training begins.
func (p *poison) forget() { *p = poison{core: p.core} }
