// Package lighthouses is the client of a job's lighthouses. A replica group is a member at one of them: at
// the only one, or at the leader of a cluster, which it looks for among the addresses of its list.
package lighthouses

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// Member is the membership of a replica group at a lighthouse: over one stream, which carries only changes,
// or by a call for each quorum and each heartbeat if the lighthouse has no such streams (upstream's).
//
// Invariants, which keep a member from acting upon the answers of a former leader:
//
//  1. It asks one lighthouse at a time: a new stream begins after the last one has ended.
//  2. It leaves a lighthouse whose term is smaller than one that it has seen, and a quorum with a smaller id
//     than that of its own ends the stream.
type Member struct {
	addresses string // TORCHFT_LIGHTHOUSE
	with      rpc.Dialing
	replicaID string
	ctx       context.Context // ends with Close
	cancel    context.CancelFunc
	broadcast membership.Broadcast
	notices   <-chan *torchftpb.Notice
	stream    atomic.Pointer[memberStream] // nil before the first; opening guards changes

	// the last quorum of the member: a restarted lighthouse restores its state from it
	last atomic.Pointer[quorum.Quorum]
	term atomic.Int64 // the highest term that a lighthouse has sent
	// clustered: the last lighthouse was one of a cluster. Another one may answer when it does not, also if
	// the list has one name for all.
	clustered atomic.Bool
	standsIn  atomic.Int64 // the quorum that stands for the group, 0 if none
	step      atomic.Int64 // the step that it is in, while a quorum stands
	ends      atomic.Bool  // Close was called: no lighthouse is asked any more
	finished  atomic.Bool  // the training is complete, at endStep
	endStep   atomic.Int64

	// a lock for the fields below, as a channel so that a call waits for it no longer than its deadline
	opening chan struct{}
	choice  choice          // its list may have changed if TORCHFT_LIGHTHOUSE is a file
	unary   map[string]bool // which lighthouses have no streams, by address

	mu sync.Mutex
	// of the lighthouses that have been asked, by address; also of leaders that are not in the list
	clients map[string]*Client
	closed  bool
}

var _ membership.Membership = (*Member)(nil)

