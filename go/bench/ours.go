package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/torchftpb"
)

// ours is a group that keeps a stream, like the manager server of this repository. Unlike the manager server, it stores quorums
// encoded, and decodes them only in check: thousands of decoded ones would not fit into memory.
type ours struct {
	conn     *grpc.ClientConn
	stream   grpc.ClientStream
	cancel   context.CancelFunc
	member   *torchftpb.QuorumMember // nil once it was sent
	interval time.Duration

	sending sync.Mutex
	spoke   time.Time // time of the last message sent
	done    chan struct{}
	tasks   sync.WaitGroup
	answers chan answer // to the requests, in order

	keeps         atomic.Bool
	whole, latest []byte // the first quorum, and the latest one
}

// answer has the size of the messages received since the previous answer, up to and including a quorum or the end of the stream.
type answer struct {
	bytes int
	err   error
}

func newOurs(ctx context.Context, lighthouse string, member *torchftpb.QuorumMember) (group, error) {
	// Thousands of connections live in this one process.
	conn, err := dial(ctx, lighthouse, grpc.WithReadBufferSize(4<<10))
	if err != nil {
		return nil, err
	}
	o := &ours{conn: conn, member: member, done: make(chan struct{}), answers: make(chan answer, 1)}
	ctx, o.cancel = context.WithCancel(context.Background())
	o.stream, err = conn.NewStream(ctx, &torchftpb.MemberService_ServiceDesc.Streams[0], torchftpb.MemberService_Attend_FullMethodName)
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
			_ = o.stream.SendMsg(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Alive{Alive: true}})
		}
		o.sending.Unlock()
		timer.Reset(wait)
	}
}

func (o *ours) greet() error {
	err := o.stream.SendMsg(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Greeting{
		Greeting: &torchftpb.Greeting{ReplicaId: o.member.GetReplicaId()},
	}})
	if err != nil {
		return err
	}
	var welcome torchftpb.LighthouseMessage
	err = o.stream.RecvMsg(&welcome)
	o.interval = time.Duration(welcome.GetWelcome().GetAliveIntervalUs()) * time.Microsecond
	return err
}

func (o *ours) begin(step int64) error {
	ask := &torchftpb.Ask{Number: uint64(time.Now().UnixNano()), TimeoutUs: requestTimeout.Microseconds(), Step: step, Member: o.member}
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
		message, err := o.receive()
		received += message.size
		field := protowire.Number(0)
		if err == nil {
			field, err = o.handle(message.bytes)
		}
		if err == nil && field != deliveryField {
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

func (o *ours) receive() (message raw, err error) {
	err = o.stream.RecvMsg(&message)
	return message, err
}

// handle handles a message and returns its field number.
func (o *ours) handle(message []byte) (protowire.Number, error) {
	field, err := kindOf(message)
	if err != nil {
		return 0, err
	}
	switch field {
	case deliveryField:
		if o.keeps.Load() {
			if o.whole == nil {
				o.whole = message
			}
			o.latest = message
		}
	case progressAskedField: // always the same answer: a simulated group computes nothing, it only waits for quorums
		return field, o.send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Progress{
			Progress: &torchftpb.GroupProgress{Phase: "waits for the other groups", Waits: true},
		}})
	case memberFailedField, memberStalledField: // ignored: the group asks again in the next round
	default:
		return field, fmt.Errorf("unexpected message of the lighthouse: %s", text(message))
	}
	return field, nil
}

func (o *ours) send(m *torchftpb.MemberMessage) error {
	o.sending.Lock()
	defer o.sending.Unlock()
	o.spoke = time.Now()
	return o.stream.SendMsg(m)
}

// The fields of torchftpb.LighthouseMessage.
const (
	numberField       = 1
	memberFailedField = 7

	memberStalledField = 60
	progressAskedField = 61
	deliveryField      = 85
)

// kindOf returns the field number of the message in a LighthouseMessage.
func kindOf(message []byte) (protowire.Number, error) {
	for rest := message; len(rest) > 0; {
		field, _, n := protowire.ConsumeField(rest)
		if n < 0 {
			return 0, protowire.ParseError(n)
		}
		if field != numberField {
			return field, nil
		}
		rest = rest[n:]
	}
	return 0, errors.New("a message of the lighthouse is empty")
}

func text(message []byte) string {
	var m torchftpb.LighthouseMessage
	if err := proto.Unmarshal(message, &m); err != nil {
		return err.Error()
	}
	return m.String()
}

func (o *ours) keep() { o.keeps.Store(true) }

func (o *ours) check() (members int, steps int64) {
	var received wire.Delivered
	for _, message := range [][]byte{o.whole, o.latest} {
		var m torchftpb.LighthouseMessage
		if proto.Unmarshal(message, &m) != nil || received.Next(m.GetDelivery()) != nil {
			return 0, 0
		}
	}
	q := received.Quorum
	for i := range q.Members {
		steps += q.Members[i].Step
	}
	return len(q.Members), steps
}

// alive does nothing: speak sends the heartbeats.
func (o *ours) alive(context.Context) (time.Duration, error) { return time.Hour, nil }

func (o *ours) close() {
	close(o.done)
	o.cancel()
	_ = o.conn.Close()
	o.tasks.Wait()
}
