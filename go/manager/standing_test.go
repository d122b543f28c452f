package manager_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/manager"
)

// counted is what a group and the lighthouse sent each other: the messages by direction, and the largest one.
type counted struct {
	sent, received int
	largest        int // bytes, with the 5 that gRPC puts before each message
}

// countingNetwork counts the gRPC messages on the connections that are dialed through it, by their DATA
// frames.
type countingNetwork struct {
	rpc.Network

	mu   sync.Mutex
	seen counted
}

func (n *countingNetwork) Dial(ctx context.Context, address string) (net.Conn, error) {
	c, err := n.Network.Dial(ctx, address)
	if err != nil {
		return nil, err
	}
	return &countingConn{Conn: c, sent: frames{net: n, of: &n.seen.sent},
		received: frames{net: n, of: &n.seen.received}}, nil
}

func (n *countingNetwork) take() counted {
	n.mu.Lock()
	defer n.mu.Unlock()
	seen := n.seen
	n.seen = counted{}
	return seen
}

type countingConn struct {
	net.Conn

	sent, received frames
}

func (c *countingConn) Write(p []byte) (int, error) {
	c.sent.add(p)
	return c.Conn.Write(p)
}

func (c *countingConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.received.add(p[:n])
	return n, err
}

// frames parses one direction of an HTTP/2 connection.
type frames struct {
	net *countingNetwork
	of  *int // the count of this direction

	partial []byte // a frame whose end has not been seen
}

func (f *frames) add(p []byte) {
	const header = 9
	f.partial = bytes.TrimPrefix(append(f.partial, p...), []byte(http2.ClientPreface))
	for len(f.partial) >= header {
		length := int(binary.BigEndian.Uint32(f.partial) >> 8)
		if len(f.partial) < header+length {
			return
		}
		if http2.FrameType(f.partial[3]) == http2.FrameData && length > 0 {
			f.net.mu.Lock()
			*f.of++
			f.net.seen.largest = max(f.net.seen.largest, length)
			f.net.mu.Unlock()
		}
		f.partial = f.partial[header+length:]
	}
}

// messagesOfAMinute returns what each of two groups and the lighthouse exchange in a minute in which the
// groups make these steps.
func messagesOfAMinute(t *testing.T, steps int64) (seen [2]counted) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		var networks [2]*countingNetwork
		var groups [2]*fttest.Group
		for i, name := range []string{"a", "b"} {
			groups[i] = c.StartGroup(name, 1, func(cfg *manager.ServerConfig) {
				networks[i] = &countingNetwork{Network: cfg.Network}
				cfg.Network = networks[i]
			})
		}
		var asked answers
		for _, g := range groups {
			asked = append(asked, g.QuorumWith(&fttest.Request{Step: 1, CommittedQuorumId: 7},
				time.Minute))
		}
		asked.results(t)
		synctest.Wait()
		for _, n := range networks {
			asking := n.take()
			require.Positive(t, asking.sent, "the request of the quorum")
			require.Positive(t, asking.received, "its answer")
		}
		began := time.Now()
		for step := range steps {
			time.Sleep(time.Minute / time.Duration(steps+1))
			for _, g := range groups {
				vote := <-g.Vote(0, 1+step, true, time.Minute)
				require.NoError(t, vote.Err)
				require.True(t, vote.Value)
			}
		}
		time.Sleep(time.Until(began.Add(time.Minute)))
		synctest.Wait()
		for i, n := range networks {
			seen[i] = n.take()
		}
	})
	return seen
}

// While a quorum stands, groups send the lighthouse heartbeats, and nothing for a step: twenty times the
// steps are the same messages.
func TestAStepOfAQuorumThatStandsSendsTheLighthouseNothing(t *testing.T) {
	few, many := messagesOfAMinute(t, 60), messagesOfAMinute(t, 1200)
	for i := range few {
		t.Logf("a minute of 60 steps: %+v; of 1200 steps: %+v", few[i], many[i])
		assert.Equal(t, few[i].sent, many[i].sent, "heartbeats to the lighthouse")
		assert.Positive(t, many[i].sent, "heartbeats to the lighthouse")
		assert.Zero(t, few[i].received, "from the lighthouse")
		assert.Zero(t, many[i].received, "from the lighthouse")
		assertSmallAndFew(t, few[i])
		assertSmallAndFew(t, many[i])
	}
}

// A lighthouse that sees no step for five seconds asks the members once a second how far they are.
func TestAQuorumThatStandsWithoutAStepSendsFewMessages(t *testing.T) {
	for _, idle := range messagesOfAMinute(t, 0) {
		t.Logf("a minute without a step: %+v", idle)
		assert.Positive(t, idle.received, "questions for the progress")
		assertSmallAndFew(t, idle)
	}
}

func assertSmallAndFew(t *testing.T, minute counted) {
	t.Helper()
	assert.LessOrEqual(t, minute.sent+minute.received, 10*60, "messages in a minute")
	assert.LessOrEqual(t, minute.largest, 200, "bytes of a message")
}
