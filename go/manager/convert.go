package manager

import (
	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/torchftpb"
)

func quorumToProto(args QuorumArgs) *torchftpb.ManagerQuorumRequest {
	return &torchftpb.ManagerQuorumRequest{
		GroupRank:          args.GroupRank,
		Step:               args.Step,
		CheckpointMetadata: args.CheckpointMetadata,
		ShrinkOnly:         args.ShrinkOnly,
		InitSync:           args.InitSync,
		CommitFailures:     args.CommitFailures,
		CommittedQuorumId:  args.CommittedQuorumID,
		ReconfigureHandle:  args.Handle,
		GroupWorldSize:     args.GroupWorldSize,
		Traceparent:        args.Traceparent,
	}
}

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
		CommittedQuorumId:      r.CommittedQuorumID,
		Replay:                 r.Replay,
		Draining:               r.Draining,
		ReplicaIds:             r.ReplicaIDs,
		ReconfigureHandles:     r.Handles,
		ReplicasWithoutHandles: r.WithoutHandles,
		HelperManagerAddresses: r.Helpers,
		HelpDstReplicaRanks:    r.HelpDstReplicaRank,
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
		CommittedQuorumID:     p.GetCommittedQuorumId(),
		Replay:                p.GetReplay(),
		Draining:              p.GetDraining(),
		ReplicaIDs:            p.GetReplicaIds(),
		Handles:               p.GetReconfigureHandles(),
		WithoutHandles:        p.GetReplicasWithoutHandles(),
		Helpers:               p.GetHelperManagerAddresses(),
		HelpDstReplicaRank:    p.GetHelpDstReplicaRanks(),
	}
	if p.RecoverSrcReplicaRank != nil {
		r.Sources = []recovery.Source{{ReplicaRank: p.GetRecoverSrcReplicaRank(), ManagerAddress: p.GetRecoverSrcManagerAddress()}}
	}
	return r
}
