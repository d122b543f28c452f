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
	// the number of its list of members, greater than the last delivery's unless the members are the same
	list uint64

	answer func() (rpc.Encoded, error) // the answer to a call
	states func() (rpc.Encoded, error) // on a stream whose last delivery had the same list
	whole  func() (rpc.Encoded, error) // on all other streams
}

// newDelivery returns the delivery of a quorum; before is the job's previous one, nil if there is none.
func newDelivery(q *quorum.Quorum, before *delivery) *delivery {
	d := &delivery{quorum: q, list: 1}
	if before != nil {
		d.list = before.list
		if !q.SameMembers(before.quorum) {
			d.list++
		}
	}
	d.answer = sync.OnceValues(func() (rpc.Encoded, error) {
		return proto.Marshal(&torchftpb.LighthouseQuorumResponse{Quorum: wire.QuorumToProto(q)})
	})
	d.states = sync.OnceValues(func() (rpc.Encoded, error) {
		return encodeDelivery(wire.StatesToProto(q, d.list), nil)
	})
	d.whole = sync.OnceValues(func() (rpc.Encoded, error) {
		return encodeDelivery(wire.WholeToProto(q, d.list))
	})
	return d
}

func encodeDelivery(p *torchftpb.Delivery, err error) (rpc.Encoded, error) {
	if err != nil {
		return nil, err
	}
	return proto.Marshal(&torchftpb.LighthouseMessage{
		Message: &torchftpb.LighthouseMessage_Delivery{Delivery: p},
	})
}

// after returns the form for a stream; last is the number of its last delivery's list, 0 if there is none.
func (d *delivery) after(last uint64) (rpc.Encoded, error) {
	if last == d.list {
		return d.states()
	}
	return d.whole()
}
