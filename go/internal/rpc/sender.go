package rpc

import (
	"log/slog"
	"math"
	"sync"
	"time"
)

// mostPosted bounds the functions that a Sender queues.
const mostPosted = 1024

// Sender sends the messages of a stream, in the order of Post, so that no caller waits: gRPC's Send blocks
// while the other side does not read, beyond the deadline of a call that sends. Its goroutine ends when the
// queue is empty.
type Sender struct {
	backlog
	// Pool, unless nil, has the goroutine.
	Pool *Pool
}

// Post queues a function that sends one message. It does not block. It returns false if the queue is full:
// the other side does not read.
func (s *Sender) Post(send func()) bool { return s.post(send, mostPosted) }

// Flushed returns a channel that is closed when all functions queued so far have run.
func (s *Sender) Flushed() <-chan struct{} {
	flushed := make(chan struct{})
	s.post(func() { close(flushed) }, math.MaxInt)
	return flushed
}

func (s *Sender) post(send func(), most int) bool {
	begin, queued := s.put(send, most)
	switch {
	case !begin:
	case s.Pool != nil:
		s.Pool.run(s.sendAll)
	default:
		go s.sendAll()
	}
	return queued
}

func (s *Sender) sendAll() {
	for send := s.next(); send != nil; send = s.next() {
		attempt(send)
	}
}

// attempt survives a panic: the messages that follow must be sent.
func attempt(send func()) {
	var err error // Recovered has logged it
	defer Recovered(slog.Default(), "a message of a stream", &err)
	send()
}

// stuckTime is the longest time for which a stream that does not read delays the others of a Pool.
const stuckTime = 25 * time.Millisecond

// Pool has one goroutine for the messages of many streams: if all of them get one at the same moment, waking
// a goroutine for each would cost much. While a stream does not read, its messages keep that goroutine, and
// another one sends those of the other streams.
type Pool struct{ backlog }

func (p *Pool) run(sendAll func()) {
	if begin, _ := p.put(sendAll, math.MaxInt); begin {
		go p.runAll()
	}
}

func (p *Pool) runAll() {
	replace := time.AfterFunc(stuckTime, p.runAll)
	for replace.Stop() { // otherwise another goroutine has begun
		do := p.next()
		if do == nil {
			return
		}
		replace.Reset(stuckTime)
		do()
	}
}

// backlog has functions to run in order.
type backlog struct {
	mu      sync.Mutex
	waiting []func()
	running bool
}

// put adds a function, unless most functions wait. It reports whether the caller has to begin to run them.
func (b *backlog) put(do func(), most int) (begin, queued bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.waiting) >= most {
		return false, false
	}
	b.waiting = append(b.waiting, do)
	begin, b.running = !b.running, true
	return begin, true
}

// next removes the first function. It returns nil if there is none: then the next put begins again.
func (b *backlog) next() (do func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.waiting) == 0 {
		b.running = false
		return nil
	}
	do = b.waiting[0]
	b.waiting[0] = nil // the array may live on, and the function holds a message
	b.waiting = b.waiting[1:]
	return do
}
