// Package dashboard shows a job to people: its present members, its events, and its speed.
//
// History and Board keep these in bounded memory, however long the job runs. Feed.Register adds the routes
// that serve them, as JSON and as a stream of events, and the web page that draws them.
package dashboard

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Kind is the kind of an event.
type Kind string

const (
	// QuorumChanged : the quorum has other members than the previous one.
	QuorumChanged Kind = "quorum"
	// MemberFailed : one or several members have failed.
	MemberFailed Kind = "failed"
	// MemberEnded : one or several members have shut down.
	MemberEnded Kind = "ended"
	// NoQuorum : requests have been pending for some time without a quorum.
	NoQuorum Kind = "waiting"
	// Healed : a group has taken over the state of another one.
	Healed Kind = "healed"
	// Recovered : the survivors of a failure have committed a step again.
	Recovered Kind = "recovered"
	// Drained : a member was asked to leave at the end of a step.
	Drained Kind = "drained"
	// Refused : a member does not fit to the job, and takes no part in it.
	Refused Kind = "refused"
	// Regressed : a quorum is below the step that the job had reached.
	Regressed Kind = "regressed"
	// Killed : a member was ended on request.
	Killed Kind = "killed"
	// Scaled : the number of groups was changed, or is to stay; the reason says how and why.
	Scaled Kind = "scaled"
	// Stopped : the job stops, since the same exception would end it again.
	Stopped Kind = "stopped"
	// Skipped : all groups leave out a unit of a batch, since it would end each of them.
	Skipped Kind = "skipped"
	// MemberStalled : one or several members make no progress while others wait for them.
	MemberStalled Kind = "stalled"
	// Straggler : a member has become slower than the others.
	Straggler Kind = "straggler"
	// Corrupted : members have computed other gradients than others of the same unit.
	Corrupted Kind = "corrupted"
	// BadNode : a host is slow or broken, as its check says before its groups start.
	BadNode Kind = "bad_node"
	// Stacks : where the threads of one rank of such a member are.
	Stacks Kind = "stacks"
)

const (
	// mostEvents is how many events are kept: enough for a day in which a group fails every eight minutes.
	// Such a failure adds five: the failure, the quorums without and with the group, its heal, and the
	// recovery of the others.
	mostEvents = 1000
	// mostNames is how many members an event, or a line of the log, names.
	mostNames = 8
	// longestStacks is the length in bytes to which the stacks of a rank are shortened.
	longestStacks = 16 << 10
	// longestReason is the length in bytes to which reasons are shortened.
	longestReason = 512
	// mostPoints is how many points of the throughput are kept. With more, every other one is removed.
	mostPoints = 2000
	// pointEvery is the shortest interval between two points. It becomes longer as points are removed.
	pointEvery = time.Second
)

// Event is an entry of a job's history, for its operators.
type Event struct {
	ID       int64     `json:"id"` // consecutive, from 1 at the start of the lighthouse
	Time     time.Time `json:"time"`
	Kind     Kind      `json:"kind"`
	QuorumID int64     `json:"quorum_id,omitempty"`
	Step     int64     `json:"step,omitempty"`
	Members  int       `json:"members,omitempty"` // in the quorum
	Joined   []string  `json:"joined,omitempty"`  // replica_ids
	Left     []string  `json:"left,omitempty"`
	Reason   string    `json:"reason,omitempty"`
	Stacks   string    `json:"stacks,omitempty"` // of the rank that Reason names; for Stacks only
	// The fields below are set for Healed and Recovered only, and Who for Stacks.
	Who       string  `json:"who,omitempty"`    // replica_id
	Bytes     int64   `json:"bytes,omitempty"`  // of the received state
	Phases    []Phase `json:"phases,omitempty"` // the parts of its duration, in order
	StepsLost int64   `json:"steps_lost,omitempty"`
}

// Took returns how long a recovery took: the sum of its phases. The phase "total" is not added, since it is
// that sum already.
func (e Event) Took() (seconds float64) {
	for _, p := range e.Phases {
		if p.Name != "total" {
			seconds += p.Seconds
		}
	}
	return seconds
}

// Phase is a part of a recovery.
type Phase struct {
	Name    string  `json:"phase"`
	Seconds float64 `json:"seconds"`
}

// Point is the progress of a job at one time.
type Point struct {
	At     int64 `json:"at"`     // milliseconds since 1970
	Step   int64 `json:"step"`   // largest step of the quorum
	Groups int   `json:"groups"` // in the quorum
	// Trained counts the steps that the job has made since the start of the lighthouse. A group with a
	// checkpoint raises Step at once.
	Trained int64 `json:"trained"`
}

