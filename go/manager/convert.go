package manager

import (
	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/torchftpb"
)

// resultToProto is the wire form of a result. The wire has room for one source: the first.
func resultToProto(r recovery.Result) *torchftpb.ManagerQuorumResponse {
	p := &torchftpb.ManagerQuorumResponse{
		QuorumId:               r.QuorumID,
		RecoverDstReplicaRanks: r.RecoverDstReplicaRank,
		StoreAddress:           r.StoreAddress,
		MaxStep:                r.MaxStep,
		MaxReplicaRank:         r.MaxReplicaRank,
		MaxWorldSize:           r.MaxWorldSize,
		ReplicaRank:            r.ReplicaRank,
		ReplicaWorldSize:       r.ReplicaWorldSize,
		Heal:                   r.Heal,
		CommitFailures:         r.CommitFailures,
		ReplicaIds:             r.ReplicaIDs,
		ReconfigureHandles:     r.Handles,
		ReplicasWithoutHandles: r.WithoutHandles,
	}
	if len(r.Sources) > 0 {
		p.RecoverSrcManagerAddress = r.Sources[0].ManagerAddress
		p.RecoverSrcReplicaRank = &r.Sources[0].ReplicaRank
	}
	return p
}

// resultFromProto is the inverse of resultToProto, but for the sources after the first.
func resultFromProto(p *torchftpb.ManagerQuorumResponse) recovery.Result {
	r := recovery.Result{
		QuorumID:              p.GetQuorumId(),
		ReplicaRank:           p.GetReplicaRank(),
		ReplicaWorldSize:      p.GetReplicaWorldSize(),
		RecoverDstReplicaRank: p.GetRecoverDstReplicaRanks(),
		StoreAddress:          p.GetStoreAddress(),
		MaxStep:               p.GetMaxStep(),
		MaxReplicaRank:        p.MaxReplicaRank,
		MaxWorldSize:          p.GetMaxWorldSize(),
		Heal:                  p.GetHeal(),
		CommitFailures:        p.GetCommitFailures(),
		ReplicaIDs:            p.GetReplicaIds(),
		Handles:               p.GetReconfigureHandles(),
		WithoutHandles:        p.GetReplicasWithoutHandles(),
	}
	if p.RecoverSrcReplicaRank != nil {
		r.Sources = []recovery.Source{{ReplicaRank: p.GetRecoverSrcReplicaRank(), ManagerAddress: p.GetRecoverSrcManagerAddress()}}
	}
	return r
}
