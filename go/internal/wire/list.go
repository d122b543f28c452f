package wire

import (
	"bytes"
	"compress/flate"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// partSize is the approximate size in bytes of a part of a change, before compression to about a fifth. A list is sent in
// parts so that flow control stops the sender at a peer that reads slowly, before the whole list is in the sender's buffers. Smaller
// parts cost more wakeups.
const partSize = 512 << 10

// ChangeToProto returns the wire form of a change as a list of parts, which is empty if nothing has changed.
func ChangeToProto(c quorum.Change) (parts []*torchftpb.ListChange) {
	if c.Empty() {
		return nil
	}
	part := &torchftpb.ListChange{Whole: c.Whole, Left: make([]uint32, len(c.Left))}
	for i, place := range c.Left {
		part.Left[i] = uint32(place)
	}
	parts = append(parts, part)
	size := 4 * len(part.GetLeft())
	for _, m := range c.Set {
		member := MemberToProto(m)
		length := proto.Size(member)
		if size+length > partSize && size > 0 {
			part, size = &torchftpb.ListChange{}, 0
			parts = append(parts, part)
		}
		part.Set = append(part.Set, member)
		size += length
	}
	return parts
}

// packFrom is the size in bytes of the smallest part that is compressed.
const packFrom = 1 << 10

// Pack compresses a part of at least packFrom bytes.
func Pack(part *torchftpb.ListChange) (*torchftpb.ListChange, error) {
	plain, err := proto.Marshal(part)
	if err != nil || len(plain) < packFrom {
		return part, err
	}
	var packed bytes.Buffer
	w, err := flate.NewWriter(&packed, flate.BestSpeed)
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(plain); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return &torchftpb.ListChange{Packed: packed.Bytes()}, nil
}

// unpack is the inverse of Pack. It bounds the unpacked size: a small message can unpack to one that exceeds the memory.
func unpack(part *torchftpb.ListChange) (*torchftpb.ListChange, error) {
	if len(part.GetPacked()) == 0 {
		return part, nil
	}
	r := flate.NewReader(bytes.NewReader(part.GetPacked()))
	plain, err := io.ReadAll(io.LimitReader(r, rpc.MaxMessage+1))
	if err != nil {
		return nil, fmt.Errorf("decompress a part of the list of members: %w", err)
	}
	if len(plain) > rpc.MaxMessage {
		return nil, fmt.Errorf("a part of the list of members has more than %d bytes", rpc.MaxMessage)
	}
	part = &torchftpb.ListChange{}
	if err := proto.Unmarshal(plain, part); err != nil {
		return nil, fmt.Errorf("decode a part of the list of members: %w", err)
	}
	return part, nil
}

// AddPart adds the next part to a change.
func AddPart(c *quorum.Change, part *torchftpb.ListChange) error {
	part, err := unpack(part)
	if err != nil {
		return err
	}
	if part.GetWhole() {
		*c = quorum.Change{Whole: true}
	}
	for _, place := range part.GetLeft() {
		c.Left = append(c.Left, int(place))
	}
	for _, m := range part.GetSet() {
		c.Set = append(c.Set, MemberFromProto(m))
	}
	return nil
}

// StatesToProto returns the wire form of a quorum for a peer that holds its list of members.
func StatesToProto(q *quorum.Quorum) *torchftpb.QuorumStates {
	p := statesToProto(quorum.StatesOf(q.Members))
	p.QuorumId, p.Created, p.Revision = q.ID, timestamppb.New(q.Created), uint64(q.Revision)
	return p
}

// PastToProto returns the wire form of a past quorum.
func PastToProto(p quorum.Past) *torchftpb.PastQuorum {
	return &torchftpb.PastQuorum{QuorumId: p.ID, Step: p.Step, Members: votersToProto(p.Members)}
}

// PastFromProto is the inverse of PastToProto.
func PastFromProto(p *torchftpb.PastQuorum) quorum.Past {
	return quorum.Past{ID: p.GetQuorumId(), Step: p.GetStep(), Members: votersFromProto(p.GetMembers())}
}

func votersToProto(voters []quorum.Voter) (p []*torchftpb.Voter) {
	for _, v := range voters {
		p = append(p, &torchftpb.Voter{ReplicaId: v.ReplicaID, Address: v.Address})
	}
	return p
}

func votersFromProto(p []*torchftpb.Voter) (voters []quorum.Voter) {
	for _, v := range p {
		voters = append(voters, quorum.Voter{ReplicaID: v.GetReplicaId(), Address: v.GetAddress()})
	}
	return voters
}

// QuorumFromStates is the inverse of StatesToProto; list is the list of members that this side holds.
func QuorumFromStates(p *torchftpb.QuorumStates, list []quorum.Member) (*quorum.Quorum, error) {
	states := quorum.States{Common: StateFromProto(p)}
	for _, other := range p.GetOthers() {
		states.Others = append(states.Others, quorum.PlacedState{Place: int(other.GetPlace()), State: StateFromProto(other)})
	}
	members, err := states.Apply(list)
	if err != nil {
		return nil, err
	}
	return &quorum.Quorum{
		ID: p.GetQuorumId(), Members: members, Created: p.GetCreated().AsTime(), Revision: quorum.Revision(p.GetRevision()),
	}, nil
}
