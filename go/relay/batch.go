package relay

import (
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

// batch queues the requests of a relay's ranks to the manager server. It is pure: time is an argument.
//
// A request for a quorum or a vote stays in the queue until all ranks of the relay have a call in progress. That delays no answer,
// since the server answers none before all ranks of the group have asked. It stays for a short time only, because the server needs
// to know soon which ranks have asked. Any other request is sent at once, with all queued ones.
type batch struct {
	hold  time.Duration  // the longest time in the queue
	calls map[uint64]int // in progress, by open session
	busy  int            // sessions with calls in progress
	queue []queued
	bytes int       // total size of the queue
	due   time.Time // when the queue is sent at the latest
}

type queued struct {
	message *torchftpb.RelayRequest
	came    time.Time
	size    int // in a message, in bytes
}

// heldPart bounds the time in the queue: at most a twentieth of the request's timeout.
const heldPart = 20

const (
	// mostBytes bounds a message of several requests, far below what a server takes (rpc.MaxRequest).
	mostBytes = 1 << 20
	// wrapping is more than a message adds to a request: two tags, two lengths, and the number of the session.
	wrapping = 32
	// mostRequest bounds a request of a rank: a message with this request alone must not exceed what the server takes.
	mostRequest = rpc.MaxRequest - wrapping
)

func newBatch(hold time.Duration) batch { return batch{hold: hold, calls: map[uint64]int{}} }

// open adds a session. It has no call in progress, so that requests of the other sessions stay in the queue for it.
func (b *batch) open(session uint64) { b.calls[session] = 0 }

// add takes a request of the rank of an open session.
func (b *batch) add(session uint64, req *torchftpb.RankRequest, now time.Time) {
	asks := req.GetQuorum() != nil || req.GetShouldCommit() != nil
	if asks || req.GetLeave() {
		if b.calls[session]++; b.calls[session] == 1 {
			b.busy++
		}
	}
	due := now
	if asks {
		due = now.Add(min(b.hold, rpc.Microseconds(req.GetTimeoutUs())/heldPart))
	}
	b.push(session, req, now, due)
}

// end forgets a session, and notifies the server.
func (b *batch) end(session uint64, now time.Time) {
	if b.calls[session] > 0 {
		b.busy--
	}
	delete(b.calls, session)
	b.push(session, nil, now, now)
}

func (b *batch) push(session uint64, req *torchftpb.RankRequest, now, due time.Time) {
	if len(b.queue) == 0 || due.Before(b.due) {
		b.due = due
	}
	next := queued{&torchftpb.RelayRequest{Session: session, Request: req}, now, wrapping + proto.Size(req)}
	b.queue = append(b.queue, next)
	b.bytes += next.size
}

// answered records that a call of a session has been answered.
func (b *batch) answered(session uint64) {
	if b.calls[session] == 0 {
		return
	}
	if b.calls[session]--; b.calls[session] == 0 {
		b.busy--
	}
}

// wait returns how long the queue may still be held, zero or less if it must be sent now. The second result is false if the queue
// is empty.
func (b *batch) wait(now time.Time) (time.Duration, bool) {
	if len(b.queue) == 0 || b.busy == len(b.calls) { // all ranks have a call in progress: none is left to hold requests for
		return 0, len(b.queue) > 0
	}
	return b.due.Sub(now), true
}

// take removes the next message from the queue, in the order of the requests. The time that a request was held is subtracted from its
// timeout, which the server counts from the arrival.
func (b *batch) take(now time.Time) *torchftpb.RelayRequests {
	message := &torchftpb.RelayRequests{}
	taken, size := 0, 0
	for _, next := range b.queue {
		if size += next.size; taken > 0 && size > mostBytes {
			break
		}
		b.bytes -= next.size
		if req := next.message.GetRequest(); req.GetTimeoutUs() > 0 {
			req.TimeoutUs = max(1, req.GetTimeoutUs()-now.Sub(next.came).Microseconds())
		}
		message.Requests = append(message.Requests, next.message)
		taken++
	}
	b.queue = append([]queued(nil), b.queue[taken:]...)
	b.due = now // the rest of the queue is sent at once
	return message
}
