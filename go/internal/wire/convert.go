// Package wire converts between the messages of package torchftpb and the types of the machines and servers:
// members, quorums, requests, results, failures. The two directions of a conversion are in the same file.
package wire

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/round"
	"github.com/torchft/torchft/go/torchftpb"
)

// MemberFromProto converts a member. Fields that this version does not know are kept as bytes.
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
		AsksEachStep:       m.GetAsksEachStep(),
		CutsBySpeed:        m.GetCutsBySpeed(),
		Handles:            m.GetReconfigureHandles(),
		Layouts:            m.GetLayouts(),
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
		AsksEachStep:       m.AsksEachStep,
		CutsBySpeed:        m.CutsBySpeed,
		ReconfigureHandles: m.Handles,
		Layouts:            m.Layouts,
	}
	if len(m.Unknown) > 0 {
		p.ProtoReflect().SetUnknown(m.Unknown)
	}
	return p
}

// CheckRequest returns an error if the member of a request is so large that every server would refuse it.
func CheckRequest(request proto.Message, m *torchftpb.QuorumMember) error {
	n := proto.Size(request)
	if n <= rpc.MaxRequest {
		return nil
	}
	handles := 0
	for _, h := range m.GetReconfigureHandles() {
		handles += len(h)
	}
	return status.Errorf(codes.InvalidArgument, "the request of member %s has %d bytes, %d of them its "+
		"data and %d its reconfigure handles: a lighthouse accepts at most %d bytes",
		m.GetReplicaId(), n, len(m.GetData()), handles, rpc.MaxRequest)
}

// QuorumToProto returns the wire form of a quorum.
func QuorumToProto(q *quorum.Quorum) *torchftpb.Quorum {
	p := &torchftpb.Quorum{QuorumId: q.ID, Created: timestamppb.New(q.Created), Stands: q.Stands,
		Speeds: q.Speeds, Skipped: q.Skipped}
	p.Participants = make([]*torchftpb.QuorumMember, len(q.Members))
	for i, m := range q.Members {
		p.Participants[i] = MemberToProto(m)
	}
	return p
}

// QuorumFromProto is the inverse of QuorumToProto.
func QuorumFromProto(p *torchftpb.Quorum) *quorum.Quorum {
	q := &quorum.Quorum{ID: p.GetQuorumId(), Created: p.GetCreated().AsTime(), Stands: p.GetStands(),
		Speeds: p.GetSpeeds(), Skipped: p.GetSkipped()}
	q.Members = make([]quorum.Member, len(p.GetParticipants()))
	for i, m := range p.GetParticipants() {
		q.Members[i] = MemberFromProto(m)
	}
	return q
}

// state is a message that has a member's state beside other fields.
type state interface {
	GetStep() int64
	GetCommittedQuorumId() int64
	GetCommitFailures() int64
}

// StateFromProto returns the state in a message.
func StateFromProto(p state) quorum.State {
	return quorum.State{Step: p.GetStep(), CommittedQuorumID: p.GetCommittedQuorumId(),
		CommitFailures: p.GetCommitFailures()}
}

// AskToProto returns a request that contains the state; the caller sets its other fields.
func AskToProto(s quorum.State) *torchftpb.Ask {
	return &torchftpb.Ask{Step: s.Step, CommittedQuorumId: s.CommittedQuorumID,
		CommitFailures: s.CommitFailures}
}

// RequestFromProto converts a rank's request.
func RequestFromProto(p *torchftpb.ManagerQuorumRequest) round.Request {
	return round.Request{
		GroupRank:          p.GetGroupRank(),
		Step:               p.GetStep(),
		CheckpointMetadata: p.GetCheckpointMetadata(),
		ShrinkOnly:         p.GetShrinkOnly(),
		InitSync:           p.GetInitSync(),
		CommitFailures:     p.GetCommitFailures(),
		CommittedQuorumID:  p.GetCommittedQuorumId(),
		ReconfigureHandle:  p.GetReconfigureHandle(),
		GroupWorldSize:     p.GetGroupWorldSize(),
		ReplaysFailedSteps: p.GetReplaysFailedSteps(),
		AsksEachStep:       p.GetAsksEachStep(),
		CutsBySpeed:        p.GetCutsBySpeed(),
		Layout:             p.GetLayout(),
		Drain:              p.GetDrain(),
	}
}

// ResultToProto returns the wire form of a result.
func ResultToProto(r *recovery.Result) *torchftpb.ManagerQuorumResponse {
	return &torchftpb.ManagerQuorumResponse{
		QuorumId:                  r.QuorumID,
		RecoverSrcManagerAddress:  r.RecoverSrcManagerAddress,
		RecoverSrcReplicaRank:     r.RecoverSrcReplicaRank,
		RecoverDstReplicaRanks:    r.RecoverDstReplicaRanks,
		StoreAddress:              r.StoreAddress,
		MaxStep:                   r.MaxStep,
		MaxReplicaRank:            r.MaxReplicaRank,
		MaxWorldSize:              r.MaxWorldSize,
		ReplicaRank:               r.ReplicaRank,
		ReplicaWorldSize:          r.ReplicaWorldSize,
		Heal:                      r.Heal,
		CommitFailures:            r.CommitFailures,
		CommittedQuorumId:         r.CommittedQuorumID,
		Replay:                    r.Replay,
		Draining:                  r.Draining,
		ReplicaIds:                r.ReplicaIDs,
		ReconfigureHandles:        r.ReconfigureHandles,
		ReplicasWithoutHandles:    r.ReplicasWithoutHandles,
		AdditionalSourceAddresses: r.AdditionalSourceAddresses,
		HelpDstReplicaRanks:       r.HelpDstReplicaRanks,
		Speeds:                    r.Speeds,
		MaxSpeeds:                 r.MaxSpeeds,
		Skipped:                   r.Skipped,
	}
}

// PaceToProto encodes a pace; nil: it is not known.
func PaceToProto(p quorum.Pace) *torchftpb.Pace {
	if p.Own == 0 {
		return nil
	}
	return &torchftpb.Pace{GroupRank: p.Rank, OwnUs: p.Own.Microseconds(), ErrorUs: p.Error.Microseconds(),
		Host: p.Host}
}

// PaceFromProto decodes a pace. What cannot be one is unknown.
func PaceFromProto(p *torchftpb.Pace) quorum.Pace {
	if p.GetOwnUs() <= 0 || p.GetErrorUs() < 0 {
		return quorum.Pace{}
	}
	return quorum.Pace{Rank: p.GetGroupRank(), Own: rpc.Microseconds(p.GetOwnUs()),
		Error: rpc.Microseconds(p.GetErrorUs()), Host: p.GetHost()}
}
