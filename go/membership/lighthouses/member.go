// Package lighthouses is the client of a job's lighthouses. A replica group is a member at one of them at a time, and fails over to
// another one of its list.
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

	"github.com/torchft/torchft/go/internal/clock"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
	"github.com/torchft/torchft/go/torchftpb"
)

// Member is the membership of a replica group at a lighthouse: over one stream, which carries only changes, or by a call for each
// quorum and each heartbeat if the lighthouse has no such streams (upstream's). Of a list of lighthouses it asks one at a time.
type Member struct {
	lighthouses *lighthouses
	replicaID   string
	ctx         context.Context // ends with Close
	cancel      context.CancelFunc
	tasks       sync.WaitGroup
	broadcast   membership.Broadcast
	notices     <-chan membership.Notice
	silence
	present atomic.Pointer[memberStream] // the value of stream, for calls that must not wait for opening

	last atomic.Pointer[quorum.Quorum] // the last quorum of the member: a restarted lighthouse restores its state from it
	term atomic.Int64                  // the highest term that a lighthouse has sent
	promise

	opening chan struct{} // a lock for the fields below, as a channel so that a call waits for it no longer than its deadline
	choice  choice
	unary   []bool        // which lighthouses have no streams
	stream  *memberStream // nil before the first

	// Only the open stream uses list: the next stream begins after this one has ended.
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

// Join makes a replica group a member at the first lighthouse of a list that is reached. Close ends the membership.
func Join(ctx context.Context, addresses, replicaID string, connectTimeout time.Duration, options ...DialOption) (*Member, error) {
	l, at, err := dialLighthouses(ctx, addresses, connectTimeout, options)
	if err != nil {
		return nil, err
	}
	n := len(l.addresses)
	m := &Member{
		lighthouses: l, replicaID: replicaID, opening: make(chan struct{}, 1),
		choice: newChoice(at, n), unary: make([]bool, n), promise: promise{birth: time.Now()}, silence: silence{since: clock.Now()},
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.notices, _ = m.broadcast.Listen()
	if n > 1 {
		rpc.Go(&m.tasks, slog.Default(), "look for earlier lighthouses", m.probeEarlier)
	}
	return m, nil
}

func (m *Member) Quorum(ctx context.Context, member quorum.Member, knownQuorumID int64) (*quorum.Quorum, error) {
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	knownQuorumID = max(knownQuorumID, m.known())
	stream, client, at, err := m.connect(ctx)
	var q *quorum.Quorum
	if err == nil && m.leftElsewhere(at) {
		err = errLeft
	} else if err == nil {
		q, err = stream.ask(ctx, client.number.Add(1), member, knownQuorumID)
	}
	switch status.Code(err) {
	case codes.Unimplemented:
		m.setUnary(ctx, at, true)
		q, err := client.Quorum(ctx, member, knownQuorumID)
		if last := m.last.Load(); last != nil && status.Code(err) == codes.InvalidArgument {
			// The id of the known quorum is ahead of the lighthouse's clock. The lighthouse accepts such an id only with the list
			// of that quorum's members; on a stream it would have asked for the list (Recall).
			q, err = client.quorum(ctx, member, knownQuorumID, last)
		}
		m.mayBeAnother(ctx, at, err)
		if q != nil {
			m.last.Store(q)
			m.fenced.Store(false)
		}
		return q, err
	case codes.OutOfRange:
		// The lighthouse has too few of the members, or lacks a quorum that this member knows, and has ended the bond. Another
		// lighthouse of the list may have more: with UNAVAILABLE the manager server asks again.
		err = status.Error(codes.Unavailable, rpc.Message(err))
		m.avoid(ctx, at)
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

// known returns the id of the last quorum that the member was in, 0 if there is none.
func (m *Member) known() int64 {
	if last := m.last.Load(); last != nil {
		return last.ID
	}
	return 0
}

// Attend keeps a stream open, and sends on it at least as often as the lighthouse asks for.
func (m *Member) Attend(ctx context.Context, interval time.Duration, reached func()) error {
	var until time.Time // until when a broken stream is reopened without reporting an error
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
				until = time.Now().Add(reconnectTime)
			}
		}
		if rpc.IsUnavailable(err) && m.lighthouses.client(at).reconnects(ctx, until) {
			continue
		}
		if client == nil {
			return err
		}
		if status.Code(err) != codes.Unimplemented {
			return rpc.Wrap("heartbeat", client.peer, err)
		}
		m.setUnary(ctx, at, true)
		err = m.beat(ctx, client, at, interval, reached)
		if errors.Is(err, errMoved) {
			continue
		}
		m.mayBeAnother(ctx, at, err)
		return err
	}
}

// reconnectTime is how long Attend reopens a broken stream without backoff. Then it returns the error, and the caller's backoff
// applies. It is longer than the default grace, 200 ms, for which a lighthouse waits for a member to come back.
const reconnectTime = 300 * time.Millisecond

// beat makes a heartbeat call at each interval, until the member moves to another lighthouse.
func (m *Member) beat(ctx context.Context, client *Client, at int, interval time.Duration, reached func()) error {
	// Long enough for a busy lighthouse. The next heartbeat is sent after this one has ended.
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
			m.locked(ctx, func() { moved = m.choice.at != at })
			if moved {
				return errMoved
			}
		}
	}
}