// History keeps the events and the throughput of a job. It is not safe for concurrent use.
type History struct {
	events []Event // a ring
	next   int64   // id of the newest event; 0: there was none
	newest map[Kind]Event
	points []Point
	latest Point         // of the latest round
	since  time.Time     // when the job came to its step
	every  time.Duration // the shortest interval between two points; 0 (pointEvery) before the first removal
}

// Add stores an event, and returns it with its id and with shortened texts.
func (h *History) Add(e Event) Event {
	e.ID = h.next + 1
	h.next++
	e.Joined, e.Left = Names(e.Joined), Names(e.Left)
	if len(e.Reason) > longestReason {
		e.Reason = e.Reason[:longestReason] + "…"
	}
	if len(e.Stacks) > longestStacks {
		e.Stacks = strings.ToValidUTF8(e.Stacks[:longestStacks], "") + "…"
	}
	if len(h.events) < mostEvents {
		h.events = append(h.events, e)
	} else {
		h.events[(e.ID-1)%mostEvents] = e
	}
	if slices.Contains(notices, e.Kind) {
		if h.newest == nil {
			h.newest = map[Kind]Event{}
		}
		h.newest[e.Kind] = e
	}
	return e
}

// notices are the kinds of events that no state of a member or of the job shows.
var notices = []Kind{Skipped, Scaled, Corrupted, BadNode}

// Notices returns the newest event of each of these kinds, the oldest first.
func (h *History) Notices() (found []Event) {
	for _, kind := range notices {
		if e, known := h.newest[kind]; known {
			found = append(found, e)
		}
	}
	slices.SortFunc(found, func(a, b Event) int { return cmp.Compare(a.ID, b.ID) })
	return found
}

// After returns the kept events with a larger id, the oldest first.
func (h *History) After(id int64) []Event {
	id = h.known(id)
	found := make([]Event, 0, h.next-id)
	for i := id; i < h.next; i++ {
		found = append(found, h.events[i%mostEvents])
	}
	return found
}

// known returns the id after which After begins: the given one, or the one before the oldest kept event if
// that is larger. An id above all existing ones is from an earlier process of the lighthouse, so all kept
// events are new to the client.
func (h *History) known(id int64) int64 {
	oldest := h.next - int64(len(h.events)) // the id before the oldest
	if id > h.next {
		return oldest
	}
	return max(id, oldest)
}

// Round adds a point for a round, unless the last point is too recent. It returns how many steps the job has
// made since it came to the step before, and in which time. A round follows one step, or the steps of a
// quorum that stood, which Advanced has counted.
func (h *History) Round(step int64, groups int, now time.Time) (made int64, took time.Duration) {
	if step == h.latest.Step+1 { // otherwise a group with a later checkpoint has joined
		made = 1
	}
	return h.add(step, groups, made, now)
}

// Advanced does the same for a quorum that stands.
func (h *History) Advanced(step int64, groups int, now time.Time) (made int64, took time.Duration) {
	return h.add(step, groups, max(0, step-h.latest.Step), now)
}

func (h *History) add(step int64, groups int, steps int64, now time.Time) (made int64, took time.Duration) {
	first := h.latest.At == 0
	if !first { // otherwise an earlier lighthouse has seen these steps
		made, took = steps, now.Sub(h.since)
	}
	if first || step != h.latest.Step {
		h.since = now
	}
	p := Point{At: now.UnixMilli(), Step: step, Groups: groups, Trained: h.latest.Trained + made}
	h.latest = p
	if n := len(h.points); n > 0 {
		// A change of the number of groups always adds a point: the distance to the next point shows the cost
		// of the change.
		last := h.points[n-1]
		if p.At-last.At < max(h.every, pointEvery).Milliseconds() && last.Groups == groups {
			return made, took
		}
	}
	if len(h.points) == mostPoints {
		kept := h.points[:0]
		for i := 0; i < mostPoints; i += 2 {
			kept = append(kept, h.points[i])
		}
		h.points = kept
		// As far apart as the kept points are on average. It is not doubled: the points may be from many
		// changes within a short time.
		h.every = time.Duration(p.At-kept[0].At) * time.Millisecond / time.Duration(len(kept))
	}
	h.points = append(h.points, p)
	return made, took
}

// Points returns the points, the oldest first.
func (h *History) Points() []Point { return append([]Point{}, h.points...) }

// Names returns the first names of a list, for people: a list may have thousands.
func Names(all []string) []string {
	if len(all) <= mostNames {
		return all
	}
	return append(slices.Clone(all[:mostNames]), fmt.Sprintf("and %d more", len(all)-mostNames))
}