// Join makes a replica group a member at the lighthouse that serves its job. It returns when a lighthouse of
// the list is reached, which need not be that one, and an error if that lighthouse is in no cluster and the
// list has others. Close ends the membership.
func Join(
	ctx context.Context, addresses, replicaID string, connectTimeout time.Duration, with rpc.Dialing,
) (*Member, error) {
	first, err := Dial(ctx, addresses, connectTimeout, with)
	if err != nil {
		return nil, err
	}
	list, err := rpc.ParseAddresses("lighthouse address", addresses)
	if err != nil { // a file that Dial has read, and that is being replaced
		list = []string{first.addr}
	}
	first.of = len(list)
	m := &Member{
		addresses: addresses, with: with, replicaID: replicaID, opening: make(chan struct{}, 1),
		choice: choice{list: list, at: first.addr}, unary: map[string]bool{},
		clients: map[string]*Client{first.addr: first},
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.notices, _ = m.broadcast.Listen()
	if len(list) > 1 {
		opening, cancel := context.WithTimeout(ctx, attemptTimeout)
		defer cancel()
		if _, _, err := m.connect(opening); status.Code(err) == codes.FailedPrecondition {
			// other errors may pass
			return nil, errors.Join(err, m.Close())
		}
	}
	return m, nil
}

func (m *Member) Quorum(
	ctx context.Context, member quorum.Member, knownQuorumID int64,
) (*quorum.Quorum, error) {
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	knownQuorumID = max(knownQuorumID, m.known())
	stream, client, err := m.connect(ctx)
	var q *quorum.Quorum
	if err == nil {
		q, err = stream.ask(ctx, client.number.Add(1), member, knownQuorumID)
	}
	if status.Code(err) == codes.Unimplemented {
		q, err := client.Quorum(ctx, member, knownQuorumID)
		m.mayBeAnother(ctx, client, err)
		if q != nil {
			m.last.Store(q)
		}
		return q, err
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

// lastRound returns the round that the member received last.
func (m *Member) lastRound() quorum.Claim {
	if last := m.last.Load(); last != nil {
		return last.Round()
	}
	return quorum.Claim{}
}

// Attend keeps a stream open, and sends on it at least as often as the lighthouse asks for.
func (m *Member) Attend(
	ctx context.Context, interval time.Duration, reached func(), doing membership.Doing,
) error {
	var until time.Time // until when a broken stream is reopened without reporting an error
	for {
		opening, cancel := context.WithTimeout(ctx, openTimeout)
		stream, client, err := m.connect(opening)
		cancel()
		if err == nil {
			err = stream.attend(ctx, reached, doing)
			if until = time.Now(); !stream.answers {
				// otherwise the next attempt asks the other lighthouses, too
				until = until.Add(reconnectTime)
			}
		}
		// All members may have lost their streams at the same moment: each one pauses for another time.
		if rpc.IsUnavailable(err) && (stream != nil || time.Now().Before(until)) && rpc.Pause(ctx, 1) {
			continue
		}
		if client == nil {
			return err
		}
		if status.Code(err) != codes.Unimplemented {
			return rpc.Wrap("heartbeat", client.peer, err)
		}
		err = m.beat(ctx, client, interval, reached)
		if errors.Is(err, errMoved) {
			continue
		}
		m.mayBeAnother(ctx, client, err)
		return err
	}
}

// reconnectTime is how long Attend reopens the broken stream of the only lighthouse without backoff. Then it
// returns the error, and the caller's backoff applies. It is longer than the default grace, 200 ms, for which
// a lighthouse waits for a member to come back.
const reconnectTime = 300 * time.Millisecond

// beat makes a heartbeat call at each interval, until the member moves to another lighthouse.
func (m *Member) beat(ctx context.Context, client *Client, interval time.Duration, reached func()) error {
	// Long enough for a busy lighthouse. The next heartbeat is sent after this one has ended.
	timeout := max(10*interval, time.Second)
	ticks := time.Tick(interval)
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
		case <-ticks:
		}
		moved := false
		m.locked(ctx, func() { moved = m.choice.at != client.addr })
		if moved {
			return errMoved
		}
	}
}

// Notices has a value for each notice of the lighthouse.
func (m *Member) Notices() <-chan *torchftpb.Notice { return m.notices }

func (m *Member) Trains(quorumID, step int64) {
	m.standsIn.Store(quorumID)
	m.step.Store(step)
}

// Report sends a message that is not answered. It is dropped while there is no stream, or the lighthouse does
// not read. Dropping it is safe: the lighthouse has seen the disconnect itself, or the silence, and the
// manager server reports an incomplete group again at the next stream (lighthouseReached).
func (m *Member) Report(message *torchftpb.MemberMessage) {
	if stream := m.stream.Load(); stream != nil {
		stream.Post(message)
	}
}

func (m *Member) Close() error {
	m.ends.Store(true)
	m.announceEnd()
	m.cancel()
	err := m.closeAll()
	m.locked(context.Background(), func() {
		if stream := m.stream.Load(); stream != nil {
			<-stream.Ended
			<-stream.Flushed()
		}
	})
	return err
}

// announceEnd announces to the lighthouse that the group ends. Without it the end of the stream would count
// as a failure.
func (m *Member) announceEnd() {
	stream := m.stream.Load()
	if stream == nil || stream.Broken() || !stream.greeted() {
		return
	}
	stream.Post(&torchftpb.MemberMessage{
		Finished: m.finished.Load(), Step: m.endStep.Load(),
		Message: &torchftpb.MemberMessage_ShuttingDown{ShuttingDown: true},
	})
	late := time.After(rpc.FarewellTime)
	// Free alone would not do: it may be closed already, by the answer to an earlier message (Leave).
	for _, end := range []<-chan struct{}{stream.Flushed(), stream.free} {
		select {
		case <-end:
		case <-stream.Ended:
		case <-late:
			return
		}
	}
}

// locked runs do while no stream is being opened, so that do may change the choice and the stream. It does
// nothing if a stream is being opened until ctx ends.
func (m *Member) locked(ctx context.Context, do func()) {
	select {
	case m.opening <- struct{}{}: // also if ctx has ended
	default:
		select {
		case m.opening <- struct{}{}:
		case <-ctx.Done():
			return
		}
	}
	defer func() { <-m.opening }()
	do()
}

// mayBeAnother handles the error of a unary call. After an outage, the lighthouse may be a newer version: a
// stream is tried again.
func (m *Member) mayBeAnother(ctx context.Context, client *Client, err error) {
	if rpc.IsUnavailable(err) {
		m.locked(ctx, func() { delete(m.unary, client.addr) })
	}
}

// learnTerm returns an error if a lighthouse has a smaller term than one that the member has seen: it leads
// no longer.
func (m *Member) learnTerm(term int64) error {
	if seen := m.seenTerm(); term < seen {
		return status.Errorf(codes.Unavailable,
			"the lighthouse has term %d, and this member has seen term %d: another lighthouse leads", term,
			seen)
	}
	m.term.Store(term)
	return nil
}

// seenTerm returns the highest term that the member has seen.
func (m *Member) seenTerm() int64 { return max(m.term.Load(), quorum.TermOf(m.known())) }

// Finish makes Close report that the training is complete, at a step.
func (m *Member) Finish(step int64) {
	m.endStep.Store(step)
	m.finished.Store(true)
}

// Leave announces that the group has completed its last step, and returns when no peer needs its data of that
// step any more.
func (m *Member) Leave(ctx context.Context) error {
	for failed := 1; ; failed++ {
		err := m.leaveOnce(ctx)
		if !rpc.IsUnavailable(err) {
			// UNAVAILABLE is retried: if the lighthouse never gets this message, it counts the end of the
			// group as a failure
			return err
		}
		if !rpc.Pause(ctx, failed) {
			return err
		}
	}
}

// leaveOnce returns UNAVAILABLE if another attempt may succeed.
func (m *Member) leaveOnce(ctx context.Context) error {
	stream, client, err := m.connect(ctx)
	if status.Code(err) == codes.Unimplemented {
		// an upstream lighthouse does not know this message: it removes the group when its heartbeats end
		return nil
	}
	if err != nil {
		return err
	}
	if !stream.Post(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Leaving{Leaving: true},
		Step: m.step.Load()}) {
		return rpc.Wrap("leave", client.peer, rpc.ErrUnread)
	}
	select {
	case <-stream.free:
		return nil
	case <-stream.Ended:
		err = stream.Err()
	case <-ctx.Done():
		err = status.FromContextError(ctx.Err()).Err()
	}
	return rpc.Wrap("leave", client.peer, err)
}
