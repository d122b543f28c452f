// Package dashboard is what people see of a job: its members now, what happened to it, and how fast it went.
//
// History and Board keep it, bounded however long the job runs; Handler serves it as JSON, as a stream of events and as a
// page that draws both.
package dashboard

import (
	"fmt"
	"time"
)

// Kind says what an event is about.
type Kind string

const (
	// QuorumChanged : other members than in the quorum before.
	QuorumChanged Kind = "quorum"
	// MemberFailed : one or several members are dead.
	MemberFailed Kind = "failed"
	// NoQuorum : members have waited for some time, and there is no quorum.
	NoQuorum Kind = "waiting"
	// Killed : somebody asked to end a member.
	Killed Kind = "killed"
)

const (
	// mostEvents is how many are remembered: those of a day in which a group fails every other minute.
	mostEvents = 1000
	// mostNames is how many members an event names.
	mostNames = 8
	// longestReason in bytes.
	longestReason = 512
	// mostPoints of the throughput are remembered. When there are more, every other one goes.
	mostPoints = 2000
	// pointEvery is the distance of two points at first.
	pointEvery = time.Second
)

// Event is something that a person who looks after a job wants to know of.
type Event struct {
	ID       int64     `json:"id"` // 1 for the first one since the lighthouse began, then one more each
	Time     time.Time `json:"time"`
	Kind     Kind      `json:"kind"`
	QuorumID int64     `json:"quorum_id,omitempty"`
	Step     int64     `json:"step,omitempty"`
	Members  int       `json:"members,omitempty"` // in the quorum
	Joined   []string  `json:"joined,omitempty"`  // replica_ids
	Left     []string  `json:"left,omitempty"`
	Reason   string    `json:"reason,omitempty"`
}

// Point is how far the job was at a time.
type Point struct {
	At     int64 `json:"at"`     // milliseconds since 1970
	Step   int64 `json:"step"`   // largest of the quorum
	Groups int   `json:"groups"` // in the quorum
}

// History is what happened to a job. Not for use by several goroutines at once.
type History struct {
	events []Event // a ring
	next   int64   // id of the next event, from 1
	points []Point
	every  time.Duration
}

// Add remembers an event, and returns it as it is remembered.
func (h *History) Add(e Event) Event {
	e.ID = h.next + 1
	h.next++
	e.Joined, e.Left = names(e.Joined), names(e.Left)
	if len(e.Reason) > longestReason {
		e.Reason = e.Reason[:longestReason] + "…"
	}
	if len(h.events) < mostEvents {
		h.events = append(h.events, e)
	} else {
		h.events[(e.ID-1)%mostEvents] = e
	}
	return e
}

// After returns the events with an id above this one, the oldest first; at most those that are remembered.
func (h *History) After(id int64) []Event {
	oldest := h.next - int64(len(h.events)) // the id before the oldest
	found := make([]Event, 0, max(0, h.next-max(id, oldest)))
	for i := max(id, oldest); i < h.next; i++ {
		found = append(found, h.events[i%mostEvents])
	}
	return found
}

// Round remembers how far the job is, if the last time is long enough ago.
func (h *History) Round(step int64, groups int, now time.Time) {
	p := Point{At: now.UnixMilli(), Step: step, Groups: groups}
	if n := len(h.points); n > 0 {
		// A change of the members is a point of its own: the time between tells what it cost.
		last := h.points[n-1]
		if p.At-last.At < max(h.every, pointEvery).Milliseconds() && last.Groups == groups {
			return
		}
	}
	if len(h.points) == mostPoints {
		kept := h.points[:0]
		for i := 0; i < mostPoints; i += 2 {
			kept = append(kept, h.points[i])
		}
		h.points = kept
		h.every = 2 * max(h.every, pointEvery)
	}
	h.points = append(h.points, p)
}

// Points returns how far the job was, the oldest first.
func (h *History) Points() []Point { return append([]Point{}, h.points...) }

func names(all []string) []string {
	if len(all) <= mostNames {
		return all
	}
	return append(append([]string(nil), all[:mostNames]...), fmt.Sprintf("and %d more", len(all)-mostNames))
}
