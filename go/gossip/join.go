package gossip

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
)

// join connects to the seeds, of which at least one must be reached. It tries all of them: seeds that were
// restarted together must learn of training members before they could found another job.
func (n *Node) join(ctx context.Context) error {
	var others []string
	for _, addresses := range n.seeds {
		if !slices.Contains(addresses, n.own) {
			others = append(others, addresses...)
		}
	}
	if len(others) == 0 {
		return nil
	}
	type attempt struct {
		address string
		err     error
	}
	why := map[string]string{} // the last error of each seed
	for {
		attempts := make(chan attempt, len(others))
		for _, address := range others {
			rpc.Go(&n.tasks, n.log, "gossip join", func() {
				_, err := n.list.Join([]string{address})
				attempts <- attempt{address, err}
			})
		}
		reached := false
		for range others {
			select {
			case a := <-attempts:
				if reached = reached || a.err == nil; a.err != nil {
					why[a.address] = joinError(a.err)
				}
			case <-ctx.Done():
				if reached {
					return nil
				}
				return n.unreached(why)
			}
		}
		if reached {
			return nil
		}
		select {
		case <-time.After(joinPause):
		case <-ctx.Done():
			return n.unreached(why)
		}
	}
}

func (n *Node) unreached(why map[string]string) error {
	texts := slices.Compact(slices.Sorted(maps.Values(why)))
	if len(texts) == 0 {
		texts = []string{"no answer"}
	}
	return fmt.Errorf("gossip: timed out: none of the seeds %s answered within %v: %s",
		strings.Join(n.cfg.Seeds, ", "), n.cfg.ConnectTimeout,
		strings.Join(texts, "; "))
}

// joinError adds the probable cause if a seed was reached and refused this node. It searches the text of the
// error, in which memberlist joins several errors.
func joinError(err error) string {
	text := strings.TrimPrefix(strings.Join(strings.Fields(err.Error()), " "),
		"1 error occurred: * Failed to join ")
	for _, refusal := range []string{"EOF", "closed pipe", "broken pipe", "connection reset", "decrypt",
		"encrypt"} {
		if strings.Contains(text, refusal) {
			return "a node answers, and refuses this one: the job (TORCHFT_JOB_ID) or the token " +
				"(TORCHFT_TOKEN_FILE) of the two differs (" +
				text + ")"
		}
	}
	return text
}

// reconnect tries to reach one of the members that failed, or one of the seeds that are no peers now: after a
// long partition, memberlist on each side has forgotten the members of the other side.
func (n *Node) reconnect() {
	n.mu.Lock()
	away := slices.Collect(maps.Keys(n.failed))
	here := map[string]bool{n.own: true}
	for _, p := range n.peers {
		here[p.At] = true
	}
	n.mu.Unlock()
	for _, addresses := range n.seeds {
		if !slices.ContainsFunc(addresses, func(a string) bool { return here[a] }) {
			away = append(away, addresses...)
		}
	}
	if len(away) > 0 {
		address := away[rand.IntN(len(away))]
		rpc.Go(&n.tasks, n.log, "gossip reconnect", func() { _, _ = n.list.Join([]string{address}) })
	}
}
