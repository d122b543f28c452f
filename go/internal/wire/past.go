package wire

import (
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// largestPast is the size in bytes of the largest record of a quorum that a member shows. It leaves room for
// the other fields of a request.
const largestPast = rpc.MaxRequest * 3 / 4

// PastToProto returns the wire form of the quorum that a member received last. If it is too large for a
// request, with more than some 10,000 members with 8 handles each, it contains only what a lighthouse needs
// to continue after the quorum, and not what it needs to redeliver it.
func PastToProto(q *quorum.Quorum) (*torchftpb.PastQuorum, error) {
	packed, err := packQuorum(q)
	if err == nil && len(packed) > largestPast {
		bare := &quorum.Quorum{ID: q.ID, Created: q.Created, Members: make([]quorum.Member, len(q.Members))}
		for i, m := range q.Members {
			bare.Members[i] = quorum.Member{ReplicaID: m.ReplicaID, Address: m.Address, Step: m.Step}
		}
		packed, err = packQuorum(bare)
	}
	return &torchftpb.PastQuorum{Packed: packed, Stands: q.Stands}, err
}

func packQuorum(q *quorum.Quorum) ([]byte, error) {
	plain, err := proto.Marshal(QuorumToProto(q))
	if err != nil {
		return nil, err
	}
	return pack(plain)
}

// PastFromProto is the inverse of PastToProto.
func PastFromProto(p *torchftpb.PastQuorum) (*quorum.Quorum, error) {
	plain, err := unpack(p.GetPacked())
	if err != nil {
		return nil, err
	}
	q, err := wholeFromProto(plain)
	if err == nil {
		q.Stands = p.GetStands()
	}
	return q, err
}
