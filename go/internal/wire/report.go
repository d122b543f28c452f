package wire

import (
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/torchftpb"
)

// HealProgressToProto returns the wire form of the progress of a heal.
func HealProgressToProto(p membership.HealProgress) *torchftpb.HealProgress {
	return &torchftpb.HealProgress{GroupRank: p.GroupRank, Received: p.Received, Total: p.Total}
}

// HealProgressFromProto is the inverse of HealProgressToProto.
func HealProgressFromProto(p *torchftpb.HealProgress) membership.HealProgress {
	return membership.HealProgress{GroupRank: p.GetGroupRank(), Received: p.GetReceived(), Total: p.GetTotal()}
}

// mostPhases bounds the memory that a rank's report can use in a server.
const mostPhases = 16

// RecoveredToProto returns the wire form of the cost of a recovery.
func RecoveredToProto(r membership.Recovered) *torchftpb.Recovered {
	p := &torchftpb.Recovered{
		GroupRank: r.GroupRank, Healed: r.Healed, QuorumId: r.QuorumID, Step: r.Step, Bytes: r.Bytes, StepsLost: r.StepsLost,
	}
	for _, phase := range r.Phases {
		p.Phases = append(p.Phases, &torchftpb.PhaseTime{Phase: phase.Phase, Seconds: phase.Seconds})
	}
	return p
}

// RecoveredFromProto is the inverse of RecoveredToProto, for the first mostPhases phases.
func RecoveredFromProto(p *torchftpb.Recovered) membership.Recovered {
	r := membership.Recovered{
		GroupRank: p.GetGroupRank(), Healed: p.GetHealed(), QuorumID: p.GetQuorumId(), Step: p.GetStep(), Bytes: p.GetBytes(),
		StepsLost: p.GetStepsLost(),
	}
	for _, phase := range p.GetPhases()[:min(len(p.GetPhases()), mostPhases)] {
		r.Phases = append(r.Phases, membership.PhaseTime{Phase: phase.GetPhase(), Seconds: phase.GetSeconds()})
	}
	return r
}

// NoticeToRank returns the message that forwards a notice to a rank.
func NoticeToRank(n membership.Notice) *torchftpb.RankResponse {
	switch n.Kind {
	case membership.Stalled:
		return &torchftpb.RankResponse{Response: &torchftpb.RankResponse_MemberStalled{
			MemberStalled: &torchftpb.MemberStalled{QuorumId: n.QuorumID, ReplicaId: n.ReplicaID, Reason: n.Reason},
		}}
	case membership.Regressed:
		return &torchftpb.RankResponse{Response: &torchftpb.RankResponse_Regressed{
			Regressed: &torchftpb.JobRegressed{QuorumId: n.QuorumID, Reason: n.Reason},
		}}
	case membership.ProgressAsked:
		return &torchftpb.RankResponse{Response: &torchftpb.RankResponse_ProgressAsked{ProgressAsked: true}}
	default:
		return &torchftpb.RankResponse{Response: &torchftpb.RankResponse_MemberFailed{
			MemberFailed: &torchftpb.MemberFailed{QuorumId: n.QuorumID, ReplicaId: n.ReplicaID, Reason: n.Reason, Step: n.Step},
		}}
	}
}

// NoticeFromRank is the inverse of NoticeToRank; false if the message is no notice.
func NoticeFromRank(resp *torchftpb.RankResponse) (membership.Notice, bool) {
	switch r := resp.GetResponse().(type) {
	case *torchftpb.RankResponse_MemberFailed:
		f := r.MemberFailed
		return membership.Notice{
			Kind: membership.MemberFailed, QuorumID: f.GetQuorumId(), ReplicaID: f.GetReplicaId(), Reason: f.GetReason(), Step: f.GetStep(),
		}, true
	case *torchftpb.RankResponse_MemberStalled:
		f := r.MemberStalled
		return membership.Notice{Kind: membership.Stalled, QuorumID: f.GetQuorumId(), ReplicaID: f.GetReplicaId(), Reason: f.GetReason()}, true
	case *torchftpb.RankResponse_Regressed:
		return membership.Notice{Kind: membership.Regressed, QuorumID: r.Regressed.GetQuorumId(), Reason: r.Regressed.GetReason()}, true
	case *torchftpb.RankResponse_ProgressAsked:
		return membership.Notice{Kind: membership.ProgressAsked}, true
	}
	return membership.Notice{}, false
}
