package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/torchftpb"
)

// ours is a group that keeps a stream, like the manager server of this repository. Unlike the manager server,
// it does not unpack quorums, but those that check sees: thousands of unpacked ones would not fit into
// memory.
type ours struct {
	conn     *grpc.ClientConn
	stream   torchftpb.MemberService_AttendClient
	cancel   context.CancelFunc
	member   *torchftpb.QuorumMember // nil once it was sent
	interval time.Duration

	sending sync.Mutex
	spoke   time.Time // time of the last message sent
	done    chan struct{}
	tasks   sync.WaitGroup
	answers chan answer // to the requests, in order

	keeps         atomic.Bool
	whole, latest *torchftpb.Delivery // the first quorum, and the latest one
}

// answer has the size of the messages received since the previous answer, up to and including a quorum or the
// end of the stream.
type answer struct {
	bytes int
	err   error
}

func newOurs(ctx context.Context, lighthouse string, member *torchftpb.QuorumMember) (group, error) {
	conn, err := rpc.Dial(ctx, rpc.Dialing{}, "lighthouse", lighthouse, requestTimeout)
	if err != nil {
		return nil, err
	}
	o := &ours{conn: conn, member: member, done: make(chan struct{}), answers: make(chan answer, 1)}
	ctx, o.cancel = context.WithCancel(context.Background())
	o.stream, err = torchftpb.NewMemberServiceClient(conn).Attend(ctx)
	if err == nil {
		err = o.greet()
	}
	if err != nil {
		o.close()
		return nil, err
	}
	o.tasks.Go(o.speak)
	o.tasks.Go(o.listen)
	return o, nil
}

// speak sends a heartbeat whenever nothing was sent for the interval that the lighthouse has set.
func (o *ours) speak() {
	timer := time.NewTimer(o.interval)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-o.done:
			return
		}
		o.sending.Lock()
		wait := o.interval - time.Since(o.spoke)
		if wait <= 0 {
			wait = o.interval
			o.spoke = time.Now()
			// An error means that the stream has broken; wait returns that error.
			_ = o.stream.Send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Alive{Alive: true}})
		}
		o.sending.Unlock()
		timer.Reset(wait)
	}
}

func (o *ours) greet() error {
	err := o.stream.Send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Greeting{
		Greeting: &torchftpb.Greeting{ReplicaId: o.member.GetReplicaId()},
	}})
	if err != nil {
		return err
	}
	welcome, err := o.stream.Recv()
	o.interval = time.Duration(welcome.GetWelcome().GetAliveIntervalUs()) * time.Microsecond
	return err
}

func (o *ours) begin(step int64) error {
	ask := &torchftpb.Ask{Number: uint64(time.Now().UnixNano()), TimeoutUs: requestTimeout.Microseconds(),
		Step: step, Member: o.member}
	o.member = nil
	return o.send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Ask{Ask: ask}})
}

func (o *ours) wait() (received int, err error) {
	a := <-o.answers
	return a.bytes, a.err
}

// listen receives the messages of the lighthouse, even while no call of wait is pending.
func (o *ours) listen() {
	received := 0
	for {
		message, err := o.stream.Recv()
		received += proto.Size(message)
		answers := false
		if err == nil {
			answers, err = o.handle(message)
		}
		if err == nil && !answers {
			continue
		}
		select {
		case o.answers <- answer{received, err}:
		case <-o.done:
			return
		}
		if err != nil {
			return
		}
		received = 0
	}
}

// handle handles a message, and reports whether it answers the request.
func (o *ours) handle(message *torchftpb.LighthouseMessage) (answers bool, err error) {
	switch m := message.GetMessage().(type) {
	case *torchftpb.LighthouseMessage_Delivery:
		if o.keeps.Load() {
			o.latest = m.Delivery
			if o.whole == nil {
				o.whole = m.Delivery
			}
		}
		return true, nil
	case *torchftpb.LighthouseMessage_Notice:
		if m.Notice.GetKind() != torchftpb.Notice_PROGRESS_ASKED {
			return false, nil // after a failure the group asks again in the next round
		}
		// always the same answer: a simulated group computes nothing, it only waits for quorums
		return false, o.send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Progress{
			Progress: &torchftpb.GroupProgress{What: "waits for the other groups", Waits: true},
		}})
	}
	return false, fmt.Errorf("unexpected message of the lighthouse: %s", message)
}

func (o *ours) send(m *torchftpb.MemberMessage) error {
	o.sending.Lock()
	defer o.sending.Unlock()
	o.spoke = time.Now()
	return o.stream.Send(m)
}

func (o *ours) keep() { o.keeps.Store(true) }

func (o *ours) check() (members int, steps int64) {
	var received wire.Delivered
	for _, delivery := range []*torchftpb.Delivery{o.whole, o.latest} {
		if received.Next(delivery) != nil {
			return 0, 0
		}
	}
	q := received.Quorum
	for i := range q.Members {
		steps += q.Members[i].Step
	}
	return len(q.Members), steps
}

func (o *ours) close() {
	close(o.done)
	o.cancel()
	_ = o.conn.Close()
	o.tasks.Wait()
}
