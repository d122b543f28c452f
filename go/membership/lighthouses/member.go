// Package lighthouses is the client of a job's lighthouses: a replica group is a member at one of them at a time, and goes to another
// one of its list if that fails.
package lighthouses

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
	"github.com/torchft/torchft/go/torchftpb"
)

// Member is a replica group at its lighthouse, over one stream that carries only what changed. A lighthouse that knows no
// such streams gets a call for each quorum and each heartbeat. Of several lighthouses it asks one at a time.
type Member struct {
	lighthouses *lighthouses
	replicaID   string
	ctx         context.Context // ends with Close
	cancel      context.CancelFunc
	tasks       sync.WaitGroup
	heard       membership.Broadcast
	told        <-chan membership.Notice
	silence
	present atomic.Pointer[memberStream] // as stream, for those who do not wait

	last atomic.Pointer[quorum.Quorum] // that the member was told of: what a lighthouse that starts asks for
	term atomic.Int64                  // highest that a lighthouse told
	promise

	opening chan struct{} // a lock for what follows; waiting for it ends with a call's deadline
	choice  choice
	unary   []bool        // which lighthouses know no streams
	stream  *memberStream // nil before the first

	// Only the stream that is open uses it: a new one begins after the last has ended.
	list heldList
}

var (
	_ membership.Membership   = (*Member)(nil)
	_ membership.NoticeSource = (*Member)(nil)
	_ membership.Witness      = (*Member)(nil)
	_ membership.Leaver       = (*Member)(nil)
	_ membership.Finisher     = (*Member)(nil)
	_ membership.Reporter     = (*Member)(nil)
)

// Join makes a replica group a member at the first lighthouse of a list that it reaches.
func Join(ctx context.Context, addresses, replicaID string, connectTimeout time.Duration, options ...DialOption) (*Member, error) {
	l, at, err := dialLighthouses(ctx, addresses, connectTimeout, options)
	if err != nil {
		return nil, err
	}
	n := len(l.addresses)
	m := &Member{
		lighthouses: l, replicaID: replicaID, opening: make(chan struct{}, 1),
		choice: newChoice(at, n), unary: make([]bool, n), promise: promise{birth: time.Now()}, silence: silence{since: time.Now()},
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.told, _ = m.heard.Listen()
	if n > 1 {
		rpc.Go(&m.tasks, slog.Default(), "look for earlier lighthouses", m.lookBack)
	}
	return m, nil
}

func (m *Member) Quorum(ctx context.Context, who quorum.Member, knownQuorumID int64) (*quorum.Quorum, error) {
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	knownQuorumID = max(knownQuorumID, m.known())
	stream, client, at, err := m.connect(ctx)
	var q *quorum.Quorum
	if err == nil && m.leftElsewhere(at) {
		err = errLeft
	} else if err == nil {
		q, err = stream.ask(ctx, client.number.Add(1), who, knownQuorumID)
	}
	switch status.Code(err) {
	case codes.Unimplemented:
		m.setUnary(at, true)
		q, err := client.Quorum(ctx, who, knownQuorumID)
		if last := m.last.Load(); last != nil && status.Code(err) == codes.InvalidArgument {
			// A lighthouse whose clock is far behind believes an id only with who was in that quorum. On a stream it would have asked.
			q, err = client.quorum(ctx, who, knownQuorumID, last)
		}
		m.mayBeAnother(at, err)
		if q != nil {
			m.last.Store(q)
			m.fenced.Store(false)
		}
		return q, err
	case codes.OutOfRange:
		// It has too few of the members, or does not know what this one knows; it has let it go. Another lighthouse may have more.
		err = status.Error(codes.Unavailable, rpc.Message(err))
		m.avoid(at)
	case codes.OK:
		m.fenced.Store(false)
		m.servedWell(at)
	default:
	}
	if client == nil {
		return q, err
	}
	return q, rpc.Wrap("quorum", client.peer, err)
}

// known is the last quorum that the member was told of, 0 if there is none.
func (m *Member) known() int64 {
	if last := m.last.Load(); last != nil {
		return last.ID
	}
	return 0
}

// Attend keeps a stream open, and is never silent on it for longer than the lighthouse asks for.
func (m *Member) Attend(ctx context.Context, interval time.Duration, reached func()) error {
	var until time.Time // when it is a failure that a stream which broke is not back
	for {
		opening, cancel := context.WithTimeout(ctx, openTimeout)
		stream, client, at, err := m.connect(opening)
		cancel()
		if err == nil {
			err = stream.attend(ctx, reached)
			if stream.moved.Load() && ctx.Err() == nil && m.ctx.Err() == nil {
				continue
			}
			if stream.greeted() {
				until = time.Now().Add(comeBackTime)
			}
		}
		if rpc.IsUnavailable(err) && m.lighthouses.client(at).comesBack(ctx, until) {
			continue
		}
		if client == nil {
			return err
		}
		if status.Code(err) != codes.Unimplemented {
			return rpc.Wrap("heartbeat", client.peer, err)
		}
		m.setUnary(at, true)
		err = m.beat(ctx, client, at, interval, reached)
		if errors.Is(err, errMoved) {
			continue
		}
		m.mayBeAnother(at, err)
		return err
	}
}

// comeBackTime is how long a stream that broke is begun anew, as soon as there is a connection, before that counts as a
// failure and the pauses become longer. A lighthouse gives its members 200 ms unless it is told otherwise.
const comeBackTime = 300 * time.Millisecond

// beat makes a call at every interval, until the member goes to another lighthouse.
func (m *Member) beat(ctx context.Context, client *Client, at int, interval time.Duration, reached func()) error {
	// Long enough for a busy lighthouse; the next heartbeat waits for this one.
	timeout := max(10*interval, time.Second)
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		one, cancel := context.WithTimeout(ctx, timeout)
		err := client.Heartbeat(one, m.replicaID)
		cancel()
		if err != nil {
			return err
		}
		reached()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
		if len(m.unary) > 1 {
			moved := false
			m.locked(func() { moved = m.choice.at != at })
			if moved {
				return errMoved
			}
		}
	}
}

