package wire

import (
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/torchftpb"
)

// NoticeToRank returns the message that forwards a notice to a rank.
func NoticeToRank(n membership.Notice) *torchftpb.RankResponse {
	switch n.Kind {
	case membership.Stalled:
		return &torchftpb.RankResponse{Response: &torchftpb.RankResponse_MemberStalled{
			MemberStalled: &torchftpb.MemberStalled{QuorumId: n.QuorumID, ReplicaId: n.ReplicaID,
				Reason: n.Reason},
		}}
	case membership.Regressed:
		return &torchftpb.RankResponse{Response: &torchftpb.RankResponse_Regressed{
			Regressed: &torchftpb.JobRegressed{QuorumId: n.QuorumID, Reason: n.Reason},
		}}
	case membership.ProgressAsked:
		return &torchftpb.RankResponse{Response: &torchftpb.RankResponse_ProgressAsked{ProgressAsked: true}}
	default:
		return &torchftpb.RankResponse{Response: &torchftpb.RankResponse_MemberFailed{
			MemberFailed: &torchftpb.MemberFailed{QuorumId: n.QuorumID, ReplicaId: n.ReplicaID,
				Reason: n.Reason, Step: n.Step},
		}}
	}
}

// NoticeFromRank is the inverse of NoticeToRank; false if the message is no notice.
func NoticeFromRank(resp *torchftpb.RankResponse) (membership.Notice, bool) {
	switch r := resp.GetResponse().(type) {
	case *torchftpb.RankResponse_MemberFailed:
		f := r.MemberFailed
		return membership.Notice{
			Kind: membership.MemberFailed, QuorumID: f.GetQuorumId(), ReplicaID: f.GetReplicaId(),
			Reason: f.GetReason(), Step: f.GetStep(),
		}, true
	case *torchftpb.RankResponse_MemberStalled:
		f := r.MemberStalled
		return membership.Notice{Kind: membership.Stalled, QuorumID: f.GetQuorumId(),
			ReplicaID: f.GetReplicaId(), Reason: f.GetReason()}, true
	case *torchftpb.RankResponse_Regressed:
		return membership.Notice{Kind: membership.Regressed, QuorumID: r.Regressed.GetQuorumId(),
			Reason: r.Regressed.GetReason()}, true
	case *torchftpb.RankResponse_ProgressAsked:
		return membership.Notice{Kind: membership.ProgressAsked}, true
	}
	return membership.Notice{}, false
}
