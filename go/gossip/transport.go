package gossip

import (
	"context"
	"net"
	"time"

	"github.com/hashicorp/memberlist"
)

// wire is memberlist's transport, except that Shutdown closes its connections. Memberlist would leave them open until their
// deadlines, with the goroutines that read from them.
type wire struct {
	*memberlist.NetTransport
	ctx     context.Context
	cancel  context.CancelFunc
	streams chan net.Conn
	done    chan struct{}
}

func listen(settings *memberlist.Config, port int) (*wire, error) {
	under, err := memberlist.NewNetTransport(&memberlist.NetTransportConfig{
		BindAddrs: []string{""}, // all addresses, of both families
		BindPort:  port,
		Logger:    settings.Logger,
	})
	if err != nil {
		return nil, err
	}
	w := &wire{NetTransport: under, streams: make(chan net.Conn), done: make(chan struct{})}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	go w.accept()
	return w, nil
}

func (w *wire) accept() {
	defer close(w.done)
	for {
		select {
		case conn := <-w.NetTransport.StreamCh():
			conn = ending(w.ctx, conn)
			select {
			case w.streams <- conn:
			case <-w.ctx.Done():
				_ = conn.Close()
			}
		case <-w.ctx.Done():
			return
		}
	}
}

func (w *wire) StreamCh() <-chan net.Conn { return w.streams }

func (w *wire) DialAddressTimeout(to memberlist.Address, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(w.ctx, timeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", to.Addr)
	if err != nil {
		return nil, err
	}
	// Memberlist sets deadlines for its own exchanges, but none for the messages of a delegate: without one, a peer that accepts
	// the connection and does not read would block the sender.
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return ending(w.ctx, conn), nil
}

func (w *wire) Shutdown() error {
	err := w.NetTransport.Shutdown() // waits for its listeners, which may still pass a connection to accept: cancel must come after it
	w.cancel()
	<-w.done
	return err
}

// conn is a connection that is closed when its context ends.
type conn struct {
	net.Conn
	forget func() bool // stops watching the context, once the connection is closed
}

func ending(ctx context.Context, under net.Conn) net.Conn {
	return conn{under, context.AfterFunc(ctx, func() { _ = under.Close() })}
}

func (c conn) Close() error {
	c.forget()
	return c.Conn.Close()
}