// Notices has a value for each notice of the lighthouse.
func (m *Member) Notices() <-chan membership.Notice { return m.told }

func (m *Member) Suspect(quorumID int64, replicaID string) {
	m.say(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Suspected{
		Suspected: &torchftpb.PeerSuspected{QuorumId: quorumID, ReplicaId: replicaID},
	}})
}

func (m *Member) Incomplete(reason string) {
	m.say(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Incomplete{Incomplete: reason}})
}

func (m *Member) SayProgress(p round.Progress) {
	m.say(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Progress{Progress: &torchftpb.GroupProgress{
		Step: p.Step, GroupRank: p.GroupRank, Phase: p.Phase, ForUs: p.For.Microseconds(), Waits: p.Waits,
	}}})
}

// say sends on the stream that is open. While disconnected it drops the message: the lighthouse has seen the disconnect itself.
func (m *Member) say(message *torchftpb.MemberMessage) {
	if stream := m.present.Load(); stream != nil && !stream.broken() {
		go stream.send(message) // The caller must not wait for a lighthouse that does not read.
	}
}

// Fenced reports whether nothing was said for so long that the lighthouse may take this group for failed: its process was
// stopped, or its host slept. It holds until the next quorum.
func (m *Member) Fenced() bool {
	m.noteSilence()
	return m.fenced.Load()
}

func (m *Member) Close() error {
	m.ends.Store(true)
	m.sayEnd()
	m.cancel()
	err := m.lighthouses.close()
	m.locked(func() {
		if m.stream != nil {
			<-m.stream.ended
		}
	})
	m.tasks.Wait()
	return err
}

// farewellTime is how long the end of a group may wait until the lighthouse knows that it is none of a failure.
const farewellTime = 200 * time.Millisecond

