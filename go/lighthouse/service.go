package lighthouse

import (
	"context"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// service serves torchft.LighthouseService: it converts requests and answers.
type service struct {
	torchftpb.UnimplementedLighthouseServiceServer
	server *Server
}

// answerMargin is the longest time by which a wait ends before its caller's deadline, so that the caller
// still receives the reason.
const answerMargin = 50 * time.Millisecond

// serviceDesc returns the generated description with another handler of Quorum, which answers with encoded
// bytes (rpc.Encoded).
func serviceDesc() *grpc.ServiceDesc {
	desc := torchftpb.LighthouseService_ServiceDesc
	desc.Methods = slices.Clone(desc.Methods)
	for i := range desc.Methods {
		if desc.Methods[i].MethodName == "Quorum" {
			desc.Methods[i].Handler = handleQuorum
		}
	}
	return &desc
}

func handleQuorum(
	srv any, ctx context.Context, decode func(any) error, intercept grpc.UnaryServerInterceptor,
) (any, error) {
	req := new(torchftpb.LighthouseQuorumRequest)
	if err := decode(req); err != nil {
		return nil, err
	}
	info := &grpc.UnaryServerInfo{Server: srv, FullMethod: torchftpb.LighthouseService_Quorum_FullMethodName}
	return intercept(ctx, req, info, func(ctx context.Context, req any) (any, error) {
		return srv.(service).answerQuorum(ctx, req.(*torchftpb.LighthouseQuorumRequest))
	})
}

func (s service) answerQuorum(
	ctx context.Context, req *torchftpb.LighthouseQuorumRequest,
) (rpc.Encoded, error) {
	if err := checkReplicaID(req.GetRequester().GetReplicaId()); err != nil {
		return nil, err
	}
	if err := s.server.refuseList(req.GetLighthouses()); err != nil {
		return nil, err
	}
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	if deadline, ok := ctx.Deadline(); ok {
		// At the deadline itself the client's own timer ends the call, and the reason would be lost.
		ctx, cancel = context.WithDeadline(ctx, rpc.Sooner(deadline, answerMargin))
		defer cancel()
	}
	job, err := s.server.use(ctx)
	if err != nil {
		return nil, err
	}
	defer job.done()
	span := tracing.Continue(tracing.Incoming(ctx), "lighthouse.quorum", req.GetRequester().GetStep(),
		attribute.String("torchft.replica_id", req.GetRequester().GetReplicaId()))
	d, err := job.quorum(ctx, quorum.Asked{
		Member:        wire.MemberFromProto(req.GetRequester()),
		KnownQuorumID: req.GetKnownQuorumId(),
		Number:        req.GetRequestNumber(),
	})
	endSpan(span, answer{d, err})
	if err != nil {
		return nil, err
	}
	return d.answer()
}

func (s service) Heartbeat(
	ctx context.Context, req *torchftpb.LighthouseHeartbeatRequest,
) (*torchftpb.LighthouseHeartbeatResponse, error) {
	if err := checkReplicaID(req.GetReplicaId()); err != nil {
		return nil, err
	}
	job, err := s.server.use(ctx)
	if err != nil {
		return nil, err
	}
	defer job.done()
	job.board.Heard()
	known, err := job.knows(req.GetReplicaId())
	if err == nil && !known {
		err = s.server.gate.Join(ctx)
	}
	if err != nil {
		return nil, err
	}
	if err := job.feed(quorum.Beat{ReplicaID: req.GetReplicaId(), Call: true}); err != nil {
		return nil, err
	}
	return &torchftpb.LighthouseHeartbeatResponse{}, nil
}

func checkReplicaID(id string) error {
	if id == "" {
		return status.Error(codes.InvalidArgument,
			`replica_id is "": it must be a name that no other replica group has`)
	}
	if len(id) > rpc.MaxReplicaID {
		return status.Errorf(codes.InvalidArgument, "replica_id has %d bytes: allowed are %d", len(id),
			rpc.MaxReplicaID)
	}
	return nil
}

// refuseList returns the error for a member that knows several lighthouses, if this one is in no cluster:
// each of them would form quorums of its own, and the job would have several histories.
func (s *Server) refuseList(lighthouses uint32) error {
	if lighthouses <= 1 || len(s.cfg.Cluster) > 0 {
		return nil
	}
	list := "URL" + strings.Repeat(",URL", int(min(lighthouses, rpc.MaxLighthouses))-1)
	return status.Errorf(codes.FailedPrecondition,
		"TORCHFT_LIGHTHOUSE names %d lighthouses, and this one, %s, is in no cluster: "+
			"start each of them with --cluster %s, or name one lighthouse", lighthouses, s.address, list)
}
