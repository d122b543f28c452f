package rpc

import (
	"log/slog"
	"sync"
)

// mostPosted bounds the functions that a Sender queues.
const mostPosted = 1024

// Sender sends the messages of a stream, in the order of Post, so that no caller waits: gRPC's Send blocks while the other side does not
// read, beyond the deadline of a call that sends. Its goroutine ends when the queue is empty.
type Sender struct {
	mu    sync.Mutex
	queue []func()
	busy  bool
	tasks sync.WaitGroup
}

// Post queues a function that sends one message. It does not block. It returns false if the queue is full: the other side does not read.
func (s *Sender) Post(send func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) >= mostPosted {
		return false
	}
	s.add(send)
	return true
}

// add adds a function to the queue. The caller holds mu.
func (s *Sender) add(send func()) {
	s.queue = append(s.queue, send)
	if !s.busy {
		s.busy = true
		s.tasks.Go(s.run)
	}
}

func (s *Sender) run() {
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

// Flushed returns a channel that is closed when all functions queued so far have run.
func (s *Sender) Flushed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	flushed := make(chan struct{})
	s.add(func() { close(flushed) })
	return flushed
}

// Wait waits until the queue is empty. Call it when no more functions are posted, and the stream has ended: then Send fails at once.
func (s *Sender) Wait() { s.tasks.Wait() }

// next removes the first function from the queue. It returns nil if there is none.
func (s *Sender) next() (send func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) == 0 {
		s.busy = false
		return nil
	}
	send = s.queue[0]
	s.queue[0] = nil // the array may live on, and the function holds a message
	s.queue = s.queue[1:]
	return send
}