// Notices has a value for each notice of the lighthouse.
func (m *Member) Notices() <-chan membership.Notice { return m.notices }

func (m *Member) Suspect(quorumID int64, replicaID string) {
	m.report(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Suspected{
		Suspected: &torchftpb.PeerSuspected{QuorumId: quorumID, ReplicaId: replicaID},
	}})
}

func (m *Member) Incomplete(reason string) {
	m.report(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Incomplete{Incomplete: reason}})
}

func (m *Member) ReportProgress(p round.Progress) {
	m.report(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Progress{Progress: &torchftpb.GroupProgress{
		Step: p.Step, GroupRank: p.GroupRank, Phase: p.Phase, ForUs: p.For.Microseconds(), Waits: p.Waits,
	}}})
}

// report sends a message that is not answered. It is dropped while there is no stream, or the lighthouse does not read. Dropping it is
// safe: the lighthouse has seen the disconnect itself, or the silence, and the manager server reports an incomplete group again at the
// next stream (lighthouseReached).
func (m *Member) report(message *torchftpb.MemberMessage) {
	if stream := m.present.Load(); stream != nil && !stream.broken() {
		stream.post(message)
	}
}

// Fenced reports whether the group was silent for so long that the lighthouse may have counted it as failed: its process was stopped,
// or its host was suspended. It stays fenced until the next quorum.
func (m *Member) Fenced() bool {
	m.noteSilence()
	return m.fenced.Load()
}

func (m *Member) Close() error {
	m.ends.Store(true)
	m.announceEnd()
	m.cancel()
	err := m.lighthouses.close()
	m.locked(context.Background(), func() {
		if m.stream != nil {
			<-m.stream.ended
			m.stream.sender.Wait()
		}
	})
	m.tasks.Wait()
	return err
}

// farewellTime is how long Close may wait until the lighthouse knows that the end is no failure.
const farewellTime = 200 * time.Millisecond

// announceEnd announces to the lighthouse that the group ends. Without it the end of the stream would count as a failure.
func (m *Member) announceEnd() {
	stream := m.present.Load()
	if stream == nil || stream.broken() || !stream.greeted() {
		return
	}
	stream.post(&torchftpb.MemberMessage{
		Finished: m.finished.Load(),
		Message:  &torchftpb.MemberMessage_ShuttingDown{ShuttingDown: true},
	})
	late := time.After(farewellTime)
	// Free alone would not do: it may be closed already, by the answer to an earlier message (Leave).
	for _, end := range []<-chan struct{}{stream.sender.Flushed(), stream.free} {
		select {
		case <-end:
		case <-stream.ended:
		case <-late:
			return
		}
	}
}

// ReportHealing reports the progress of a heal.
func (m *Member) ReportHealing(p membership.HealProgress) {
	m.report(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Healing{Healing: wire.HealProgressToProto(p)}})
}

// ReportRecovered reports the cost of a recovery.
func (m *Member) ReportRecovered(r membership.Recovered) {
	m.report(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Recovered{Recovered: wire.RecoveredToProto(r)}})
}

// locked runs do while no stream is being opened, so that do may change the choice and the stream. It returns false, and has done nothing,
// if a stream is being opened until ctx ends.
func (m *Member) locked(ctx context.Context, do func()) bool {
	select {
	case m.opening <- struct{}{}:
	default:
		select {
		case m.opening <- struct{}{}:
		case <-ctx.Done():
			return false
		}
	}
	defer func() { <-m.opening }()
	do()
	return true
}

func (m *Member) setUnary(ctx context.Context, at int, unary bool) {
	m.locked(ctx, func() { m.unary[at] = unary })
}

