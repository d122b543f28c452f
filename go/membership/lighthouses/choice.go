package lighthouses

import (
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
)

// choice decides in which order the lighthouses are asked. It does no IO.
type choice struct {
	list   []string // the addresses in TORCHFT_LIGHTHOUSE, or in its file
	at     string   // the lighthouse that served last; before the first, the one that was reached first
	silent bool     // since it served, it has not answered in time
}

// arrived records which lighthouse serves now.
func (c *choice) arrived(at string) { c.at, c.silent = at, false }

// unanswered records that a lighthouse has not answered in time.
func (c *choice) unanswered(address string) { c.silent = c.silent || address == c.at }

// round returns the lighthouses to ask, each once: the one that served last, and then the others in the order
// of the list. One that has not answered comes last, since each attempt to reach it may take all of
// attemptTimeout.
func (c choice) round() candidates {
	others := c.list
	if i := slices.Index(c.list, c.at); i >= 0 {
		others = slices.Concat(c.list[i+1:], c.list[:i])
	}
	if c.silent {
		return candidates{queue: append(slices.Clone(others), c.at)}
	}
	return candidates{queue: append([]string{c.at}, others...)}
}

// candidates are the lighthouses of one round of attempts.
type candidates struct {
	queue []string
	tried []string
}

// next returns the lighthouse to ask now, and false at the end of the round.
func (c *candidates) next() (address string, more bool) {
	if len(c.queue) == 0 {
		return "", false
	}
	address, c.queue = c.queue[0], c.queue[1:]
	c.tried = append(c.tried, address)
	return address, true
}

// leads puts the lighthouse that another one has named as the leader before the others, unless it was tried
// in this round: the name may be out of date. It may be missing in the list, which can have one name for all
// lighthouses of a cluster. But its address must use TLS if those of the list do, and the number of attempts
// is bounded.
func (c *candidates) leads(leader string) {
	if leader == "" || slices.Contains(c.tried, leader) || len(c.tried) >= rpc.MaxLighthouses {
		return
	}
	named, err := rpc.ParseAddress("leader", leader)
	if err != nil || len(c.tried) > 0 && named.TLS != strings.HasPrefix(c.tried[0], "https://") {
		return
	}
	c.queue = slices.Insert(slices.DeleteFunc(c.queue, func(a string) bool { return a == leader }), 0, leader)
}

// attempts has the errors of lighthouses that were tried one after the other.
type attempts []error

// err joins the errors. If one of them is a refusal, its code is used: it is more specific than that of a
// failed connection.
func (a attempts) err() error {
	code := codes.Unavailable
	var texts []string
	for _, err := range a {
		if c := status.Code(err); c != codes.Unavailable {
			code = c
		}
		texts = append(texts, rpc.Message(err))
	}
	return status.Error(code, strings.Join(texts, "; "))
}
