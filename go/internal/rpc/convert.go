package rpc

import (
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// MemberFromProto keeps the fields this version does not know, as bytes.
func MemberFromProto(m *torchftpb.QuorumMember) quorum.Member {
	return quorum.Member{
		ReplicaID:          m.GetReplicaId(),
		Address:            m.GetAddress(),
		StoreAddress:       m.GetStoreAddress(),
		Step:               m.GetStep(),
		WorldSize:          m.GetWorldSize(),
		ShrinkOnly:         m.GetShrinkOnly(),
		Data:               m.GetData(),
		CommitFailures:     m.GetCommitFailures(),
		CommittedQuorumID:  m.GetCommittedQuorumId(),
		ReplaysFailedSteps: m.GetReplaysFailedSteps(),
		Handles:            m.GetReconfigureHandles(),
		Unknown:            m.ProtoReflect().GetUnknown(),
	}
}

// MemberToProto is the inverse of MemberFromProto.
func MemberToProto(m quorum.Member) *torchftpb.QuorumMember {
	p := &torchftpb.QuorumMember{
		ReplicaId:          m.ReplicaID,
		Address:            m.Address,
		StoreAddress:       m.StoreAddress,
		Step:               m.Step,
		WorldSize:          m.WorldSize,
		ShrinkOnly:         m.ShrinkOnly,
		Data:               m.Data,
		CommitFailures:     m.CommitFailures,
		CommittedQuorumId:  m.CommittedQuorumID,
		ReplaysFailedSteps: m.ReplaysFailedSteps,
		ReconfigureHandles: m.Handles,
	}
	if len(m.Unknown) > 0 {
		p.ProtoReflect().SetUnknown(m.Unknown)
	}
	return p
}

// QuorumToProto is the wire form of a quorum.
func QuorumToProto(q *quorum.Quorum) *torchftpb.Quorum {
	p := &torchftpb.Quorum{QuorumId: q.ID, Created: timestamppb.New(q.Created)}
	p.Participants = make([]*torchftpb.QuorumMember, len(q.Members))
	for i, m := range q.Members {
		p.Participants[i] = MemberToProto(m)
	}
	return p
}

// QuorumFromProto is the inverse of QuorumToProto.
func QuorumFromProto(p *torchftpb.Quorum) *quorum.Quorum {
	q := &quorum.Quorum{ID: p.GetQuorumId(), Created: p.GetCreated().AsTime()}
	q.Members = make([]quorum.Member, len(p.GetParticipants()))
	for i, m := range p.GetParticipants() {
		q.Members[i] = MemberFromProto(m)
	}
	return q
}
