package membership

import (
	"sync"

	"github.com/torchft/torchft/go/torchftpb"
)

// Broadcast sends each notice to all listeners.
type Broadcast struct {
	mu        sync.Mutex
	listeners map[chan *torchftpb.Notice]struct{}
}

// backlog is how many notices are queued for a listener. If a listener is stuck, further notices are dropped
// for it: its collectives then end by their timeouts.
const backlog = 64

// Listen returns a channel of all notices from now on, and a function that ends the subscription.
func (b *Broadcast) Listen() (notices <-chan *torchftpb.Notice, stop func()) {
	c := make(chan *torchftpb.Notice, backlog)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.listeners == nil {
		b.listeners = map[chan *torchftpb.Notice]struct{}{}
	}
	b.listeners[c] = struct{}{}
	return c, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.listeners, c)
	}
}

// Notify sends a notice to each listener. It does not block.
func (b *Broadcast) Notify(notice *torchftpb.Notice) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.listeners {
		select {
		case c <- notice:
		default:
		}
	}
}
