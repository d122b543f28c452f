package sim

import "time"

// kind is what an event is. Those up to lastOfLighthouse happen to the lighthouse, the ones after it to a group,
// the ones after lastOfGroup to the world.
type kind uint8

const (
	lhAsk          kind = iota // a quorum request arrives; x is the *request
	lhBeat                     // a heartbeat of g arrives
	lhWithdrawn                // the client cancelled request id, or its connection broke
	lhDeadline                 // the earliest deadline of a request has come
	lhTick                     // quorum_tick_ms passed
	lhGreet                    // a link of g begins
	lhDisconnected             // a link has ended
	lhPast                     // a member answers a recall; x is the *quorum.Past
	lhEnded                    // the host of g says that its process has ended
	lhWake                     // what the machine asked to be woken for
	lhReaches                  // a member reaches the lighthouses id
	lhStamp                    // a member answers the stamp id
	lhWord                     // a member says something else; x is the quorum.Event
	lhChecked                  // the lighthouse has waited for a sign of life of g; x is the *look
	lhDrain                    // somebody wants g to leave
	lhKept                     // what was to be written is on the disk; x is the *quorum.Recalled

	lastOfLighthouse

	beatDue          // g says that it is alive
	welcomed         // the lighthouse answers the greeting, in term id
	stamped          // the lighthouse sends the stamp id
	linkDue          // it should have by now
	closing          // the lighthouse ends the link, and lets g go
	linkBroken       // g notices that its link has ended
	linkRetry        // g opens another one
	recall           // the lighthouse asks for quorum id
	memberFailed     // the lighthouse reports a failure; x is the *quorum.Failed
	noticed          // the machine of g hears of a failure, of g itself by another group; x is the *round.MemberFailed; ok: another lighthouse says so
	probed           // the lighthouse wants a sign of life
	progressDue      // the lighthouse wants to know what g does
	rankSays         // a rank says what it does; ok: it waits for other groups
	progressEnd      // whether all ranks have said it or not, id
	drained          // the lighthouse passes on that somebody wants g to leave
	released         // nobody needs g any more, which left
	leaveDue         // it goes all the same
	sentOn           // the lighthouse has too few members for request id
	failBack         // all fail back to lighthouse id
	lookBack         // g looks whether an earlier lighthouse is back
	answered         // the lighthouse answered request id; x is the *quorum.Quorum
	refused          // request id did not arrive, or its connection broke
	retryDue         // g asks the lighthouse again, for round id
	askDeadline      // the time of round id is nearly up
	managerAsk       // a rank's quorum request arrives at its manager server
	managerVote      // a rank's vote arrives
	rankDue          // a timer of the rank: its call or its collective has taken too long
	rankStart        // the rank begins a step
	rankQuorum       // the rank hears of its quorum; x is the *recovery.Result
	rankVoted        // the rank hears the decision; ok
	rankFailed       // the rank's call failed
	rankArrive       // the rank reaches its collective
	rankReduced      // the rank's collective ended; ok
	healAsk          // a group that heals asks g for its state; x is the *heal
	healAnswer       // and is answered; ok
	rankDisconnected // the manager server notices that a rank's connection broke
	rankStill        // a while has passed since
	rankBack         // the rank has another connection

	lastOfGroup

	lhStart    // the lighthouse begins
	slotStart  // a group begins in slot id
	faultBegin // fault id of the schedule
	faultEnd
)

// event is something that happens at a time. Events at one time happen in the order in which they were made.
type event struct {
	at   time.Duration
	kind kind
	ok   bool
	rank int16
	lh   uint8  // the lighthouse that it is for
	life uint32 // of that
	id   uint64
	g    *group
	link *link
	x    any
}

// turn is a place in the queue: when, after what, and which event.
type turn struct {
	at    time.Duration
	seq   uint64
	event int32
}

func (t turn) before(o turn) bool { return t.at < o.at || t.at == o.at && t.seq < o.seq }

// queue is a heap with four children a node: flatter than the usual one, and most events are soon to come. The events
// lie apart from it, because moving pointers costs more than moving numbers.
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