// sayEnd says that the stream will end because the group does.
func (m *Member) sayEnd() {
	stream := m.present.Load()
	if stream == nil || stream.broken() || !stream.greeted() {
		return
	}
	said := make(chan struct{})
	m.tasks.Go(func() {
		defer close(said)
		stream.send(&torchftpb.MemberMessage{
			Finished: m.finished.Load(),
			Message:  &torchftpb.MemberMessage_ShuttingDown{ShuttingDown: true},
		})
		select {
		case <-stream.free:
		case <-stream.ended:
		}
	})
	select {
	case <-said:
	case <-time.After(farewellTime):
	}
}

// SayHealing tells how far the state of a peer has arrived.
func (m *Member) SayHealing(p membership.HealProgress) {
	m.say(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Healing{Healing: wire.HealProgressToProto(p)}})
}

// SayRecovered tells what a recovery cost.
func (m *Member) SayRecovered(r membership.Recovered) {
	m.say(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Recovered{Recovered: wire.RecoveredToProto(r)}})
}

// locked runs something that changes which lighthouse is asked.
func (m *Member) locked(do func()) {
	m.opening <- struct{}{}
	defer func() { <-m.opening }()
	do()
}

func (m *Member) setUnary(at int, unary bool) { m.locked(func() { m.unary[at] = unary }) }

// mayBeAnother looks at the error of a call: what comes back after an outage may be a lighthouse that knows streams.
func (m *Member) mayBeAnother(at int, err error) {
	if rpc.IsUnavailable(err) {
		m.setUnary(at, false)
	}
}

func (m *Member) learnTerm(term int64) { m.term.Store(max(m.term.Load(), term)) }

// avoid leaves a lighthouse alone for a while, longer each time.
func (m *Member) avoid(at int) {
	m.locked(func() {
		m.letGo()
		m.choice.shun(at, time.Now())
		if m.choice.at == at && m.stream != nil {
			m.stream.leave()
		}
	})
}

// servedWell notes that a lighthouse gave a quorum.
func (m *Member) servedWell(at int) {
	if len(m.unary) > 1 {
		m.locked(func() { m.choice.refused[at] = 0 })
	}
}

// connect returns the stream, a new one if the last one broke. Where a lighthouse knows no streams the error is
// UNIMPLEMENTED.
//
// It holds that a member asks no other lighthouse while it is bound to one: the vote of a member that ends bound counts there, and
// must count nowhere else. Whether it is bound is looked at before each round of attempts, which ends with the bond. That is enough:
// only a stream that was welcomed binds it, and such a stream ends the attempts (begun).
func (m *Member) connect(ctx context.Context) (*memberStream, *Client, int, error) {
	select {
	case m.opening <- struct{}{}:
		defer func() { <-m.opening }()
	case <-ctx.Done():
		return nil, nil, 0, status.FromContextError(ctx.Err()).Err()
	}
	c := &m.choice
	if m.stream != nil && !m.stream.broken() {
		return m.stream, m.lighthouses.client(c.at), c.at, nil
	}
	if m.ends.Load() {
		return nil, nil, c.at, status.Error(codes.Canceled, "the client is closed")
	}
	now := time.Now()
	if m.stream != nil {
		if c.broke.IsZero() {
			c.broke = now
		}
		if place, sent := m.stream.sentBack(); sent {
			c.goBack(place)
			m.stream = nil // Each stream sends back once. Else a later failure would lead there again.
		}
	}
	for {
		bound := m.bound()
		within, done := ctx, func() {}
		if bound {
			within, done = context.WithDeadline(ctx, m.boundUntil())
		}
		stream, client, at, err := m.attempt(within, now, bound)
		outOfTime := within.Err() != nil && ctx.Err() == nil
		done()
		if err == nil || !outOfTime || status.Code(err) == codes.Unimplemented {
			return stream, client, at, err
		}
		// The bond has run out: for all of its time nothing came from that lighthouse. The others are asked now.
		c.silent = true
	}
}

