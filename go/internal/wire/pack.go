package wire

import (
	"bytes"
	"compress/flate"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// largestPast is the size in bytes of the largest record of a quorum that a member shows. It leaves room for
// the other fields of a request.
const largestPast = rpc.MaxRequest * 3 / 4

// PackPast packs the quorum that a member received last. If it is too large for a request, with more than
// some 10,000 members with 8 handles each, the records of the members contain only what a lighthouse needs to
// continue after the quorum, and not what it needs to redeliver it.
func PackPast(q *quorum.Quorum) ([]byte, error) {
	packed, err := pack(q)
	if err == nil && len(packed) > largestPast {
		bare := *q
		bare.Members = make([]quorum.Member, len(q.Members))
		for i, m := range q.Members {
			bare.Members[i] = quorum.Member{ReplicaID: m.ReplicaID, Address: m.Address, Step: m.Step}
		}
		packed, err = pack(&bare)
	}
	return packed, err
}

// pack returns a quorum encoded and compressed: the records of its members differ little.
func pack(q *quorum.Quorum) ([]byte, error) {
	plain, err := proto.Marshal(QuorumToProto(q))
	if err != nil {
		return nil, err
	}
	var packed bytes.Buffer
	w, err := flate.NewWriter(&packed, flate.BestSpeed)
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(plain); err != nil {
		return nil, err
	}
	err = w.Close()
	return packed.Bytes(), err
}

// Unpack is the inverse of pack. It bounds the unpacked size: a small message can unpack to one that exceeds
// the memory.
func Unpack(packed []byte) (*quorum.Quorum, error) {
	plain, err := io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(packed)), rpc.MaxMessage+1))
	if err != nil {
		return nil, fmt.Errorf("decompress a quorum: %w", err)
	}
	if len(plain) > rpc.MaxMessage {
		return nil, fmt.Errorf("a quorum has more than %d bytes", rpc.MaxMessage)
	}
	var p torchftpb.Quorum
	if err := proto.Unmarshal(plain, &p); err != nil {
		return nil, fmt.Errorf("decode a quorum: %w", err)
	}
	q := QuorumFromProto(&p)
	for i := 1; i < len(q.Members); i++ {
		// a member's replica rank is its index, so all groups must have the same order
		if q.Members[i-1].ReplicaID >= q.Members[i].ReplicaID {
			return nil, fmt.Errorf("members %q and %q of quorum %d are not in order",
				q.Members[i-1].ReplicaID, q.Members[i].ReplicaID, q.ID)
		}
	}
	return q, nil
}