// mayBeAnother handles the error of a unary call. After an outage, the lighthouse may be a newer version: a stream is tried again.
func (m *Member) mayBeAnother(ctx context.Context, at int, err error) {
	if rpc.IsUnavailable(err) {
		m.setUnary(ctx, at, false)
	}
}

func (m *Member) learnTerm(term int64) { m.term.Store(max(m.term.Load(), term)) }

// avoid ends the bond to a lighthouse that has refused, and asks others for a while. If a stream is being opened until ctx ends, that is
// done later, unless it has become the stream of another lighthouse.
func (m *Member) avoid(ctx context.Context, at int) {
	refused := m.present.Load()
	leave := func() {
		m.unbind()
		m.choice.shun(at, time.Now())
		if m.choice.at == at && m.stream != nil {
			m.stream.leave()
		}
	}
	if m.locked(ctx, leave) {
		return
	}
	rpc.Go(&m.tasks, slog.Default(), "leaving a lighthouse", func() {
		m.locked(m.ctx, func() {
			if m.stream == refused {
				leave()
			}
		})
	})
}

// servedWell records that a lighthouse has delivered a quorum: its next refusal counts as the first one in a row. While a stream is being
// opened this is left to the next quorum: it must not delay this one.
func (m *Member) servedWell(at int) {
	select {
	case m.opening <- struct{}{}:
		m.choice.refused[at] = 0
		<-m.opening
	default:
	}
}

// connect returns the open stream, or opens a new one. If the lighthouse has no streams, the error is UNIMPLEMENTED.
//
// Invariant: a member that is bound to a lighthouse asks no other one. If it fails while bound, its vote counts there, and must count
// nowhere else. The bond is checked before each round of attempts, and the round ends when the bond does. No bond can begin in between:
// only a stream that was welcomed binds the member, and such a stream ends the round (begun).
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
			c.failBack(place)
			m.stream = nil // The failback that this stream requested is handled now: a later reconnect must not handle it again.
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
		// The bond has run out: the lighthouse has sent nothing for BondTime. From now on the others may be asked.
		c.silent = true
	}
}

// attempt tries the lighthouses that may be asked, one after the other. The caller holds opening, and no stream is open.
func (m *Member) attempt(ctx context.Context, now time.Time, bound bool) (*memberStream, *Client, int, error) {
	c := &m.choice
	if bound && c.outlasted(now) && m.lighthouses.ended(ctx, c.at) {
		// The lighthouse's process has ended. Bonds are not kept on disk: after a restart it does not count the end of this member
		// as its vote. So the bond may end now.
		m.unbind()
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
				m.expectMessages(0)
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
	if c.broke.IsZero() { // The lighthouse was asked by calls, so no stream broke: its outage counts from this attempt.
		c.broke = now
	}
	return nil, nil, order[0], failures.err()
}

// open begins a stream with one lighthouse. If there are several, it must answer within attemptTimeout.
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
		return nil, client, status.Error(codes.Unimplemented, "the lighthouse does not support streams")
	}
	streamCtx, cancel := context.WithCancel(rpc.WithJob(m.ctx, client.job))
	inTime := context.AfterFunc(ctx, cancel) // ctx bounds the call of Attend only; the stream itself outlives it
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
		wire:       wire,
		list:       &m.list,
		member:     m,
		cancel:     cancel,
		waiting:    map[uint64]chan asked{},
		welcomed:   make(chan struct{}),
		ended:      make(chan struct{}),
		free:       make(chan struct{}),
		failbackTo: -1,
		place:      i,
	}
	stream.post(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Greeting{Greeting: &torchftpb.Greeting{
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

// probeEarlier regularly probes the lighthouses before the serving one, and reports to the serving one which of them are reached.
func (m *Member) probeEarlier() {
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-time.After(time.Duration(float64(probeEvery) * (0.9 + rand.Float64()/5))):
		}
		var places []int
		m.locked(m.ctx, func() { places = m.choice.lookAt(time.Now()) })
		there := m.lighthouses.there(m.ctx, places)
		var stream *memberStream
		var reaches quorum.Places
		m.locked(m.ctx, func() {
			reaches = m.choice.looked(there)
			switch {
			case m.stream != nil && !m.stream.broken():
				stream = m.stream
			case m.unary[m.choice.at] && reaches != 0: // a lighthouse without streams cannot ask its members to fail back
				m.choice.failBack(reaches.First())
			}
		})
		if stream != nil {
			stream.sendReaches(reaches)
		}
	}
}
