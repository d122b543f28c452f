package manager

import (
	"cmp"
	"context"
	"time"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/round"
	"github.com/torchft/torchft/go/torchftpb"
)

// service serves torchft.ManagerService and torchft.RankService: it converts requests and answers.
type service struct {
	torchftpb.UnimplementedManagerServiceServer
	torchftpb.UnimplementedRankServiceServer
	server *Server
	conn   *connection // of all calls; nil: it follows from the context of each
}

func (s service) Quorum(
	ctx context.Context, req *torchftpb.ManagerQuorumRequest,
) (*torchftpb.ManagerQuorumResponse, error) {
	a := s.do(ctx, quorumFromProto(req))
	if a.err != nil {
		return nil, a.err
	}
	return wire.ResultToProto(a.result), nil
}

func (s service) CheckpointMetadata(
	ctx context.Context, req *torchftpb.CheckpointMetadataRequest,
) (*torchftpb.CheckpointMetadataResponse, error) {
	a := s.server.do(ctx, rankCall{kind: metadataCall, Request: round.Request{GroupRank: req.GetRank()}})
	if a.err != nil {
		return nil, a.err
	}
	return &torchftpb.CheckpointMetadataResponse{CheckpointMetadata: a.metadata}, nil
}

func (s service) ShouldCommit(
	ctx context.Context, req *torchftpb.ShouldCommitRequest,
) (*torchftpb.ShouldCommitResponse, error) {
	a := s.do(ctx, voteFromProto(req))
	if a.err != nil {
		return nil, a.err
	}
	return &torchftpb.ShouldCommitResponse{ShouldCommit: a.commit, Stands: a.stands}, nil
}

// do handles a call of a rank. The rank counts as disconnected when the connection of its calls breaks.
func (s service) do(ctx context.Context, c rankCall) answer {
	c.conn, c.traceparent = cmp.Or(s.conn, connectionOf(ctx)), cmp.Or(c.traceparent, tracing.Incoming(ctx))
	return s.server.do(ctx, c)
}

// Leave waits for the lighthouse, not for the other ranks.
func (s service) Leave(ctx context.Context, _ *torchftpb.LeaveRequest) (*torchftpb.LeaveResponse, error) {
	return &torchftpb.LeaveResponse{}, s.server.leave(ctx)
}

func (s service) Kill(ctx context.Context, req *torchftpb.KillRequest) (*torchftpb.KillResponse, error) {
	if err := auth.CheckEnding(ctx, s.server.cfg.Security.HasTokens()); err != nil {
		return nil, err
	}
	s.server.end("a kill was requested: " + req.GetMsg())
	return &torchftpb.KillResponse{}, nil
}

// exitDelay is the time for the answer to a kill to be sent before the process ends.
const exitDelay = 50 * time.Millisecond

// end ends the process.
func (s *Server) end(why string) {
	s.log.Error("torchft: this process ends", "reason", why)
	rpc.Go(&s.tasks, s.log, "end", func() {
		select {
		case <-time.After(exitDelay):
		case <-s.ctx.Done():
		}
		s.cfg.Exit(1)
	})
}
