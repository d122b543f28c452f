package lighthouse

import (
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// delivery is a quorum in its encoded forms. Each form is encoded once, when the first member needs it.
type delivery struct {
	quorum *quorum.Quorum
	before quorum.Revision // of the previous quorum, 0 if there is none

	answer func() (rpc.Encoded, error)   // the answer to a call
	states func() (rpc.Encoded, error)   // on a stream, for a member that holds the list
	change func() ([]rpc.Encoded, error) // for a member that holds the list of the quorum before
	whole  func() ([]rpc.Encoded, error) // for all other members
}

func newDelivery(q, before *quorum.Quorum) *delivery {
	d := &delivery{quorum: q}
	if before != nil {
		d.before = before.Revision
	}
	d.answer = sync.OnceValues(func() (rpc.Encoded, error) {
		return proto.Marshal(&torchftpb.LighthouseQuorumResponse{Quorum: wire.QuorumToProto(q)})
	})
	d.states = sync.OnceValues(func() (rpc.Encoded, error) {
		return proto.Marshal(&torchftpb.LighthouseMessage{
			Message: &torchftpb.LighthouseMessage_Quorum{Quorum: wire.StatesToProto(q)},
		})
	})
	d.change = sync.OnceValues(func() ([]rpc.Encoded, error) { return encodeChange(q.Since(d.before, before)) })
	d.whole = sync.OnceValues(func() ([]rpc.Encoded, error) { return encodeChange(q.Since(0, nil)) })
	return d
}

// lacks returns what is sent before the states to a member that holds the list of a revision: nothing, the change, or the whole list.
func (d *delivery) lacks(held quorum.Revision) ([]rpc.Encoded, error) {
	switch {
	case held == d.quorum.Revision:
		return nil, nil
	case held == d.before && held != 0:
		return d.change()
	default:
		return d.whole()
	}
}

func encodeChange(c quorum.Change) ([]rpc.Encoded, error) {
	var encoded []rpc.Encoded
	for _, part := range wire.ChangeToProto(c) {
		part, err := wire.Pack(part)
		if err != nil {
			return nil, err
		}
		bytes, err := proto.Marshal(&torchftpb.LighthouseMessage{
			Message: &torchftpb.LighthouseMessage_ListChange{ListChange: part},
		})
		if err != nil {
			return nil, err
		}
		encoded = append(encoded, bytes)
	}
	return encoded, nil
}
