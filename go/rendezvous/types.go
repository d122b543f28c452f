// Package rendezvous decides which nodes of a replica group train together, and assigns each its rank. A node is an agent of
// torchrun with its workers. The machine has no IO: Step gets an event and the time, and returns actions.
//
// A node that wants to train asks. A round is released to nodes that have asked, in an allowed number. Workers restart in each
// new round, so a round is not ended for a newcomer before a larger allowed number of nodes can be reached.
package rendezvous

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	maxNodes  = 4096
	maxGroups = 4096
	maxName   = 128
	// maxRound bounds what a node says of the rounds before a restart of the lighthouse: the numbers go on from there.
	maxRound = 1 << 40
)

// Settings are the same for all nodes of a group.
type Settings struct {
	Min        int    `json:"min"`
	Max        int    `json:"max"`
	Sizes      string `json:"sizes"`        // "all", "powers_of_two", or numbers of nodes as in "1/2/4"
	LastCallMS int64  `json:"last_call_ms"` // how long a round waits for further nodes, from the first moment at which it could be released
}

func (s Settings) lastCall() time.Duration { return time.Duration(s.LastCallMS) * time.Millisecond }

func (s Settings) String() string {
	return fmt.Sprintf("nnodes %d:%d, sizes %s, last_call_timeout %g s", s.Min, s.Max, s.Sizes, s.lastCall().Seconds())
}

// allowed are the allowed numbers of nodes, ascending.
func (s Settings) allowed() ([]int, error) {
	if s.Min < 1 || s.Max < s.Min || s.Max > maxNodes {
		return nil, fmt.Errorf("nnodes is %d:%d: it must be MIN:MAX with 1 <= MIN <= MAX <= %d", s.Min, s.Max, maxNodes)
	}
	if s.LastCallMS < 0 || s.LastCallMS > time.Hour.Milliseconds()*24 {
		return nil, fmt.Errorf("last_call_timeout is %g s: it must be from 0 to a day", float64(s.LastCallMS)/1000)
	}
	var sizes []int
	switch s.Sizes {
	case "all":
		for n := s.Min; n <= s.Max; n++ {
			sizes = append(sizes, n)
		}
	case "powers_of_two":
		for n := 1; n <= s.Max; n *= 2 {
			if n >= s.Min {
				sizes = append(sizes, n)
			}
		}
		if len(sizes) == 0 {
			return nil, fmt.Errorf("sizes is powers_of_two: none is within nnodes %d:%d", s.Min, s.Max)
		}
	default:
		for _, text := range strings.Split(s.Sizes, "/") {
			n, err := strconv.Atoi(text)
			if err != nil {
				return nil, fmt.Errorf(`sizes is %q: it must be "all", "powers_of_two", or numbers of nodes such as 1/2/4`, s.Sizes)
			}
			if n < s.Min || n > s.Max {
				return nil, fmt.Errorf("sizes is %q: %d nodes are not within nnodes %d:%d", s.Sizes, n, s.Min, s.Max)
			}
			sizes = append(sizes, n)
		}
		slices.Sort(sizes)
		sizes = slices.Compact(sizes)
	}
	return sizes, nil
}

// Request is all that a node says, each time.
type Request struct {
	Group string `json:"group"`
	Node  string `json:"node"`  // one name for each life of an agent
	Store string `json:"store"` // host:port of the store that it offers to its group, should it become rank 0
	Ask   int64  `json:"ask"`   // how often it has asked for a round; 0: it is starting
	Seen  View   `json:"seen"`  // the last one that it got: it waits for another one
	Leave bool   `json:"leave"` // it ends; nothing else of it counts
	Close bool   `json:"close"` // the work of its group is done: no round follows
	Settings
}

// View is the answer to one node. Nodes send it back with their next request, so a machine that lost its state gets it again.
type View struct {
	Ask     int64  `json:"ask"`   // that this answers
	Round   int64  `json:"round"` // in which the node was placed for it; 0: none yet
	Rank    int    `json:"rank"`
	Size    int    `json:"size"`    // nodes in the round
	Store   string `json:"store"`   // that of rank 0; empty: the group has moved on to another round
	Waiting int    `json:"waiting"` // nodes for which the workers of this one should restart
	Closed  bool   `json:"closed"`
}

func (r Request) validate() error {
	if r.Node == "" || len(r.Node) > maxName {
		return fmt.Errorf("node has %d bytes: it must have 1 to %d", len(r.Node), maxName)
	}
	if len(r.Group) > maxName {
		return fmt.Errorf("group has %d bytes: it must have at most %d", len(r.Group), maxName)
	}
	if r.Leave {
		return nil
	}
	if r.Store == "" || len(r.Store) > 2*maxName {
		return fmt.Errorf("store has %d bytes: it must be HOST:PORT", len(r.Store))
	}
	if r.Ask < 0 || r.Seen.Ask < 0 || r.Seen.Ask > r.Ask {
		return fmt.Errorf("ask is %d after an answer to %d: it must not decrease", r.Ask, r.Seen.Ask)
	}
	if v := r.Seen; v.Round < 0 || v.Round > maxRound || v.Round > 0 && (v.Size < 1 || v.Size > maxNodes || v.Rank < 0 || v.Rank >= v.Size) {
		return fmt.Errorf("seen has rank %d of %d in round %d: no such round was released", v.Rank, v.Size, v.Round)
	}
	_, err := r.allowed()
	return err
}

// WaiterID is a request that waits.
type WaiterID uint64

// Event is what happens to a machine.
type Event interface{ event() }

// Attended is a request.
type Attended struct {
	Waiter WaiterID
	Request
}

// Ended is the end of a request that was not answered. Broke: its connection did; else it has waited for long, and is answered
// with what its node knows already.
type Ended struct {
	Waiter WaiterID
	Broke  bool
}

// Woken is the time that a Wake asked for.
type Woken struct{}

func (Attended) event() {}
func (Ended) event()    {}
func (Woken) event()    {}

// Action is what a machine wants done.
type Action interface{ action() }

// Answer ends a request.
type Answer struct {
	Waiter WaiterID
	View   View
	Reason string // why there is no round yet, for people
}

// Refuse ends a request that cannot be followed. Conflict: the group is there, and this node does not fit.
type Refuse struct {
	Waiter   WaiterID
	Conflict bool
	Reason   string
}

// Released is a new round, for the log.
type Released struct {
	Group string
	Round int64
	Nodes []string // by rank
	Store string
}

// Keep says that State has changed in a way that a restart must not forget.
type Keep struct{ State State }

// Wake wants a Woken at a time.
type Wake struct{ At time.Time }

func (Answer) action()   {}
func (Refuse) action()   {}
func (Released) action() {}
func (Keep) action()     {}
func (Wake) action()     {}

// State is what survives a restart.
type State struct {
	Groups []GroupState `json:"groups,omitempty"`
}

// GroupState is the last round of a group.
type GroupState struct {
	Group    string     `json:"group"`
	Settings Settings   `json:"settings"`
	Round    int64      `json:"round"`
	Store    string     `json:"store"`
	Closed   bool       `json:"closed,omitempty"`
	Size     int        `json:"size"`
	Members  []Assigned `json:"members"` // those that were known, by rank
}

// Assigned is a node in a round.
type Assigned struct {
	Node  string `json:"node"`
	Store string `json:"store"`
	Rank  int    `json:"rank"`
	Ask   int64  `json:"ask"`
}

// Timing says when a node counts as failed.
type Timing struct {
	Grace   time.Duration // after its connection broke, a release no longer waits for it
	Timeout time.Duration // after it was silent, or its connection broke, its group continues without it
}
