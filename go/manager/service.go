package manager

import (
	"cmp"
	"context"
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/torchftpb"
)

// service converts the calls of torchft.ManagerService to the server's and back.
type service struct {
	torchftpb.UnimplementedManagerServiceServer
	server *Server
}

func (s service) Quorum(ctx context.Context, req *torchftpb.ManagerQuorumRequest) (*torchftpb.ManagerQuorumResponse, error) {
	ctx = tracing.Below(ctx, cmp.Or(req.GetTraceparent(), tracing.Incoming(ctx)))
	result, err := s.server.quorum(ctx, connectionOf(ctx), rpc.RequestFromProto(req))
	if err != nil {
		return nil, err
	}
	return rpc.ResultToProto(result), nil
}

func (s service) CheckpointMetadata(ctx context.Context, req *torchftpb.CheckpointMetadataRequest) (*torchftpb.CheckpointMetadataResponse, error) {
	text, err := s.server.checkpointMetadata(ctx, req.GetRank())
	if err != nil {
		return nil, err
	}
	return &torchftpb.CheckpointMetadataResponse{CheckpointMetadata: text}, nil
}

func (s service) ShouldCommit(ctx context.Context, req *torchftpb.ShouldCommitRequest) (*torchftpb.ShouldCommitResponse, error) {
	ctx = tracing.Below(ctx, cmp.Or(req.GetTraceparent(), tracing.Incoming(ctx)))
	commit, err := s.server.shouldCommit(ctx, connectionOf(ctx), req.GetGroupRank(), req.GetStep(), req.GetShouldCommit())
	if err != nil {
		return nil, err
	}
	return &torchftpb.ShouldCommitResponse{ShouldCommit: commit}, nil
}

func (s service) Kill(ctx context.Context, req *torchftpb.KillRequest) (*torchftpb.KillResponse, error) {
	if err := rpc.CheckEnding(ctx, s.server.cfg.Security.HasTokens()); err != nil {
		return nil, err
	}
	s.server.exit(req.GetMsg())
	return &torchftpb.KillResponse{}, nil
}

// exitDelay lets the answer to kill leave before the process ends.
const exitDelay = 50 * time.Millisecond

func (s *Server) exit(why string) {
	s.log.Error("torchft: this process ends because it was told to (kill)", "message", why)
	rpc.Go(&s.tasks, s.log, "kill", func() {
		select {
		case <-time.After(exitDelay):
		case <-s.ctx.Done():
		}
		s.cfg.Exit(1)
	})
}
