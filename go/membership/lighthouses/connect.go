package lighthouses

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/torchftpb"
)

const (
	// attemptTimeout is how long one of several lighthouses may take to answer before the next one is tried.
	attemptTimeout = time.Second
	// openTimeout bounds opening a stream that no call waits for.
	openTimeout = 10 * time.Second
)

// connect returns the open stream, or asks the lighthouses one after the other until one opens a stream. If
// the lighthouse has no streams, the error is UNIMPLEMENTED.
func (m *Member) connect(ctx context.Context) (*memberStream, *Client, error) {
	select {
	case m.opening <- struct{}{}:
		defer func() { <-m.opening }()
	case <-ctx.Done():
		return nil, nil, status.FromContextError(ctx.Err()).Err()
	}
	last := m.stream.Load()
	if last != nil && !last.Broken() {
		return last, last.client, nil
	}
	if m.ends.Load() {
		return nil, nil, status.Error(codes.Canceled, "the client is closed")
	}
	c := &m.choice
	if list, err := rpc.ParseAddresses("lighthouse address", m.addresses); err == nil {
		c.list = list // otherwise the file cannot be read at the moment
	}
	leader := ""
	if last != nil && !last.replaced {
		last.replaced = true
		leader = wire.LeaderOf(last.Err())
		if errors.Is(last.Err(), errSilent) {
			m.unanswered(c.at)
		}
	}
	round := c.round()
	round.leads(leader)
	var failures attempts
	for address, more := round.next(); more; address, more = round.next() {
		began := time.Now()
		stream, client, err := m.open(ctx, address)
		if err == nil || status.Code(err) == codes.Unimplemented {
			c.arrived(address)
			if stream != nil {
				m.stream.Store(stream)
			} else {
				m.unary[address] = true
			}
			return stream, client, err
		}
		round.leads(wire.LeaderOf(err))
		if client != nil {
			err = rpc.Wrap("attend", client.peer, err)
		}
		failures = append(failures, err)
		if ctx.Err() != nil || status.Code(err) == codes.FailedPrecondition {
			// the lighthouse refuses the list: all others may do so, too
			break
		}
		if time.Since(began) >= attemptTimeout {
			m.unanswered(address)
		}
	}
	return nil, nil, failures.err()
}

// unanswered records that one of several lighthouses has not answered in time.
func (m *Member) unanswered(address string) {
	m.choice.unanswered(address)
	if m.several(address) {
		m.drop(address)
	}
}

// several reports whether another lighthouse than the one at this address may serve.
func (m *Member) several(address string) bool {
	list := m.choice.list
	return len(list) > 1 || list[0] != address || m.clustered.Load()
}

// open begins a stream with one lighthouse. If there are several, it must answer within attemptTimeout.
func (m *Member) open(ctx context.Context, address string) (*memberStream, *Client, error) {
	several := m.several(address)
	if several {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, attemptTimeout)
		defer cancel()
	}
	client, err := m.reach(address)
	if err != nil {
		return nil, nil, err
	}
	if m.unary[address] {
		return nil, client, status.Error(codes.Unimplemented, "the lighthouse does not support streams")
	}
	attend, cancel, err := rpc.OpenStream(ctx, rpc.WithJob(m.ctx, client.job),
		torchftpb.NewMemberServiceClient(client.conn).Attend)
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return nil, client, errMute
	default:
		return nil, client, err
	}
	stream := newMemberStream(m, client, attend, cancel)
	known := m.lastRound()
	var stands *torchftpb.Step
	if id := m.standsIn.Load(); id != 0 {
		stands = &torchftpb.Step{QuorumId: id, Step: m.step.Load()}
	}
	stream.Post(&torchftpb.MemberMessage{
		Message: &torchftpb.MemberMessage_Greeting{Greeting: &torchftpb.Greeting{
			ReplicaId: m.replicaID, Lighthouses: uint32(len(m.choice.list)), Term: m.seenTerm(),
			KnownQuorumId: known.QuorumID, KnownStep: known.Step, Stands: stands,
			Run: m.with.Run,
		}},
	})
	go stream.Receive(stream.take)
	if err := stream.begun(ctx); err != nil {
		return nil, client, err
	}
	return stream, client, nil
}

// reach returns the client of a lighthouse. A new client connects with its first call.
func (m *Member) reach(address string) (*Client, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, status.Error(codes.Canceled, "the client is closed")
	}
	if c := m.clients[address]; c != nil {
		return c, nil
	}
	c, err := dialLater(address, m.with)
	if err != nil {
		// The settings were valid when the first lighthouse was reached, so a file is being replaced: another
		// attempt may succeed.
		return nil, status.Error(codes.Unavailable, rpc.Message(err))
	}
	c.of = len(m.choice.list)
	m.clients[address] = c
	return c, nil
}

// drop closes the connection to a lighthouse that does not answer: the next attempt opens a new one. On the
// old one, TCP may wait for minutes before it sends anything again.
func (m *Member) drop(address string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c := m.clients[address]; c != nil {
		_ = c.Close()
		delete(m.clients, address)
	}
}

func (m *Member) closeAll() (err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	for _, c := range m.clients {
		err = errors.Join(err, c.Close())
	}
	return err
}
