package sim

import "time"

// kind is the kind of an event. Kinds up to lastOfLighthouse are for the lighthouse, those after it up to lastOfGroup for a group,
// and the rest for the world.
type kind uint8

const (
	lhAsk          kind = iota // a quorum request arrives; x is the *request
	lhBeat                     // a heartbeat of g arrives
	lhWithdrawn                // the client cancelled request id, or its connection broke
	lhDeadline                 // the earliest deadline of a request has passed
	lhTick                     // quorum_tick_ms passed
	lhGreet                    // a link of g begins
	lhDisconnected             // a link has ended
	lhPast                     // a member answers a recall; x is the *quorum.Past
	lhWake                     // the time of the machine's Wake
	lhMessage                  // any other message of a member; x is the quorum.Event
	lhChecked                  // the time for a check of g is over; x is the *look
	lhDrain                    // an operator requests that g leaves
	lhKept                     // a write to disk is complete; x is the *quorum.Recalled

	lastOfLighthouse

	beatDue          // a heartbeat of g is due
	welcomed         // the lighthouse answers the greeting, in term id
	linkDue          // the time for the welcome is over
	linkBroken       // g notices that its link has ended
	linkRetry        // g opens another one
	recall           // the lighthouse asks for quorum id
	memberFailed     // the lighthouse reports a failure; x is the *quorum.Failed
	noticed          // the lighthouse reports a failure to g, or a peer reports that g counts as failed; x is the *round.MemberFailed
	probed           // the lighthouse checks on g
	progressDue      // the lighthouse asks for the progress of g
	rankProgress     // a rank reports its progress; ok: it waits for other groups
	progressEnd      // the time for these reports is over
	drained          // the lighthouse requests that g leaves
	released         // the lighthouse lets g, which has left, end
	leaveDue         // the time for released is over: g ends anyway
	answered         // the lighthouse answered request id; x is the *quorum.Quorum
	refused          // request id did not arrive, or its connection broke
	retryDue         // g asks the lighthouse again, for round id
	askDeadline      // the deadline of round id is near
	managerAsk       // a rank's quorum request arrives at its manager server
	managerVote      // a rank's vote arrives
	rankDue          // the timer of the rank's call or collective
	rankStart        // the rank begins a step
	rankQuorum       // the rank receives its quorum; x is the *recovery.Result
	rankVoted        // the rank receives the decision; ok
	rankFailed       // the rank's call failed
	rankArrive       // the rank reaches its collective
	rankReduced      // the rank's collective ended; ok
	healAsk          // a healing group asks g for its state; x is the *heal
	healAnswer       // the answer to healAsk arrives; ok
	rankDisconnected // the manager server notices that a rank's connection broke
	rankStill        // rankGrace has passed since
	rankBack         // the rank has another connection

	lastOfGroup

	lhStart    // the lighthouse begins
	slotStart  // a group begins in slot id
	faultBegin // fault id of the schedule
	faultEnd
)

// event is something that happens at a given time. Events of the same time are handled in the order in which they were pushed.
type event struct {
	at   time.Duration
	kind kind
	ok   bool
	rank int16
	life uint32 // the incarnation of the lighthouse, for its events: those for an earlier one are dropped
	id   uint64
	g    *group
	link *link
	x    any
}

// turn is an entry of the queue: the time, the order among events of the same time, and the index of the event.
type turn struct {
	at    time.Duration
	seq   uint64
	event int32
}

func (t turn) before(o turn) bool { return t.at < o.at || t.at == o.at && t.seq < o.seq }

// queue is a heap with four children per node: it is flatter than a binary heap, and most events are due soon. The events are
// stored separately, since moving pointers costs more than moving numbers.
type queue struct {
	heap   []turn
	events []event
	free   []int32
	seq    uint64
}

func (q *queue) push(e *event) {
	var at int32
	if n := len(q.free); n > 0 {
		at = q.free[n-1]
		q.free = q.free[:n-1]
		q.events[at] = *e
	} else {
		at = int32(len(q.events))
		q.events = append(q.events, *e)
	}
	q.seq++
	t := turn{e.at, q.seq, at}
	q.heap = append(q.heap, t)
	i := len(q.heap) - 1
	for i > 0 {
		parent := (i - 1) / 4
		if !t.before(q.heap[parent]) {
			break
		}
		q.heap[i] = q.heap[parent]
		i = parent
	}
	q.heap[i] = t
}

func (q *queue) pop(e *event) {
	top := q.heap[0].event
	*e = q.events[top]
	q.events[top].g, q.events[top].link, q.events[top].x = nil, nil, nil
	q.free = append(q.free, top)

	n := len(q.heap) - 1
	last := q.heap[n]
	q.heap = q.heap[:n]
	if n == 0 {
		return
	}
	i := 0
	for {
		first := 4*i + 1
		if first >= n {
			break
		}
		least := first
		for c := first + 1; c < min(first+4, n); c++ {
			if q.heap[c].before(q.heap[least]) {
				least = c
			}
		}
		if !q.heap[least].before(last) {
			break
		}
		q.heap[i] = q.heap[least]
		i = least
	}
	q.heap[i] = last
}
