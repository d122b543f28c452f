package lighthouses

import (
	"context"
	"errors"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
)

const (
	// attemptTimeout is how long one of several lighthouses may take to answer before the next one is tried.
	attemptTimeout = time.Second
	// openTimeout bounds opening a stream that no call waits for.
	openTimeout = 10 * time.Second
)

// lighthouses has a client for each lighthouse of a job that has been asked.
type lighthouses struct {
	list []string // the addresses in TORCHFT_LIGHTHOUSE
	with rpc.Dialing

	mu      sync.Mutex
	clients map[string]*Client // by address; also for leaders that are not in the list
	closed  bool
}

// dialLighthouses connects to the first lighthouse of a list that it reaches, and returns its address.
func dialLighthouses(ctx context.Context, addresses string, connectTimeout time.Duration, with rpc.Dialing) (l *lighthouses, at string, err error) {
	list, err := rpc.ParseAddresses("lighthouse address", addresses)
	if err != nil {
		return nil, "", status.Error(codes.InvalidArgument, err.Error())
	}
	first, err := Dial(ctx, addresses, connectTimeout, with)
	if err != nil {
		return nil, "", err
	}
	first.of = len(list)
	return &lighthouses{list: list, with: with, clients: map[string]*Client{first.addr: first}}, first.addr, nil
}

// reach returns the client of a lighthouse. A new client connects with its first call.
func (l *lighthouses) reach(address string) (*Client, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, status.Error(codes.Canceled, "the client is closed")
	}
	if c := l.clients[address]; c != nil {
		return c, nil
	}
	c, err := dialLater(address, l.with)
	if err != nil {
		// The settings were valid when the first lighthouse was reached, so a file is being replaced: another attempt may succeed.
		return nil, status.Error(codes.Unavailable, rpc.Message(err))
	}
	c.of = len(l.list)
	l.clients[address] = c
	return c, nil
}

// drop closes the connection to a lighthouse that does not answer: the next attempt opens a new one. On the old one, TCP may wait for
// minutes before it sends anything again.
func (l *lighthouses) drop(address string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c := l.clients[address]; c != nil {
		_ = c.Close()
		delete(l.clients, address)
	}
}

func (l *lighthouses) close() (err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, c := range l.clients {
		err = errors.Join(err, c.Close())
	}
	return err
}
