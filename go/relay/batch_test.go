package relay

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

func quorum(timeout time.Duration) *torchftpb.RankRequest {
	return &torchftpb.RankRequest{
		Call: 1, TimeoutUs: timeout.Microseconds(), Request: &torchftpb.RankRequest_Quorum{Quorum: &torchftpb.ManagerQuorumRequest{}},
	}
}

func vote() *torchftpb.RankRequest {
	return &torchftpb.RankRequest{
		Call: 2, TimeoutUs: time.Minute.Microseconds(), Request: &torchftpb.RankRequest_ShouldCommit{ShouldCommit: &torchftpb.ShouldCommitRequest{}},
	}
}

func cancelled() *torchftpb.RankRequest {
	return &torchftpb.RankRequest{Call: 1, Request: &torchftpb.RankRequest_Cancel{Cancel: true}}
}

func leave() *torchftpb.RankRequest {
	return &torchftpb.RankRequest{Call: 3, TimeoutUs: 1, Request: &torchftpb.RankRequest_Leave{Leave: true}}
}

// Three sessions are open. In each case, events occur a millisecond apart. The result of batch.wait after the last event is compared:
// the time for which the queue may still be held, and whether the queue is empty.
func TestWhenABatchIsSent(t *testing.T) {
	const hold = 50 * time.Millisecond
	type events = []func(b *batch, now time.Time)
	request := func(session uint64, req *torchftpb.RankRequest) func(*batch, time.Time) {
		return func(b *batch, now time.Time) { b.add(session, req, now) }
	}
	ends := func(session uint64) func(*batch, time.Time) {
		return func(b *batch, now time.Time) { b.end(session, now) }
	}
	answered := func(session uint64) func(*batch, time.Time) {
		return func(b *batch, _ time.Time) { b.answered(session) }
	}
	sent := func(b *batch, now time.Time) { b.take(now) }
	for name, test := range map[string]struct {
		events events
		wait   time.Duration
		empty  bool
	}{
		"nothing":                         {nil, 0, true},
		"the first asks":                  {events{request(1, quorum(time.Minute))}, hold, false},
		"the second asks":                 {events{request(1, quorum(time.Minute)), request(2, vote())}, hold - time.Millisecond, false},
		"all have asked":                  {events{request(1, vote()), request(2, vote()), request(3, vote())}, 0, false},
		"one asks twice":                  {events{request(1, vote()), request(1, quorum(time.Minute)), request(2, vote())}, hold - 2*time.Millisecond, false},
		"a short timeout":                 {events{request(1, quorum(100*time.Millisecond))}, 5 * time.Millisecond, false}, // a twentieth: heldPart
		"a shorter one comes later":       {events{request(1, vote()), request(2, quorum(100*time.Millisecond))}, 5 * time.Millisecond, false},
		"no timeout":                      {events{request(1, quorum(0))}, 0, false},
		"one cancels its call":            {events{request(1, vote()), request(1, cancelled())}, 0, false},
		"one leaves":                      {events{request(1, leave())}, 0, false},
		"one has failed":                  {events{request(1, vote()), ends(3)}, 0, false},
		"one ended before the others ask": {events{ends(3), sent, request(1, vote()), request(2, vote())}, 0, false},
		"the last asks late":              {events{request(1, vote()), request(2, vote()), sent, request(3, vote())}, 0, false},
		"one leaves, all others ask": {
			events{request(1, leave()), sent, request(2, vote()), request(3, vote())}, 0, false,
		},
		"the next round": {
			events{request(1, vote()), request(2, vote()), request(3, vote()), sent, answered(1), answered(2), answered(3), request(1, vote())}, hold, false,
		},
		"one is not answered yet": {
			events{request(1, vote()), request(2, vote()), request(3, vote()), sent, answered(1), answered(2), request(1, vote()), request(2, vote())}, 0, false,
		},
		"an answer to no call": {events{answered(1), request(1, vote())}, hold, false},
		"all is sent":          {events{request(1, vote()), sent}, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBatch(hold)
			for session := range uint64(3) {
				b.open(session + 1)
			}
			now := time.Unix(100, 0)
			for i, event := range test.events {
				now = time.Unix(100, int64(i)*1e6)
				event(&b, now)
			}
			wait, some := b.wait(now)
			assert.Equal(t, test.empty, !some)
			assert.Equal(t, test.wait, max(0, wait))
		})
	}
}

func TestABatchKeepsTheOrderAndTheRemainingTimeouts(t *testing.T) {
	b := newBatch(time.Second)
	now := time.Unix(100, 0)
	b.open(1)
	b.open(2)
	b.add(1, quorum(time.Minute), now)
	b.add(1, cancelled(), now)
	b.end(1, now.Add(time.Second))
	b.add(2, quorum(time.Millisecond), now.Add(time.Second))
	requests := b.take(now.Add(2 * time.Second)).GetRequests()
	var sessions []uint64
	for _, req := range requests {
		sessions = append(sessions, req.GetSession())
	}
	assert.Equal(t, []uint64{1, 1, 1, 2}, sessions)
	assert.Equal(t, (58 * time.Second).Microseconds(), requests[0].GetRequest().GetTimeoutUs())
	assert.True(t, requests[1].GetRequest().GetCancel())
	assert.Nil(t, requests[2].GetRequest(), "the end of the session")
	assert.EqualValues(t, 1, requests[3].GetRequest().GetTimeoutUs(), "a timeout stays positive after its deadline")
}

func TestALongQueueIsSentInSeveralMessages(t *testing.T) {
	b := newBatch(time.Second)
	now := time.Unix(100, 0)
	for session := range uint64(5) {
		b.open(session)
		req := quorum(time.Minute)
		req.GetQuorum().ReconfigureHandle = string(make([]byte, mostBytes/3))
		b.add(session, req, now)
	}
	var sizes []int
	for wait, some := b.wait(now); some; wait, some = b.wait(now) {
		assert.LessOrEqual(t, wait, time.Duration(0))
		message := b.take(now)
		assert.LessOrEqual(t, proto.Size(message), mostBytes)
		sizes = append(sizes, len(message.GetRequests()))
	}
	assert.Equal(t, []int{2, 2, 1}, sizes)
	assert.Zero(t, b.bytes)
}

// The largest request that a relay accepts from a rank fits into a message that a server accepts. If another request is queued before
// it, that request is sent in a message of its own: a message with both could exceed what the server accepts.
func TestALargeRequestIsSentInASeparateMessage(t *testing.T) {
	b := newBatch(time.Second)
	now := time.Unix(100, 0)
	b.open(1)
	b.open(math.MaxUint64) // the number of a session with the longest encoding
	large := quorum(time.Minute)
	large.GetQuorum().ReconfigureHandle = string(make([]byte, mostRequest-proto.Size(large)-10)) // 10: tags and lengths
	require.LessOrEqual(t, proto.Size(large), mostRequest)
	b.add(1, quorum(time.Minute), now)
	b.add(math.MaxUint64, large, now)
	assert.Less(t, proto.Size(b.take(now)), mostBytes)
	size := proto.Size(b.take(now))
	assert.LessOrEqual(t, size, rpc.MaxRequest)
	assert.Greater(t, size, rpc.MaxRequest-100) // the test's request is about as large as it can be
}
