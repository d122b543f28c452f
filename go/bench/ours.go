package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// ours is a group that keeps a stream, as the manager of this repository does. Unlike that, it keeps the list of members
// as it came, and rebuilds a quorum of it only when it is asked to: thousands of lists, decoded, fit into no machine.
type ours struct {
	conn     *grpc.ClientConn
	stream   grpc.ClientStream
	cancel   context.CancelFunc
	member   *torchftpb.QuorumMember // nil once it was sent
	interval time.Duration

	sending sync.Mutex
	spoke   time.Time // when something was sent last
	done    chan struct{}
	speaker sync.WaitGroup

	keeps  bool
	parts  [][]byte // of the list, each a message
	states []byte
}

func newOurs(ctx context.Context, lighthouse string, member *torchftpb.QuorumMember) (group, error) {
	// Thousands of connections live in this one process.
	conn, err := dial(ctx, lighthouse, grpc.WithReadBufferSize(4<<10))
	if err != nil {
		return nil, err
	}
	o := &ours{conn: conn, member: member, done: make(chan struct{})}
	ctx, o.cancel = context.WithCancel(context.Background())
	o.stream, err = conn.NewStream(ctx, &torchftpb.MemberService_ServiceDesc.Streams[0], torchftpb.MemberService_Attend_FullMethodName)
	if err == nil {
		err = o.greet()
	}
	if err != nil {
		o.close()
		return nil, err
	}
	o.speaker.Go(o.speak)
	return o, nil
}

// speak says that the group is alive whenever it was silent for as long as the lighthouse allows.
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
			// An error means that the stream has broken: wait has it.
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
	ask := &torchftpb.Ask{Number: uint64(time.Now().UnixNano()), TimeoutUs: patience.Microseconds(), Step: step, Member: o.member}
	o.member = nil
	o.sending.Lock()
	defer o.sending.Unlock()
	o.spoke = time.Now()
	return o.stream.SendMsg(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Ask{Ask: ask}})
}

func (o *ours) wait() (received int, err error) {
	var message raw
	for {
		if err := o.stream.RecvMsg(&message); err != nil {
			return received, err
		}
		received += message.size
		field, err := kindOf(message.bytes)
		if err != nil {
			return received, err
		}
		switch field {
		case listChangeField:
			if o.keeps {
				o.parts = append(o.parts, message.bytes)
			}
		case memberFailedField: // of the next round it is a member again
		case quorumField:
			o.states = message.bytes
			return received, nil
		default:
			return received, fmt.Errorf("the lighthouse said: %s", text(message.bytes))
		}
	}
}

// The fields of torchftpb.LighthouseMessage.
const (
	numberField       = 1
	listChangeField   = 3
	quorumField       = 4
	memberFailedField = 7
)

// kindOf is the field of the one message in a LighthouseMessage.
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

func (o *ours) keep() { o.keeps = true }

func (o *ours) check() (members int, steps int64) {
	var change quorum.Change
	for _, part := range o.parts {
		var m torchftpb.LighthouseMessage
		if proto.Unmarshal(part, &m) != nil || rpc.AddPart(&change, m.GetListChange()) != nil {
			return 0, 0
		}
	}
	list, err := change.Apply(nil)
	if err != nil {
		return 0, 0
	}
	var m torchftpb.LighthouseMessage
	if proto.Unmarshal(o.states, &m) != nil {
		return 0, 0
	}
	q, err := rpc.QuorumFromStates(m.GetQuorum(), list)
	if err != nil || q.Revision != quorum.RevisionOf(list) {
		return 0, 0
	}
	for i := range q.Members {
		steps += q.Members[i].Step
	}
	return len(q.Members), steps
}

// alive has nothing to do: speak does it.
func (o *ours) alive(context.Context) (time.Duration, error) { return time.Hour, nil }

func (o *ours) close() {
	close(o.done)
	o.cancel()
	_ = o.conn.Close()
	o.speaker.Wait()
}
