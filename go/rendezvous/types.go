// Package rendezvous decides which nodes of a replica group train together, and assigns each its rank. A node
// is an agent of torchrun with its workers. The machine has no IO: Step gets an event and the time, and
// returns actions.
//
// A node that wants to train asks. A round is released to an allowed number of nodes that have asked. Workers
// restart in each new round. So a round ends for newcomers only when they allow a larger number of nodes.
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
	// maxRound bounds the round number that a node may report after a restart of the lighthouse: later
	// numbers continue from it.
	maxRound = 1 << 40
)

// Settings are the same for all nodes of a group.
type Settings struct {
	Min   int    `json:"min"`
	Max   int    `json:"max"`
	Sizes string `json:"sizes"` // "all", "powers_of_two", or numbers of nodes as in "1/2/4"
	// how long a round waits for further nodes, from the first moment at which it could be released
	LastCallMS int64 `json:"last_call_ms"`
}

func (s Settings) lastCall() time.Duration { return time.Duration(s.LastCallMS) * time.Millisecond }

func (s Settings) String() string {
	return fmt.Sprintf("nnodes %d:%d, sizes %s, last_call_timeout %g s", s.Min, s.Max, s.Sizes,
		s.lastCall().Seconds())
}

// allowed returns the allowed numbers of nodes, ascending.
func (s Settings) allowed() ([]int, error) {
	if s.Min < 1 || s.Max < s.Min || s.Max > maxNodes {
		return nil, fmt.Errorf("nnodes is %d:%d: it must be MIN:MAX with 1 <= MIN <= MAX <= %d", s.Min, s.Max,
			maxNodes)
	}
	if s.LastCallMS < 0 || s.LastCallMS > time.Hour.Milliseconds()*24 {
		return nil, fmt.Errorf("last_call_timeout is %g s: it must be from 0 to a day",
			float64(s.LastCallMS)/1000)
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
				return nil,
					fmt.Errorf(`sizes is %q: it must be "all", "powers_of_two", `+
						"or numbers of nodes such as 1/2/4", s.Sizes)
			}
			if n < s.Min || n > s.Max {
				return nil, fmt.Errorf("sizes is %q: %d nodes are not within nnodes %d:%d", s.Sizes, n, s.Min,
					s.Max)
			}
			sizes = append(sizes, n)
		}
		slices.Sort(sizes)
		sizes = slices.Compact(sizes)
	}
	return sizes, nil
}

// Request is a node's request. Every request has all fields.
type Request struct {
	Group string `json:"group"`
	Node  string `json:"node"`  // unique to an incarnation of an agent
	Store string `json:"store"` // host:port of the store that it offers to its group, should it become rank 0
	Ask   int64  `json:"ask"`   // how often it has asked for a round; 0: it is starting
	Seen  View   `json:"seen"`  // the last View that it received: it waits for a different one
	Leave bool   `json:"leave"` // the node ends; the other fields are ignored
	Close bool   `json:"close"` // the work of its group is done: no round follows
	Settings
}

// View is the answer to one node. Nodes send it back with their next request, so a machine that lost its
// state can restore it.
type View struct {
	Ask     int64  `json:"ask"`   // Request.Ask of the answered request
	Round   int64  `json:"round"` // the round in which the node was placed for this request; 0: none yet
	Rank    int    `json:"rank"`
	Size    int    `json:"size"`    // nodes in the round
	Store   string `json:"store"`   // the store of rank 0; empty: the group has moved on to another round
	Waiting int    `json:"waiting"` // number of nodes that wait for this node's workers to restart
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
	if v := r.Seen; v.Round < 0 || v.Round > maxRound ||
		v.Round > 0 && (v.Size < 1 || v.Size > maxNodes || v.Rank < 0 || v.Rank >= v.Size) {
		return fmt.Errorf("seen has rank %d of %d in round %d: no such round was released", v.Rank, v.Size,
			v.Round)
	}
	_, err := r.allowed()
	return err
}

// WaiterID identifies a pending request.
type WaiterID uint64

// Event is an input of the machine.
type Event interface{ event() }

// Attended is a request.
type Attended struct {
	Waiter WaiterID
	Request
}

// Ended is the end of a request that has not been answered. If Broke is set, its connection broke. Otherwise
// it was pending for as long as the shell allows, and the machine answers it, although the node's view has
// not changed.
type Ended struct {
	Waiter WaiterID
	Broke  bool
}

// Woken: the time of the latest Wake has come.
type Woken struct{}

func (Attended) event() {}
func (Ended) event()    {}
func (Woken) event()    {}

// Action is something that the shell must do.
type Action interface{ action() }

// Answer ends a request.
type Answer struct {
	Waiter WaiterID
	View   View
	Reason string // why there is no round yet, for people
}

// Refuse ends a request that cannot be served. Conflict: the request is valid, but conflicts with the present
// groups and nodes. Otherwise the request is invalid.
type Refuse struct {
	Waiter   WaiterID
	Conflict bool
	Reason   string
}

// Released reports a new round, for the log.
type Released struct {
	Group string
	Round int64
	Nodes []string // by rank
	Store string
}

// Keep asks the shell to save the State, which has changed.
type Keep struct{ State State }

// Wake asks for a Woken at a time.
type Wake struct{ At time.Time }

func (Answer) action()   {}
func (Refuse) action()   {}
func (Released) action() {}
func (Keep) action()     {}
func (Wake) action()     {}

// State is the part of the machine that survives a restart.
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
	Members  []Assigned `json:"members"` // the known nodes, by rank
}

// Assigned is a node in a round.
type Assigned struct {
	Node  string `json:"node"`
	Store string `json:"store"`
	Rank  int    `json:"rank"`
	Ask   int64  `json:"ask"`
}

// Timing has the timeouts after which a node counts as failed.
type Timing struct {
	Grace time.Duration // how long a release waits for a node whose connection broke
	// how long a node may have no pending request, for whatever reason, before its group continues without it
	Timeout time.Duration
}