// attempt tries the lighthouses that may be asked, one after the other. The caller holds opening, and has no stream.
func (m *Member) attempt(ctx context.Context, now time.Time, bound bool) (*memberStream, *Client, int, error) {
	c := &m.choice
	if bound && c.outlasted(now) && m.lighthouses.ended(ctx, c.at) {
		// Its process has ended, and bonds are not on its disk: when it starts, it counts no vote by this one.
		m.letGo()
		bound = false
	}
	var failures attempts
	order := c.order(now, bound)
	for _, i := range order {
		began := time.Now()
		stream, client, err := m.open(ctx, i)
		if err == nil || status.Code(err) == codes.Unimplemented {
			c.arrived(i)
			if stream != nil {
				m.stream = stream
				m.present.Store(stream)
			} else {
				m.heardEvery(0)
			}
			return stream, client, i, err
		}
		if client != nil {
			err = rpc.Wrap("attend", client.peer, err)
		}
		failures = append(failures, err)
		if ctx.Err() != nil {
			break
		}
		c.failed(i, now, time.Since(began) >= attemptTimeout)
	}
	if c.broke.IsZero() { // It was asked by calls. Without a stream that breaks, the wait for it would begin nowhere.
		c.broke = now
	}
	return nil, nil, order[0], failures.err()
}

// open begins a stream with one lighthouse. Of several, only one that answers soon will do.
func (m *Member) open(ctx context.Context, i int) (*memberStream, *Client, error) {
	several := len(m.unary) > 1
	if several {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, attemptTimeout)
		defer cancel()
	}
	client, err := m.lighthouses.reach(ctx, i)
	if err != nil {
		return nil, nil, err
	}
	if m.unary[i] {
		return nil, client, status.Error(codes.Unimplemented, "the lighthouse knows no streams")
	}
	streamCtx, cancel := context.WithCancel(rpc.WithJob(m.ctx, client.job))
	inTime := context.AfterFunc(ctx, cancel) // the stream outlives the call that opens it
	wire, err := torchftpb.NewMemberServiceClient(client.conn).Attend(streamCtx)
	if !inTime() {
		cancel()
		return nil, client, status.Error(codes.Unavailable, "the lighthouse does not answer")
	}
	if err != nil {
		cancel()
		return nil, client, err
	}
	stream := &memberStream{
		wire:     wire,
		list:     &m.list,
		member:   m,
		cancel:   cancel,
		waiting:  map[uint64]chan asked{},
		welcomed: make(chan struct{}),
		ended:    make(chan struct{}),
		free:     make(chan struct{}),
		goesBack: -1,
		place:    i,
	}
	stream.send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Greeting{Greeting: &torchftpb.Greeting{
		ReplicaId: m.replicaID, Revision: uint64(m.list.revision),
		Place: uint32(i), Lighthouses: uint32(len(m.unary)), Term: max(m.term.Load(), quorum.TermOf(m.known())), KnownQuorumId: m.known(),
	}}})
	go stream.receive()
	if several {
		if err := stream.begun(ctx); err != nil {
			return nil, client, err
		}
	}
	return stream, client, nil
}

// lookBack looks again and again which lighthouses are there that come before the one that serves, and tells that one.
func (m *Member) lookBack() {
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-time.After(time.Duration(float64(lookBackEvery) * (0.9 + rand.Float64()/5))):
		}
		var places []int
		m.locked(func() { places = m.choice.lookAt(time.Now()) })
		there := m.lighthouses.there(m.ctx, places)
		var stream *memberStream
		var reaches quorum.Places
		m.locked(func() {
			reaches = m.choice.looked(there)
			switch {
			case m.stream != nil && !m.stream.broken():
				stream = m.stream
			case m.unary[m.choice.at] && reaches != 0: // It knows no streams, and so cannot send its members back.
				m.choice.goBack(reaches.First())
			}
		})
		if stream != nil {
			stream.sayReaches(reaches)
		}
	}
}
